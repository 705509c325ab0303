"""Checks of the CUDA, Vulkan and Metal toolchains before anything is compiled."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from dflashcpp.errors import DflashError
from dflashcpp.llamacpp.toolchain import Tool, says, tool
from dflashcpp.progress import SILENT, Progress

CUDA_ROOTS = Path("/usr/local")


@dataclass(frozen=True)
class Nvcc:
    """A CUDA compiler: its release (13, 0) and the GPU architectures (90, 120 ...) it compiles for."""

    tool: Tool
    release: tuple[int, int]
    architectures: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.tool.path} (CUDA {self.release[0]}.{self.release[1]})"


@dataclass(frozen=True)
class GpuToolchain:
    """What a backend adds to a build: cmake settings and the programs it depends on."""

    settings: dict[str, str]
    tools: tuple[Tool, ...]


def probe(backend: str, progress: Progress = SILENT) -> GpuToolchain:
    """Check the toolchain of `backend`. Raises DflashError with the command that mends it."""
    if backend == "cuda":
        return _cuda(progress)
    if backend == "vulkan":
        return _vulkan()
    if backend == "metal":
        return _metal()
    return GpuToolchain({}, ())


def _cuda(progress: Progress) -> GpuToolchain:
    found = find_nvcc()
    if not found:
        raise DflashError(
            "there is no CUDA compiler: nvcc is neither in PATH nor under CUDA_HOME or /usr/local/cuda*",
            hint="install the CUDA toolkit (sudo apt-get install nvidia-cuda-toolkit) or use another backend",
        )
    wanted = wanted_architectures()
    nvcc = choose_nvcc(found, wanted)
    shown = ", ".join(f"{number / 10:.1f}" for number in wanted)
    progress.say(f"CUDA compiler {nvcc}, for GPUs of compute capability {shown}")
    settings = {
        "CMAKE_CUDA_COMPILER": nvcc.tool.path,
        "CMAKE_CUDA_ARCHITECTURES": os.environ.get("CUDAARCHS")
        or ";".join(f"{number}-real" for number in wanted),
    }
    return GpuToolchain(settings, (nvcc.tool,))


def find_nvcc() -> list[Nvcc]:
    """Every nvcc that runs: CUDACXX, CUDA_HOME, CUDA_PATH, PATH, then /usr/local/cuda*, newest first."""
    places = [os.environ.get("CUDACXX"), shutil.which("nvcc")]
    places[1:1] = [
        f"{os.environ[name]}/bin/nvcc" for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)
    ]
    installed = [_nvcc(str(path)) for path in CUDA_ROOTS.glob("cuda*/bin/nvcc")]
    installed.sort(key=lambda nvcc: nvcc.release if nvcc else (0, 0), reverse=True)
    found = [_nvcc(place) for place in places if place] + installed
    unique = {os.path.realpath(nvcc.tool.path): nvcc for nvcc in reversed(found) if nvcc}
    return list(reversed(unique.values()))


def _nvcc(path: str) -> Nvcc | None:
    path = shutil.which(path) or path
    if not os.access(path, os.X_OK):
        return None
    match = re.search(r"release (\d+)\.(\d+)", says(path))
    if match is None:
        return None
    listed = re.findall(r"compute_(\d+)", says(path, "--list-gpu-arch"))
    architectures = tuple(sorted({int(number) for number in listed}))
    return Nvcc(tool(path), (int(match[1]), int(match[2])), architectures)


def choose_nvcc(found: list[Nvcc], wanted: tuple[int, ...]) -> Nvcc:
    """The first nvcc that compiles for every architecture in `wanted`.

    Raises DflashError that names every nvcc, what it can do and what would be needed.
    """
    for nvcc in found:
        if not nvcc.architectures or set(wanted) <= set(nvcc.architectures):
            return nvcc
    ranges = "; ".join(f"{nvcc}: {_range(nvcc)}" for nvcc in found)
    newest = max(nvcc.architectures[-1] for nvcc in found)
    older = [number for number in wanted if number <= newest]
    word = "an older CUDA toolkit, this one dropped it" if older == list(wanted) else "a newer CUDA toolkit"
    shown = ", ".join(f"{number / 10:.1f}" for number in wanted)
    raise DflashError(
        f"no nvcc here compiles for compute capability {shown} ({ranges})",
        hint=f"install {word}, or point CUDACXX at the right nvcc",
    )


def _range(nvcc: Nvcc) -> str:
    return f"{nvcc.architectures[0] / 10:.1f} to {nvcc.architectures[-1] / 10:.1f}"


def wanted_architectures() -> tuple[int, ...]:
    """The architectures to compile for: `CUDAARCHS` where set (cmake's variable), else this machine's GPUs.

    Raises DflashError when there is neither.
    """
    text = os.environ.get("CUDAARCHS", "")
    asked = re.findall(r"\d+", text)
    if text and not asked:
        raise DflashError(f"CUDAARCHS is {text!r}", hint="give numbers, for example CUDAARCHS='89;90'")
    if asked:
        return tuple(sorted({int(number) for number in asked}))
    seen = [cap for _, cap in gpus()]
    if not seen:
        raise DflashError(
            "nvidia-smi shows no GPU, so it is not known which to compile for",
            hint="set CUDAARCHS, for example CUDAARCHS=89 for an RTX 4090, CUDAARCHS=90 for an H100",
        )
    return tuple(sorted(set(seen)))


def gpus() -> list[tuple[str, int]]:
    """Name and compute capability (9.0 is 90) of every NVIDIA GPU, from nvidia-smi; empty without one."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    command = [program, "--query-gpu=name,compute_cap", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    rows = re.findall(r"^(.*), *(\d+)\.(\d+)\s*$", done.stdout, re.M) if done.returncode == 0 else []
    return [(name, int(major) * 10 + int(minor)) for name, major, minor in rows]


def gpu_marks() -> list[str]:
    """The models of this machine's NVIDIA GPUs as the kernel tells them, without starting a program."""
    marks = []
    for path in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")):
        match = re.search(r"^Model:\s*(.*)$", path.read_text(errors="replace"), re.M)
        marks.append(match[1].strip() if match else "?")
    return sorted(marks)


def _vulkan() -> GpuToolchain:
    glslc = shutil.which("glslc")
    if glslc is None:
        raise DflashError(
            "Vulkan needs the shader compiler glslc, which is not in PATH",
            hint="sudo apt-get install libvulkan-dev glslc spirv-headers (or the Vulkan SDK)",
        )
    return GpuToolchain({}, (tool(glslc),))


def _metal() -> GpuToolchain:
    if sys.platform != "darwin":
        raise DflashError("Metal is there on macOS only", hint="use --backend cpu, cuda or vulkan")
    return GpuToolchain({}, ())
