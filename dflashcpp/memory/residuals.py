"""What a device takes beyond llama.cpp's buffers (context, kernels, pools), learned from real runs.

Kept by device, driver and build: any of them changes the number.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Residual:
    """MiB that a run showed, and how long ago in seconds."""

    mib: float
    age: float

    @property
    def when(self) -> str:
        """The age in words."""
        for seconds, word in ((86400, "days"), (3600, "hours"), (60, "minutes")):
            if self.age >= 2 * seconds:
                return f"{self.age / seconds:.0f} {word} ago"
        return "just now"


def key_of(uuid: str, driver: str, build: str) -> str:
    """The key of one device, one driver and one build (`build_of`)."""
    return f"{uuid}|{driver}|{build}"


def build_of(binary: Path) -> str:
    """What stands for the build of a program: its folder, which has the build's digest in its name."""
    return str(binary.resolve().parent)


def remember(key: str, mib: float, *, now: float | None = None) -> None:
    """Store what a real run showed; a later run of the same kind replaces it."""
    table = {**_read(), key: {"mib": round(mib, 2), "at": time.time() if now is None else now}}
    _write(table)


def learn(residual: float | None, build: str) -> Residual | None:
    """Keep what a run of `build` (`build_of`) took beyond the buffers of its device; what was kept.

    Nothing is kept where the device does not tell, where the figure makes no sense (below zero), or
    where there are several devices, since the figure is their sum.
    """
    if residual is None or residual < 0:
        return None
    from dflashcpp.memory.device import gpus

    found = gpus()
    if len(found) != 1:
        return None
    remember(key_of(found[0].uuid, found[0].driver, build), residual)
    return Residual(residual, 0.0)


def recall(key: str, *, now: float | None = None) -> Residual | None:
    """What was learned for this key; None when nothing is known or the file is damaged."""
    row = _read().get(key)
    if not isinstance(row, dict) or not isinstance(row.get("mib"), int | float):
        return None
    age = (time.time() if now is None else now) - float(row.get("at", 0.0))
    return Residual(float(row["mib"]), max(0.0, age))


def _read() -> dict[str, Any]:
    try:
        found = json.loads(_file().read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _write(table: Mapping[str, Any]) -> None:
    path = _file()
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False, encoding="utf-8") as file:
        json.dump(table, file, indent=1)
    Path(file.name).replace(path)


def _file() -> Path:
    from dflashcpp.paths import state_dir

    return state_dir("memory") / "residuals.json"
