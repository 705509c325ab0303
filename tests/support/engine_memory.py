"""Start a llama-server only to read what it reserved: no warm-up, no question, ended at once."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from dflashcpp.memory.engine import EngineMemory, parse_log

FLAGS = ("--no-warmup", "--no-repack", "--fit", "off", "-t", "1", "-lv", "4", "--port", "0")


def server_log(binary: Path, arguments: Sequence[str | Path], folder: Path, seconds: float = 300) -> str:
    """The log of `binary` with `arguments` from its start until it listens (or gives up) and ends."""
    path = folder / "llama-server.log"
    command = [str(binary), *map(str, arguments)]
    quiet = {**os.environ, "GGML_NO_BACKTRACE": "1"}
    with (
        path.open("w") as log,
        subprocess.Popen(
            command, stderr=log, stdout=subprocess.DEVNULL, stdin=subprocess.DEVNULL, env=quiet
        ) as child,
    ):
        until = time.monotonic() + seconds
        while child.poll() is None and time.monotonic() < until and "listening on" not in path.read_text():
            time.sleep(0.05)
        child.send_signal(signal.SIGINT)
        # a signal between "listening on" and the first turn of its loop is lost in llama-server
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(30)
        child.kill()
    return path.read_text()


def reserved(binary: Path, target: Path, drafter: Path, folder: Path, *flags: str) -> EngineMemory:
    """The buffers of `binary` for this pair: `-c 4096`, one slot, 4 drafted tokens unless `flags` differ."""
    pair = ("-m", target, "-md", drafter, "--spec-type", "draft-dflash", "--spec-draft-n-max", "4")
    log = server_log(binary, [*pair, "-c", "4096", "-np", "1", *FLAGS, *flags], folder)
    assert "listening on" in log, log[-2000:]
    return parse_log(log.splitlines())
