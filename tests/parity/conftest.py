"""The oracle: z-lab's own drafter, the package `dflash`, with random weights."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from dflashcpp import paths

_WHEEL = "dflash-0.1.0-py3-none-any.whl"
_SHA256 = "b3fe38d9413efc30a952c8b38b34f1dcc696ba6d7b865acbf540a34cc53afaa2"


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Tiny matrices gain nothing from threads, and tests run beside each other."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def zlab() -> ModuleType:
    """The module `dflash.model` of z-lab's package 0.1.0.

    Its requirements (`datasets` 5.0.1 and with it huggingface-hub below 2) contradict ours, but its
    drafter needs torch and transformers only: it is imported straight from the wheel, which is a zip.
    """
    if importlib.util.find_spec("dflash") is None:
        sys.path.append(str(_wheel()))
    return importlib.import_module("dflash.model")


def _wheel() -> Path:
    folder = paths.cache_dir("tests")
    wheel = folder / _WHEEL
    if not wheel.exists():
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--no-deps",
            "--dest",
            str(folder),
            "dflash==0.1.0",
        ]
        subprocess.run(command, check=True, capture_output=True)
    assert hashlib.sha256(wheel.read_bytes()).hexdigest() == _SHA256, f"{wheel} is not the published wheel"
    return wheel
