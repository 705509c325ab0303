"""A checkpoint's place on this machine: as given, or fetched from the Hub."""

from __future__ import annotations

from pathlib import Path

from dflashcpp.errors import DflashError
from dflashcpp.progress import Progress


def resolve_source(source: str | Path, progress: Progress) -> Path:
    """The file or folder `source` names, downloaded if it is a Hub id (`org/name`, `org/name@revision`).

    Raises DflashError when there is nothing.
    """
    from dflashcpp.hub_repo import HubId, fetch_checkpoint

    if not str(source):
        raise DflashError("the source's name is empty", hint="give a .safetensors file, a folder or a Hub id")
    path = Path(source)
    if path.exists():
        return path
    wanted = HubId.parse(source) if isinstance(source, str) else None
    if wanted is None or wanted.quant:
        raise DflashError(
            f"there is no file or folder {source}", hint="check the path, or give a Hub id (org/name)"
        )
    return fetch_checkpoint(wanted, progress)
