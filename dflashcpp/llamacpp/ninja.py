"""Running cmake and ninja: everything to a log file, progress to whoever shows it, faults in one sentence."""

from __future__ import annotations

import re
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from dflashcpp.errors import DflashError
from dflashcpp.progress import Progress, Task

_STEP = re.compile(r"\[(\d+)/(\d+)\] (.*)")
_FAULT = re.compile(
    r"error:|fatal error|undefined reference|undefined symbol|\bKilled\b|No space left|CMake Error"
    r"|cannot find|ninja: error"
)
_HINTS = (
    (re.compile(r"Killed|out of memory|cannot allocate|bad_alloc", re.I), "memory ran out: try --jobs 1"),
    (re.compile(r"No space left"), "the disk is full: free some space and run the command again"),
    (
        re.compile(r"Could NOT find Vulkan|vulkan/vulkan"),
        "sudo apt-get install libvulkan-dev glslc spirv-headers",
    ),
    (re.compile(r"SPIRV-Headers|spirv\.hpp"), "sudo apt-get install spirv-headers"),
    (
        re.compile(r"stdlib\.h|cstdint|string\.h|bits/"),
        "the C++ headers are missing: sudo apt-get install build-essential",
    ),
    (
        re.compile(r"unsupported GNU version|host_config"),
        "nvcc does not take this compiler: set CC and CXX to an older one",
    ),
)


def configure(command: Sequence[str], log: Path, environment: Mapping[str, str], progress: Progress) -> None:
    """Run cmake's configure step. Raises DflashError with its error and the log's place."""
    with progress.task("configuring llama.cpp"), log.open("ab", buffering=0) as file:
        file.write(f"$ {' '.join(command)}\n".encode())
        file.flush()
        done = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, env=environment, check=False)
    if done.returncode:
        raise _failure("cmake could not configure llama.cpp", log)


def compile_targets(
    command: Sequence[str], log: Path, environment: Mapping[str, str], progress: Progress, label: str
) -> None:
    """Run ninja. It is ended with everything it started when we are. Raises DflashError as `configure`."""
    environment = {**environment, "NINJA_STATUS": "[%f/%t] "}
    with progress.task(label, unit="files") as task, log.open("ab", buffering=0) as file:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment)
        assert process.stdout is not None
        try:
            for line in process.stdout:
                file.write(line)
                _show(line.decode(errors="replace"), task)
            process.wait()
        except BaseException:
            process.send_signal(signal.SIGINT)  # ninja ends its compilers and removes half-written files
            process.wait()
            raise
    if process.returncode:
        raise _failure("llama.cpp did not compile", log)


def _show(line: str, task: Task) -> None:
    """Ninja tells one line a finished step; before the first of them the total is not known."""
    step = _STEP.match(line)
    if step:
        task.total(int(step[2]))
        task.note(Path(step[3].split()[-1]).name)
        task.advance()


def _failure(what: str, log: Path) -> DflashError:
    lines = log.read_text(errors="replace").splitlines()
    faults = [line.strip() for line in lines if _FAULT.search(line)]
    shown = faults[:3] or [line.strip() for line in lines if line.strip()][-3:]
    hints = [hint for pattern, hint in _HINTS if any(pattern.search(line) for line in faults)]
    words = " | ".join(line[:300] for line in shown)
    return DflashError(f"{what}: {words}", hint="; ".join([*hints[:1], f"the whole log is {log}"]))
