"""Repositories of the Hub as a whole: what is in them, what a conversion needs, what is cached."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dflashcpp import hub
from dflashcpp.errors import DflashError
from dflashcpp.progress import Progress

_ID = re.compile(
    r"(?P<repo>[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95})(@(?P<revision>[\w./-]+))?(:(?P<quant>[\w.-]+))?"
)
_TOKENIZER = (
    "config.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "generation_config.json",
)


@dataclass(frozen=True)
class HubId:
    """`org/name`, with `@revision` or `:QUANT` behind it."""

    repo: str
    revision: str | None = None
    quant: str | None = None

    @classmethod
    def parse(cls, text: str) -> HubId | None:
        """The id that `text` spells, or None."""
        match = _ID.fullmatch(text)
        return cls(match["repo"], match["revision"], match["quant"]) if match else None


@dataclass(frozen=True)
class Repo:
    """A repository at one commit: the names of its files, and those that are in the cache."""

    id: HubId
    commit: str
    names: tuple[str, ...]

    def fetch(self, name: str, progress: Progress) -> Path:
        """One file, from the cache or the Hub."""
        return hub.download(self.id.repo, name, revision=self.commit, progress=progress)

    def url(self, name: str) -> str:
        """Where the file can be read by range."""
        endpoint = (os.environ.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/")
        return f"{endpoint}/{self.id.repo}/resolve/{self.commit}/{name}"


def look_up(wanted: HubId) -> Repo:
    """The repository on the Hub, or what the cache has of it when the Hub cannot be reached.

    Raises DflashError: gated, missing, refused, unreachable and not cached.
    """
    from huggingface_hub import HfApi

    try:
        with hub.explained(wanted.repo, "", wanted.revision):
            info = HfApi(endpoint=os.environ.get("HF_ENDPOINT")).model_info(
                wanted.repo, revision=wanted.revision
            )
    except DflashError:
        cached = _cached(wanted)
        if cached is None:
            raise
        return cached
    names = tuple(entry.rfilename for entry in info.siblings or [])
    return Repo(wanted, info.sha or wanted.revision or "main", names)


def _cached(wanted: HubId) -> Repo | None:
    """The newest snapshot of the repository in the Hub's cache, if there is one."""
    snapshot = cached_snapshot(wanted)
    if snapshot is None:
        return None
    names = tuple(
        sorted(path.relative_to(snapshot).as_posix() for path in snapshot.rglob("*") if path.is_file())
    )
    return Repo(wanted, snapshot.name, names)


def cached_snapshot(wanted: HubId) -> Path | None:
    """The folder of the repository's files in the Hub's cache, without any network."""
    from huggingface_hub import constants

    folder = Path(constants.HF_HUB_CACHE) / f"models--{wanted.repo.replace('/', '--')}"
    ref = folder / "refs" / (wanted.revision or "main")
    if ref.is_file():
        named = folder / "snapshots" / ref.read_text().strip()
        if named.is_dir():
            return named
    if wanted.revision and (folder / "snapshots" / wanted.revision).is_dir():
        return folder / "snapshots" / wanted.revision
    found = sorted((folder / "snapshots").glob("*"), key=lambda path: path.stat().st_mtime)
    return found[-1] if found and not wanted.revision else None


def fetch_checkpoint(wanted: HubId, progress: Progress) -> Path:
    """Download a drafter's checkpoint; returns its folder in the Hub's cache.

    The config comes first, so that what cannot be converted is refused before gigabytes travel.
    """
    repo = look_up(wanted)
    prefix, names = _checkpoint_files(repo)
    for name in sorted(names, key=lambda name: (not name.endswith("config.json"), name)):
        path = repo.fetch(name, progress)
        if name == f"{prefix}config.json":
            _refuse_early(path)
    return path.parent


def _refuse_early(path: Path) -> None:
    from dflashcpp.checkpoint.config import Config
    from dflashcpp.checkpoint.flavour import refuse
    from dflashcpp.checkpoint.json_file import read_object

    refuse(Config(read_object(path), str(path)), {})


def _checkpoint_files(repo: Repo) -> tuple[str, list[str]]:
    """The folder inside the repository that holds the weights, and the names of what to fetch from it."""
    folders = sorted({_folder(name) for name in repo.names if name.endswith(".safetensors")}, key=len)
    if not folders:
        raise _no_weights(repo)
    with_config = [folder for folder in folders if f"{folder}config.json" in repo.names]
    prefix = (with_config or folders)[0]
    inside = [name for name in repo.names if _folder(name) == prefix]
    kept = [name for name in inside if name.endswith((".safetensors", ".safetensors.index.json"))]
    side = {f"{prefix}{name}" for name in ("config.json", "README.md", "mask_embedding.pt")}
    return prefix, [*kept, *(name for name in inside if name in side)]


def _folder(name: str) -> str:
    return name[: name.rfind("/") + 1]


def _no_weights(repo: Repo) -> DflashError:
    from dflashcpp.checkpoint.files import listing

    ready = [name for name in repo.names if name.endswith(".gguf")]
    if ready:
        return DflashError(
            f"{repo.id.repo} holds no .safetensors but GGUF files: {listing(ready)}",
            hint="they need no conversion; `dflashcpp inspect` says whether they are all right",
        )
    there = listing(sorted(repo.names)) or "nothing"
    return DflashError(
        f"{repo.id.repo} holds no .safetensors file; there is {there}", hint="check the Hub id"
    )


def choose_gguf(repo: Repo) -> str | None:
    """The target's GGUF whose header to read: of the wanted quant, else Q4_K_M, else any; None without.

    Raises DflashError when the wanted quant is not there.
    """
    found = [name for name in repo.names if _is_model(name)]
    if not found:
        return None
    wanted = repo.id.quant
    matching = _of_quant(found, wanted or "Q4_K_M")
    if not matching and wanted:
        from dflashcpp.checkpoint.files import listing

        raise DflashError(f"{repo.id.repo} has no GGUF of {wanted}; there is {listing(sorted(found))}")
    return min(matching or found, key=lambda name: (len(name), name))


def _is_model(name: str) -> bool:
    part = re.search(r"-(\d+)-of-\d+\.gguf$", name)
    side = re.search(r"(mmproj|imatrix|dflash|dspark|eagle|mtp)", name.rsplit("/", 1)[-1], re.IGNORECASE)
    return name.endswith(".gguf") and not side and (part is None or int(part[1]) == 1)


def _of_quant(names: Sequence[str], quant: str) -> list[str]:
    pattern = re.compile(rf"(^|[-._/]){re.escape(quant)}([-._/]|$)", re.IGNORECASE)
    return [name for name in names if pattern.search(name)]


def fetch_tokenizer(repo: Repo, progress: Progress) -> Path:
    """Config and tokenizer files of a target's repository; returns their folder."""
    wanted = [name for name in _TOKENIZER if name in repo.names]
    if "config.json" not in wanted:
        raise DflashError(
            f"{repo.id.repo} has neither a GGUF nor a config.json", hint="give the target's repository"
        )
    paths = [repo.fetch(name, progress) for name in wanted]
    return paths[0].parent
