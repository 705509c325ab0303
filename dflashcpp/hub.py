"""Files of the Hugging Face Hub, in the cache everybody shares, with errors that say what to do."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dflashcpp.errors import DflashError
from dflashcpp.progress import SILENT, Progress, Task


def download(repo: str, name: str, *, revision: str | None = None, progress: Progress = SILENT) -> Path:
    """One file of a Hub repository, in the Hub's cache (`HF_HOME`, `HF_HUB_CACHE`, `HF_TOKEN` count).

    Raises DflashError that tells a gated repository, a missing one, a missing file, a refused login,
    a full disk and a network that cannot be reached apart.
    """
    import huggingface_hub

    with explained(repo, name, revision), progress.task(f"downloading {repo} {name}", None, "bytes") as task:
        return Path(
            huggingface_hub.hf_hub_download(
                repo,
                name,
                revision=revision,
                endpoint=os.environ.get("HF_ENDPOINT"),
                tqdm_class=_bar_class(task),
            )
        )


@contextmanager
def explained(repo: str, name: str, revision: str | None) -> Iterator[None]:
    """Whatever the Hub or the way to it does wrong inside the block becomes a DflashError in words."""
    from huggingface_hub import errors

    known: tuple[type[Exception], ...] = (
        errors.HfHubHTTPError,
        errors.LocalEntryNotFoundError,
        errors.OfflineModeIsEnabled,
        errors.HFValidationError,
        OSError,
    )
    try:
        yield
    except (*known, *_network_errors()) as error:
        raise _explained(repo, name, revision, error) from error


def _network_errors() -> list[type[Exception]]:
    """What the HTTP library under huggingface_hub raises; its name has changed more than once."""
    libraries = [sys.modules.get(name) for name in ("httpx2", "httpx")]
    return [library.HTTPError for library in libraries if library is not None]


def _explained(repo: str, name: str, revision: str | None, error: Exception) -> DflashError:
    """The Hub's answer in words. The order matters: some of these classes are each other's children."""
    from huggingface_hub import errors

    page = f"https://huggingface.co/{repo}"
    what = f"{repo} {name}".strip()
    if isinstance(error, errors.GatedRepoError):
        return DflashError(
            f"{repo} is gated: this login may not read it",
            hint=f"accept its terms on {page}, then set HF_TOKEN or run: hf auth login",
        )
    if isinstance(error, errors.RepositoryNotFoundError):
        return DflashError(
            f"{repo} does not exist on the Hub, or is private",
            hint=f"look at {page}; for a private repository set HF_TOKEN or run: hf auth login",
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return DflashError(f"{repo} has no revision {revision}", hint=f"look at {page}")
    if isinstance(error, errors.LocalEntryNotFoundError | errors.OfflineModeIsEnabled):
        return DflashError(
            f"{what} is not in the Hub cache and the Hub cannot be reached",
            hint="check the network and HF_HUB_OFFLINE, or pass a local file",
        )
    if isinstance(error, errors.EntryNotFoundError):
        return DflashError(f"{repo} has no file {name}", hint=f"its files: {page}/tree/main")
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status == 401:
        return DflashError(
            f"the Hub refused the login for {repo} (401)", hint="HF_TOKEN is wrong or has expired"
        )
    if status == 403:
        return DflashError(f"this login may not read {repo} (403)", hint=f"ask for access on {page}")
    if status is not None:
        return DflashError(f"the Hub answered {status} for {what}", hint="try again later")
    if "Connect" in type(error).__name__:
        return DflashError(
            f"the Hub cannot be reached for {what}: {error}",
            hint="check the network and HF_ENDPOINT, or pass a local file",
        )
    return DflashError(
        f"{what} could not be downloaded: {error}",
        hint="run the command again: what has arrived is kept",
    )


def _bar_class(task: Task) -> Any:
    """A tqdm that tells `task` instead of drawing."""
    tqdm: Any = importlib.import_module("tqdm.auto").tqdm

    class Told(tqdm):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            options.pop("name", None)
            options["disable"] = False
            options["file"] = _Nowhere()
            super().__init__(*arguments, **options)
            if self.total:
                task.total(int(self.total))
            if self.n:
                task.advance(int(self.n))

        def update(self, n: float | None = 1) -> Any:
            task.advance(int(n or 0))
            return super().update(n)

    return Told


class _Nowhere:
    def write(self, text: str) -> int:
        return len(text)

    def flush(self) -> None:
        """Nothing is kept."""
