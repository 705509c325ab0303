"""Plan against llama-server: every buffer of target and drafter, for many shapes and flags.

    python -m benchmarks.memory [--pristine LLAMA_SERVER] [--patched LLAMA_SERVER] [--only NAME] [--json]

The models have real widths and weights that are holes in sparse files (tests/support). Without paths
the builds in the cache are taken. Two other ways to know the same are shown beside the plan: llama.cpp's
own `--fit`, and the accuracy that gguf-parser's README claims.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from gguf import GGMLQuantizationType as Type

from dflashcpp.errors import DflashError
from dflashcpp.memory import measure, planning, sources
from dflashcpp.memory.engine import EngineMemory, parse_log
from dflashcpp.memory.lines import Line
from dflashcpp.memory.settings import Settings, from_flags, to_flags
from tests.support.engine_memory import server_log
from tests.support.gguf_shapes import TARGETS, write_target
from tests.support.sparse_models import Shape, write_drafter

GGUF_PARSER = "gguf-parser 0.13.8 says of itself: within about 100 MiB; it knows no DFlash drafter"
FLAGS = ("--no-warmup", "--no-repack", "-t", "1", "-lv", "4", "--port", "0")
KINDS = ("weights", "kv", "kv_swa", "recurrent", "compute", "output")
_PROJECTED = re.compile(r"projected to use (\d+) MiB of host memory")


@dataclass(frozen=True)
class Case:
    """A target by its name in tests/support/gguf_shapes, the drafter's version and window, flags."""

    target: str
    version: int
    window: int | None
    flags: str
    ffn: int = 0


CASES = (
    Case("muse-glimmer-30b", 2, 2048, "-c 8192 -ub 512 -np 1 --spec-draft-n-max 4"),
    Case("muse-glimmer-30b", 1, 2048, "-c 8192 -ub 64 -np 4 --spec-draft-n-max 4"),
    Case("llama-3.1-8b", 1, None, "-c 4096 -ub 512 -np 1 --spec-draft-n-max 4"),
    Case("llama-3.1-8b", 2, 2048, "-c 8192 -ub 64 -np 4 -ctkd q8_0 -ctvd q8_0 -fa on --spec-draft-n-max 4"),
    Case("mistral-small-24b", 1, None, "-c 4096 -ub 512 -np 1 --spec-draft-n-max 7", 16384),
    Case("qwen3-8b", 1, None, "-c 4096 -ub 512 -np 4 --spec-draft-n-max 15"),
    Case("qwen3-4b", 1, None, "-c 4096 -ub 256 -np 1 -kvu -ctk q8_0 -ctv q8_0 -fa on --spec-draft-n-max 7"),
    Case("qwen3-30b-a3b", 1, None, "-c 8192 -ub 512 -np 4 -kvu --spec-draft-n-max 4", 6144),
    Case("qwen3.5-27b", 2, 2048, "-c 4096 -ub 512 -np 1 --spec-draft-n-max 7"),
    Case("qwen3.5-35b-a3b", 1, 4096, "-c 8192 -ub 64 -np 4 --spec-draft-n-max 4", 6144),
    Case("gemma-4-31b", 1, 2048, "-c 4096 -ub 512 -np 1 --spec-draft-n-max 4", 10752),
    Case("gemma-4-26b-a4b", 1, 2048, "-c 4096 -ub 64 -np 4 --spec-draft-n-max 4", 5632),
    Case(
        "gemma-4-31b", 2, 2048, "-c 500 -ub 1024 -b 512 -np 2 -ctk q8_0 -ctv q8_0 --spec-draft-n-max 7", 10752
    ),
    Case(
        "nemotron-nano-9b", 1, None, "-c 4096 -ub 64 -np 3 -kvu -fa off --swa-full --spec-draft-n-max 1", 6144
    ),
    Case("gpt-oss-20b", 1, None, "-c 4096 -ub 512 -np 1 -fa off --spec-draft-n-max 4", 7680),
    Case("nemotron-3-30b-a3b", 2, 2048, "-c 4096 -ub 512 -np 2 --spec-draft-n-max 3", 6144),
)


@dataclass(frozen=True)
class Result:
    """One run: the worst line and the worst compute line, planned against told (MiB).

    fit: what `--fit` projected. asked: how far the compute buffers that llama-fit-params told before the
    start are off, at worst; None for an engine that cannot be asked.
    """

    case: str
    flags: str
    engine: str
    lines: int
    worst: str
    worst_mib: float
    worst_percent: float
    compute_percent: float
    told: float
    planned: float
    fit: float | None
    asked: float | None


def main(arguments: list[str] | None = None) -> int:
    """Run every case with every build, print the table; 1 when a line is off by more than promised."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pristine", type=Path)
    parser.add_argument("--patched", type=Path)
    parser.add_argument("--only", help="targets whose name holds this text")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args(arguments)
    binaries = {name: getattr(given, name) or _found(name) for name in ("pristine", "patched")}
    results = []
    for case in CASES:
        if given.only and given.only not in case.target:
            continue
        results += run(case, binaries)
        if not given.json:
            print(_row(results[-2]), _row(results[-1]), sep="\n", flush=True)
    return _summary(results, as_json=given.json)


def _found(name: str) -> Path:
    from dflashcpp.llamacpp import find_build

    build = find_build(patched=name == "patched")
    if build is None:
        flag = "" if name == "patched" else " --no-patches"
        raise DflashError(f"there is no {name} build", hint=f"dflashcpp build{flag}, or --{name} FILE")
    return build.binary("llama-server")


def run(case: Case, binaries: dict[str, Path]) -> list[Result]:
    """The case with every build."""
    with tempfile.TemporaryDirectory(prefix="memory-") as scratch:
        target, drafter = write_files(case, Path(scratch))
        return [_measure(case, name, binary, target, drafter) for name, binary in binaries.items()]


def write_files(case: Case, folder: Path) -> tuple[Path, Path]:
    """The sparse target and drafter of a case."""
    return (
        write_target(folder / "target.gguf", TARGETS[case.target]),
        write_drafter(folder / "drafter.gguf", _shape(case), case.version, weights=Type.Q4_0),
    )


def _shape(case: Case) -> Shape:
    target = TARGETS[case.target]
    return Shape(
        hidden=target.embd,
        ffn=case.ffn or target.ffn,
        heads=32,
        kv_heads=8,
        head_dim=128,
        vocab=target.vocab,
        layers=2,
        taps=3,
        window=case.window,
        target_layers=target.layers - 1,
    )


def _measure(case: Case, name: str, binary: Path, target: Path, drafter: Path) -> Result:
    words = case.flags.split()
    pair: list[str | Path] = ["-m", target, "-md", drafter, "--spec-type", "draft-dflash"]
    log = server_log(binary, [*pair, *words, *FLAGS], target.parent)
    if "listening on" not in log:
        raise DflashError(f"{case.target}: {binary} did not start: {log.strip().splitlines()[-1]}")
    settings, _ = from_flags(words, Settings(on_device=False, repack=False, patched=name == "patched"))
    lines = planning.make_lines(sources.from_gguf(target), sources.from_gguf(drafter), settings)
    told = parse_log(log.splitlines())
    asked = _asked(binary, target, drafter, settings, told) if settings.patched else None
    return compare(case, name, told, lines, _fit(log), asked)


def _asked(binary: Path, target: Path, drafter: Path, settings: Settings, told: EngineMemory) -> float:
    """MiB between the compute buffers the engine tells before a start and those the server then takes."""
    measured = measure.measure(binary.with_name("llama-fit-params"), target, drafter, to_flags(settings))
    if measured is None:
        raise DflashError(f"{binary.with_name('llama-fit-params')} cannot print target and drafter")
    return max(
        abs((measured.mib(context, "host", "compute") or 0.0) - told.mib(context, "compute"))
        for context in ("target", "draft")
    )


def _fit(log: str) -> float | None:
    """What `--fit` projected for target and drafter together; None when it said nothing."""
    found = _PROJECTED.search(log)
    return float(found[1]) if found else None


def compare(
    case: Case,
    name: str,
    told: EngineMemory,
    lines: list[Line],
    fit: float | None,
    asked: float | None = None,
) -> Result:
    """Line by line; a line only one of them has counts in full.

    The patched engine's compute buffer holds from the start what reading layers needs.
    """
    rows = []
    for context in ("target", "draft"):
        for kind in KINDS:
            engine = told.mib(context, kind)
            kinds = (kind, "extraction") if (kind, name) == ("compute", "patched") else (kind,)
            plan = sum(line.mib for line in lines if line.context == context and line.kind in kinds)
            if engine or plan:
                rows.append((f"{context} {kind}", engine, plan))
    worst = max(rows, key=lambda row: _percent(row[1], row[2]))
    computes = [_percent(engine, plan) for name_, engine, plan in rows if name_.endswith("compute")]
    return Result(
        case=f"{case.target} v{case.version}",
        flags=case.flags,
        engine=name,
        lines=len(rows),
        worst=worst[0],
        worst_mib=abs(worst[1] - worst[2]),
        worst_percent=_percent(worst[1], worst[2]),
        compute_percent=max(computes),
        told=sum(row[1] for row in rows),
        planned=sum(row[2] for row in rows),
        fit=fit,
        asked=asked,
    )


def _percent(engine: float, plan: float) -> float:
    """Against the engine's figure, which it prints to 0.01 MiB."""
    off = max(0.0, abs(plan - engine) - 0.005)
    return 100.0 * off / engine if engine else 100.0


def _row(row: Result) -> str:
    fit = "-" if row.fit is None else f"{row.fit - row.told:+.0f}"
    asked = "-" if row.asked is None else f"{row.asked:.3f}"
    return (
        f"{row.case:24} {row.engine:9} {row.told:9.2f} {row.planned:9.2f} {row.worst_mib:7.3f} "
        f"{row.worst_percent:7.3f} {row.compute_percent:7.3f} {asked:>7} {fit:>8}  {row.flags}"
    )


def _summary(results: list[Result], *, as_json: bool) -> int:
    worst = max(results, key=lambda row: row.worst_percent)
    ok = all(row.worst_percent <= 1.0 or row.worst_mib <= 4.0 for row in results)
    ok = ok and all(row.compute_percent <= 5.0 and (row.asked or 0.0) <= 0.01 for row in results)
    if as_json:
        print(json.dumps({"rows": [asdict(row) for row in results], "within_promise": ok}))
        return 0 if ok else 1
    print("columns: MiB told by llama-server, MiB planned, worst line MiB and %, worst compute line %,")
    print("         compute as llama-fit-params tells it before the start (worst MiB off),")
    print("         what --fit projects against the truth (MiB), flags")
    lines = sum(row.lines for row in results)
    print(f"worst of {lines} lines: {worst.worst_percent:.3f} % ({worst.case}, {worst.worst})")
    print(f"for comparison: {GGUF_PARSER}")
    print(f"again: {Path(sys.executable).name} -m benchmarks.memory {' '.join(sys.argv[1:])}".rstrip())
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
