"""The engine's own numbers before a start: `llama-fit-params -fitp json` of our patched build.

It takes llama-server's flags, builds both contexts without allocating them and prints bytes by context
and device (patches/0c1e570, 0003-measure-the-drafter). A build without that patch says nothing we can use.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dflashcpp.errors import DflashError
from dflashcpp.memory.lines import ENGINE, Line

MIB = 1 << 20
_TIMEOUT = 300.0
_PARTS = ("model", "context", "compute")


@dataclass(frozen=True)
class Measured:
    """MiB by (context, place): `model` (weights), `context` (caches), `compute` (with tapped layers)."""

    sizes: Mapping[tuple[str, str], Mapping[str, float]]
    context: int

    def mib(self, context: str, place: str, part: str) -> float | None:
        """One figure; None when the engine has no such memory."""
        return self.sizes.get((context, place), {}).get(part)


def measure(
    binary: Path, target: str | Path, drafter: str | Path | None, flags: Sequence[str]
) -> Measured | None:
    """Ask `binary` (llama-fit-params); None when this build cannot print both contexts.

    Raises DflashError with the engine's words when it cannot make sense of the files.
    """
    command = [str(binary), "-m", str(target), *flags, "-fitp", "json"]
    if drafter is not None:
        command += ["-md", str(drafter), "--spec-type", "draft-dflash"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT, errors="replace")
    except (OSError, subprocess.TimeoutExpired) as error:
        raise DflashError(f"{binary.name} did not answer: {error}") from error
    if done.returncode == 0:
        return parse(done.stdout)
    if "invalid argument" in done.stderr or "error while handling argument" in done.stderr:
        return None  # this build does not know the question
    raise _failed(binary, done.stderr)


def _failed(binary: Path, said: str) -> DflashError:
    errors = [line for line in said.splitlines() if " E " in line or "error" in line.lower()]
    return DflashError(
        f"{binary.name}: {errors[-1].strip() if errors else 'it gave no reason'}",
        hint="--no-engine plans by formulas",
    )


def parse(text: str) -> Measured | None:
    """The JSON object among what llama-fit-params printed; None when there is none."""
    for line in reversed(text.splitlines()):
        if line.startswith("{"):
            try:
                return _measured(json.loads(line))
            except (ValueError, KeyError, TypeError):
                return None
    return None


def _measured(data: Mapping[str, Any]) -> Measured:
    sizes: dict[tuple[str, str], dict[str, float]] = {}
    for context in ("target", "draft"):
        for row in data.get(context, ()):
            place = "host" if row["device"] == "Host" else "device"
            held = sizes.setdefault((context, place), dict.fromkeys(_PARTS, 0.0))
            for part in _PARTS:
                held[part] += row[part] / MIB
    return Measured(sizes, int(data.get("n_ctx", 0)))


def with_engine(lines: Sequence[Line], measured: Measured) -> list[Line]:
    """`lines` with the engine's compute buffers in place of our formulas.

    What reading the drafter's layers adds is part of the target's figure, so its own line goes.
    """
    found: list[Line] = []
    for line in lines:
        told = measured.mib(line.context, line.place, "compute")
        if told is None or line.kind not in ("compute", "extraction"):
            found.append(line)
        elif line.kind == "compute":
            found.append(replace(line, mib=told, origin=ENGINE, error=0.0))
    return found


def disagreements(lines: Sequence[Line], measured: Measured, twice: float = 0.0) -> list[str]:
    """Sentences for weights and caches on which plan and engine differ by more than 1 % and 4 MiB.

    twice: MiB of the target's mapped weights that the engine may count twice.
    """
    kinds = {"model": ("weights",), "context": ("kv", "kv_swa", "recurrent")}
    found = []
    for (context, place), held in measured.sizes.items():
        for part, names in kinds.items():
            plan = sum(
                line.mib
                for line in lines
                if (line.context, line.place) == (context, place) and line.kind in names
            )
            off = abs(plan - held[part])
            if (context, part) == ("target", "model"):
                off = min(off, abs(plan + twice - held[part]))
            if off > 4.0 and off > 0.01 * held[part]:
                found.append(
                    f"{context} {part} on the {place}: the plan says {plan:.2f} MiB, "
                    f"the engine {held[part]:.2f} MiB"
                )
    return found
