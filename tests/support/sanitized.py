"""A llama-server compiled with sanitizers: run it, end it, and read whether they complained."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from dflashcpp.server import LlamaServer
from tests.support.deep_builds import DeepBuild

SUPPRESSED = Path(__file__).with_name("sanitizers")  # what llama.cpp's own code does, by place
_COMPLAINT = re.compile(
    r"runtime error: |ERROR: (?:Address|Leak)Sanitizer|(?:Address|Leak)Sanitizer:? .*error"
)


def options() -> dict[str, str]:
    """The environment: the first report ends the process, and so does memory nobody points to at its end."""
    common = "halt_on_error=1:print_stacktrace=1"
    undefined, leaks = (SUPPRESSED / name for name in ("undefined.txt", "leaks.txt"))
    return {
        "ASAN_OPTIONS": f"{common}:detect_leaks=1:detect_stack_use_after_return=1:strict_string_checks=1",
        "UBSAN_OPTIONS": f"{common}:suppressions='{undefined}'",
        "LSAN_OPTIONS": f"suppressions='{leaks}':print_suppressions=0",
    }


def sanitizers_in(program: Path) -> set[str]:
    """Those that this program or library was compiled with: `address`, `undefined`."""
    calls = {"address": b"__asan_report_", "undefined": b"__ubsan_handle_"}
    code = program.read_bytes()
    return {name for name, call in calls.items() if call in code}


def complaints(said: str) -> str:
    """From the first report on, 60 lines; empty when there is none."""
    lines = said.splitlines()
    first = next((at for at, line in enumerate(lines) if _COMPLAINT.search(line)), None)
    return "" if first is None else "\n".join(lines[first : first + 60])


@contextmanager
def watched(
    build: DeepBuild, target: Path, drafter: Path | None, folder: Path, **flags: Any
) -> Iterator[LlamaServer]:
    """A server of `build`. At the end it must have ended well by itself, and no sanitizer have complained."""
    log = folder / "log"
    given = {"threads": 1, "cache_ram": 64, "slot_save_path": str(folder), **flags}
    with pytest.MonkeyPatch.context() as patch:
        for name, text in {**options(), "DFLASHCPP_TRACE": str(folder / "trace")}.items():
            patch.setenv(name, text)
        program = build.program("llama-server")
        server = LlamaServer(target, drafter, build=program, log=log, stall=600.0, **given)
        try:
            yield server.start()
        finally:
            code = server.stop(grace=120.0)
            said = log.read_text(encoding="utf-8", errors="replace")
            assert not complaints(said), complaints(said)
            assert "does not match expectation" not in said, "a compute buffer grew"
            assert code == 0, f"exit code {code}{os.linesep}{said[-2000:]}"
