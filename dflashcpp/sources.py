"""A checkpoint's place on this machine: as given, or fetched from the Hub."""

from __future__ import annotations

import re
from pathlib import Path

from dflashcpp.errors import DflashError
from dflashcpp.progress import Progress

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")


def resolve_source(source: str | Path, progress: Progress) -> Path:
    """The file or folder `source` names. Raises DflashError when there is nothing."""
    path = Path(source)
    if path.exists():
        return path
    if isinstance(source, str) and HUB_ID.fullmatch(source):
        return _from_hub(source, progress)
    raise DflashError(
        f"there is no file or folder {source}", hint="check the path, or give a Hub id (org/name)"
    )


def _from_hub(repo: str, progress: Progress) -> Path:
    from dflashcpp import hub

    hub.download(repo, "config.json", progress=progress)
    return hub.download(repo, "model.safetensors", progress=progress)
