"""What a build needs from this machine: compilers, cmake, ninja, how many jobs, what its CPU is."""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dflashcpp.errors import DflashError

_GIB_A_JOB = 2.0  # a C++ file of llama.cpp takes up to about this much
_CMAKE_AT_LEAST = (3, 18)
_NINJA_AT_LEAST = (1, 10)
_FLAGS_OF = {"CC": "CFLAGS", "CXX": "CXXFLAGS"}
# cmake takes these from the environment when it configures a folder for the first time
_BUILD_VARIABLES = ("CFLAGS", "CXXFLAGS", "LDFLAGS", "CUDAFLAGS", "CUDAHOSTCXX", "CMAKE_PREFIX_PATH")


@dataclass(frozen=True)
class Tool:
    """A program: where it is, what it says it is, and the marks by which a replaced one is noticed."""

    path: str
    version: str
    size: int
    mtime_ns: int

    def unchanged(self) -> bool:
        """Whether the program on disk is still this one (by its marks, else by what it says)."""
        try:
            facts = Path(self.path).stat()
        except OSError:
            return True  # gone: what it built is no staler for that
        if (facts.st_size, facts.st_mtime_ns) == (self.size, self.mtime_ns):
            return True
        return says(self.path) == self.version

    def record(self) -> dict[str, Any]:
        """As kept in a build's manifest."""
        return asdict(self)


def tool(path: str) -> Tool:
    """The program at `path`, asked for its version."""
    facts = Path(path).stat()
    return Tool(path, says(path), facts.st_size, facts.st_mtime_ns)


def says(path: str, option: str = "--version") -> str:
    """What the program prints first about its version; empty when it cannot be run."""
    try:
        done = subprocess.run([path, option], capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip().split("\n\n")[0] if done.returncode == 0 else ""


def compiler_paths() -> tuple[str | None, str | None]:
    """The C and C++ compilers: `CC` and `CXX` where set, else what cmake would take on this system."""
    return _compiler("CC", ("cc", "gcc", "clang")), _compiler("CXX", ("c++", "g++", "clang++"))


def compilers() -> tuple[Tool, Tool]:
    """The compilers, each run once. Raises DflashError that says how to install what is missing."""
    c, cxx = compiler_paths()
    if c is None or cxx is None:
        missing = " and ".join(name for name, path in (("C", c), ("C++", cxx)) if path is None)
        raise DflashError(f"there is no {missing} compiler on this machine", hint=_install("build-essential"))
    found = tool(c), tool(cxx)
    for program in found:
        if not program.version:
            raise DflashError(f"the compiler {program.path} does not run", hint=_install("build-essential"))
    return found


def _compiler(variable: str, names: tuple[str, ...]) -> str | None:
    words = [word for word in shlex.split(os.environ.get(variable, "")) if Path(word).name != "ccache"]
    if len(words) > 1:
        raise DflashError(
            f"{variable} holds options ({shlex.join(words[1:])})", hint=f"put them in {_FLAGS_OF[variable]}"
        )
    for name in words or names:
        path = shutil.which(name)
        if path:
            return path
    return None


def _install(package: str) -> str:
    if sys.platform == "darwin":
        return "xcode-select --install" if package == "build-essential" else f"brew install {package}"
    return f"sudo apt-get install {package}"


def cmake() -> str:
    """A cmake that is new enough: from PATH, else from the PyPI package we depend on."""
    return _program("cmake", _CMAKE_AT_LEAST)


def ninja() -> str:
    """A ninja that is new enough: from PATH, else from the PyPI package we depend on."""
    return _program("ninja", _NINJA_AT_LEAST)


def _program(name: str, at_least: tuple[int, int]) -> str:
    wheel = _wheel_program(name)
    for path in filter(None, (shutil.which(name), wheel)):
        match = re.search(r"(\d+)\.(\d+)", says(path))
        if match and (int(match[1]), int(match[2])) >= at_least:
            return path
    wanted = ".".join(map(str, at_least))
    raise DflashError(
        f"{name} {wanted} or newer is needed",
        hint=f"{sys.executable} -m pip install {name}  (or {_install(name)})",
    )


def _wheel_program(name: str) -> str | None:
    import importlib

    try:
        module = importlib.import_module(name)
    except ImportError:
        return None
    folder = getattr(module, "CMAKE_BIN_DIR", None) or getattr(module, "BIN_DIR", None)
    return shutil.which(name, path=folder) if folder else None


def job_count(asked: int | None) -> int:
    """How many files to compile at once: `asked`, else as many as cores and free memory allow."""
    if asked is not None:
        if asked < 1:
            raise DflashError(f"--jobs {asked}: at least one job is needed")
        return asked
    return max(1, min(_cores(), int(free_gib() / _GIB_A_JOB)))


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def free_gib() -> float:
    """Memory this process may still take, GiB: the machine's, or the control group's if that is less."""
    import psutil

    free = psutil.virtual_memory().available
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
    except (OSError, ValueError):
        return free / 2**30
    return (free if limit == "max" else min(free, int(limit) - used)) / 2**30


def build_variables() -> dict[str, str]:
    """Those variables of the environment that change what cmake and the compilers make."""
    return {name: os.environ[name] for name in _BUILD_VARIABLES if os.environ.get(name)}


def cpu_identity() -> str:
    """A short mark of what `-march=native` means here: it changes with the CPU's instruction sets."""
    facts = [platform.system(), platform.machine()]
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            facts += [" ".join(sorted(line.split())) for line in _first_cpu(file)]
    except OSError:
        facts.append(says("/usr/sbin/sysctl", "machdep.cpu.brand_string") or platform.processor())
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()[:12]


def _first_cpu(lines: Any) -> list[str]:
    """The lines that tell the instruction sets of the first CPU; later CPUs are not read."""
    wanted = ("flags", "Features", "CPU implementer", "CPU part", "vendor_id", "cpu family", "model\t")
    found = []
    for line in lines:
        if not line.strip():
            break
        if line.startswith(wanted):
            found.append(line)
    return found
