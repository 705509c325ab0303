"""Files of the Hugging Face Hub, in the cache everybody shares, with errors that say what to do."""

from __future__ import annotations

import importlib
import os
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
    from huggingface_hub import errors

    try:
        with progress.task(f"downloading {repo} {name}", None, "bytes") as task:
            return Path(
                huggingface_hub.hf_hub_download(
                    repo,
                    name,
                    revision=revision,
                    endpoint=os.environ.get("HF_ENDPOINT"),
                    tqdm_class=_bar_class(task),
                )
            )
    except (
        errors.HfHubHTTPError,
        errors.LocalEntryNotFoundError,
        errors.OfflineModeIsEnabled,
        OSError,
    ) as error:
        raise _explained(repo, name, revision, error) from error


def _explained(repo: str, name: str, revision: str | None, error: Exception) -> DflashError:
    """The Hub's answer in words. The order matters: some of these classes are each other's children."""
    from huggingface_hub import errors

    page = f"https://huggingface.co/{repo}"
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
            f"{repo} {name} is not in the Hub cache and the Hub cannot be reached",
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
        return DflashError(f"the Hub answered {status} for {repo} {name}", hint="try again later")
    return DflashError(
        f"{repo} {name} could not be downloaded: {error}", hint="check the network and the disk"
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
