"""From llama-server's last words and exit state to cause and remedy: the table `models/failures.toml`."""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflashcpp import knowledge
from dflashcpp.errors import DflashError

_TAIL_BYTES = 256 * 1024


@dataclass(frozen=True)
class Diagnosis:
    """Why a server ended. `kind` for programs, `cause` and `fix` for people, `line` the text that told."""

    kind: str
    cause: str
    fix: str
    line: str = ""


def diagnose(log: str, returncode: int | None = None) -> Diagnosis | None:
    """The first row that fits the log text and the exit state; None when none does.

    `returncode` as `subprocess` has it: negative for a signal, None when the server still runs (then rows
    that need an exit are passed over).
    """
    told = _without_harmless(log)
    for row in knowledge.table("models/failures.toml")["failure"]:
        if row.get("harmless") or not _state_fits(row.get("exit"), returncode):
            continue
        found = re.search(row["text"], told) if "text" in row else None
        if "text" in row and found is None:
            continue
        return _diagnosis(row, found, returncode)
    return None


def _without_harmless(log: str) -> str:
    """The log without the lines that look like errors and are none."""
    rows = knowledge.table("models/failures.toml")["failure"]
    harmless = [re.compile(row["text"]) for row in rows if row.get("harmless")]
    return "\n".join(line for line in log.splitlines() if not any(one.search(line) for one in harmless))


def _state_fits(wanted: str | None, returncode: int | None) -> bool:
    if wanted is None:
        return True
    if returncode is None or wanted == "runs":
        return wanted == "runs" and returncode is None
    return {
        "signal": returncode < 0,
        "killed": returncode == -signal.SIGKILL,
        "asked": returncode in (-signal.SIGTERM, -signal.SIGINT, -signal.SIGHUP),
        "code": returncode > 0,
        "clean": returncode == 0,
    }[wanted]


def _diagnosis(row: Mapping[str, Any], found: re.Match[str] | None, returncode: int | None) -> Diagnosis:
    values = {key: value or "no reason given" for key, value in (found.groupdict() if found else {}).items()}
    values["signal"] = _signal_name(returncode)
    line = _line_around(found) if found else ""
    return Diagnosis(row["kind"], row["cause"].format(**values), row["fix"].format(**values), line)


def _line_around(found: re.Match[str]) -> str:
    start = found.string.rfind("\n", 0, found.start()) + 1
    end = found.string.find("\n", found.end())
    return found.string[start : end if end >= 0 else None].strip()


def _signal_name(returncode: int | None) -> str:
    if returncode is None or returncode >= 0:
        return "none"
    try:
        return signal.Signals(-returncode).name
    except ValueError:
        return str(-returncode)


def tail(log: Path, size: int = _TAIL_BYTES) -> str:
    """The last `size` bytes of a log as text; empty when there is none."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - size))
            return file.read().decode("utf-8", errors="replace")
    except OSError:
        return ""


def explain_exit(log: Path, returncode: int, *, when: str = "") -> DflashError:
    """Why llama-server ended, as an error: cause, what to do, and where its log is."""
    text = tail(log)
    known = diagnose(text, returncode)
    state = f"signal {_signal_name(returncode)}" if returncode < 0 else f"exit code {returncode}"
    moment = f" {when}" if when else ""
    if known is None:
        last = next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "it said nothing")
        return DflashError(f"llama-server ended{moment} ({state}): {last[:200]}", hint=f"its log: {log}")
    message = f"llama-server ended{moment} ({state}): {known.cause}"
    return DflashError(message, hint=f"{_memory_advice(known, text) or known.fix}; its log: {log}")


def _memory_advice(known: Diagnosis, text: str) -> str | None:
    """For memory that ran out: in which phase, and what to change there; what the table says otherwise."""
    if known.kind != "memory":
        return None
    from dflashcpp.memory.account import out_of_memory

    found = out_of_memory(text.splitlines())
    return f"it ran out at: {found.phase}; {found.advice}; or: {known.fix}" if found else None
