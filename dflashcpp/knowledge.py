"""Where the knowledge folders (`convert/`, `patches/`, `models/`) are, and their tables.

In a checkout they stand beside the package; in a wheel they travel inside it as `_knowledge/`.
"""

from __future__ import annotations

import functools
import tomllib
from pathlib import Path
from typing import Any

_PACKAGE = Path(__file__).resolve().parent


@functools.cache
def root() -> Path:
    """The folder that holds `convert/`, `patches/` and `models/`."""
    inside = _PACKAGE / "_knowledge"
    return inside if inside.is_dir() else _PACKAGE.parent


def folder(name: str) -> Path:
    """The knowledge folder `name` (`convert`, `patches` or `models`)."""
    path = root() / name
    if not path.is_dir():
        raise FileNotFoundError(f"the installation is incomplete: {path} is missing; install dflashcpp again")
    return path


@functools.cache
def table(relative: str) -> dict[str, Any]:
    """The TOML table at `relative`, for example `convert/tensors.toml`, read once."""
    area, _, name = relative.partition("/")
    with (folder(area) / name).open("rb") as file:
        return tomllib.load(file)
