"""Stand-ins for nvcc, nvidia-smi, cmake and whatever else a toolchain has: small scripts in a folder."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path


def script(folder: Path, name: str, body: str) -> Path:
    """A shell script `name` in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/sh\n{body}\n", encoding="utf-8")
    path.chmod(0o755)
    return path


def python_program(folder: Path, name: str, code: str) -> Path:
    """A program `name` in `folder` that runs `code`. No #! of Python: its path may hold spaces."""
    folder.mkdir(parents=True, exist_ok=True)
    body = folder / f".{name}.py"
    body.write_text(code, encoding="utf-8")
    return script(folder, name, f'exec {shlex.quote(sys.executable)} {shlex.quote(str(body))} "$@"')


def nvcc(folder: Path, release: str, architectures: tuple[int, ...]) -> Path:
    """An nvcc of CUDA `release` that compiles for `architectures`, as nvcc prints them."""
    listed = "\\n".join(f"compute_{number}" for number in architectures)
    body = f"""
if [ "$1" = --list-gpu-arch ]; then printf '{listed}\\n'; exit 0; fi
echo 'nvcc: NVIDIA (R) Cuda compiler driver'
echo 'Copyright (c) 2005-2025 NVIDIA Corporation'
echo 'Cuda compilation tools, release {release}, V{release}.88'"""
    return script(folder, "nvcc", body)


def nvidia_smi(folder: Path, *gpus: str) -> Path:
    """An nvidia-smi that shows `gpus`, each `name, capability`; without any it fails as without a driver."""
    if not gpus:
        return script(folder, "nvidia-smi", "echo 'NVIDIA-SMI has failed'; exit 9")
    return script(folder, "nvidia-smi", "\n".join(f"echo '{gpu}'" for gpu in gpus))


def recording_cmake(folder: Path, log: Path) -> Path:
    """A cmake that says it is new, writes its arguments to `log` (one a line) and then fails."""
    code = f"import sys; open({str(log)!r}, 'w').write(chr(10).join(sys.argv[1:]))"
    body = f"""
if [ "$1" = --version ]; then echo 'cmake version 3.30.0'; exit 0; fi
'{sys.executable}' -c "{code}" "$@"
echo 'CMake Error: this one only records'
exit 1"""
    return script(folder, "cmake", body)
