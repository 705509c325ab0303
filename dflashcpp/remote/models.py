"""Which files the far side serves: named there, pushed from here, or fetched by the dflashcpp there."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from dflashcpp.errors import DflashError
from dflashcpp.progress import SILENT, Progress
from dflashcpp.remote import files
from dflashcpp.remote.engine import command_json
from dflashcpp.remote.files import RemoteFile
from dflashcpp.remote.host import Facts, Host

if TYPE_CHECKING:
    from dflashcpp.pairs import Pair

DEFAULT_DIRECTORY = "models"
_DRY = "a dry run fetches and copies nothing: without --dry-run it would be put there"


@dataclass(frozen=True)
class Store:
    """Where models are on the far side, and whether files of this machine may be copied there.

    `dry_run`: nothing is fetched or copied; what is missing is an error that says so.
    """

    host: Host
    facts: Facts
    directory: str | None = None
    push: bool = False
    progress: Progress = SILENT
    dry_run: bool = False

    def place(self, name: str) -> str:
        """The absolute path of a model file by its bare name."""
        folder = files.absolute(self.directory or DEFAULT_DIRECTORY, self.facts.home)
        return str(PurePosixPath(folder, name))

    def named(self, path: str, flag: str) -> RemoteFile:
        """The file that `-m` or `-md` names: over there; with `push`, a file here that is copied first."""
        local = Path(path).expanduser()
        if self.push and local.is_file() and not self.dry_run:
            return files.push(self.host, local, self.place(local.name), self.progress)
        places = [files.absolute(path, self.facts.home)]
        if "/" not in path:
            places.append(self.place(path))
        for place in places:
            found = files.look(self.host, place)
            if found:
                return found
        hint = f"--push copies {local} there" if local.is_file() else "the path is one of the far side"
        if self.dry_run and self.push and local.is_file():
            hint = _DRY
        raise DflashError(f"{flag} {path}: {self.host.name} has no {' and no '.join(places)}", hint=hint)


def of_pair(
    store: Store, pair: Pair, kind: str | None, *, with_draft: bool
) -> tuple[RemoteFile, RemoteFile | None]:
    """Target and drafter of a known pair over there, made to be there if that is possible.

    In this order: the store's directory; the dflashcpp there (`pull`); with `push`, copies from here.
    """
    type_ = (kind or pair.drafter.type or "Q4_K_M").upper()
    target_place = store.place(pair.target.file)
    draft_place = store.place(f"dflash-{pair.name}-{type_}.gguf")
    target = _whole(store, target_place, pair)
    draft = files.look(store.host, draft_place) if with_draft else None
    if target and (draft or not with_draft):
        return target, draft
    missing = target_place if not target else draft_place
    if store.dry_run and (store.push or "dflashcpp" in store.facts.tools):
        raise DflashError(f"{store.host.name} has no {missing} yet", hint=_DRY)
    if "dflashcpp" in store.facts.tools:
        return _pulled(store, pair, type_, with_draft)
    if not store.push:
        raise DflashError(
            f"{store.host.name} has no {missing}",
            hint="--push copies it from here; or install dflashcpp there, which fetches it by itself",
        )
    target = target or _push_target(store, pair, target_place)
    if with_draft:
        draft = draft or _push_drafter(store, pair, type_, target, draft_place)
    return target, draft


def _whole(store: Store, place: str, pair: Pair) -> RemoteFile | None:
    """The pair's target if it is there; size and sha256 must be the known ones."""
    found = files.look(store.host, place)
    if found is None:
        return None
    wanted = pair.target
    if wanted.bytes is not None and found.size != wanted.bytes:
        raise DflashError(
            f"{store.host.name}:{place} has {found.size} bytes, {pair.name} has {wanted.bytes}",
            hint="an unfinished download? fetch it again, or remove it and use --push",
        )
    if wanted.sha256 and files.digest(store.host, place, store.progress) != wanted.sha256:
        raise DflashError(
            f"{store.host.name}:{place} has another sha256 than {pair.name}",
            hint="it is damaged or another version; fetch it again, or name it with -m",
        )
    return found


def _pulled(store: Store, pair: Pair, type_: str, with_draft: bool) -> tuple[RemoteFile, RemoteFile | None]:
    words = [store.facts.tools["dflashcpp"], "pull", pair.name, "--draft-type", type_, "--json"]
    told = command_json(store.host, words, store.progress, f"{pair.name} on {store.host.name}")
    found: dict[str, Any] = {key: files.look(store.host, str(told.get(key))) for key in ("target", "drafter")}
    if found["target"] is None or (with_draft and found["drafter"] is None):
        raise DflashError(
            f"{store.host.name}: the dflashcpp there pulled {pair.name} to no place that exists"
        )
    return found["target"], found["drafter"] if with_draft else None


def _push_target(store: Store, pair: Pair, place: str) -> RemoteFile:
    from dflashcpp.pairs import ensure_target

    return files.push(store.host, ensure_target(pair, store.progress), place, store.progress)


def _push_drafter(store: Store, pair: Pair, type_: str, target: RemoteFile, place: str) -> RemoteFile:
    with _drafter_here(store, pair, type_, target) as local:
        return files.push(store.host, local, place, store.progress)


@contextlib.contextmanager
def _drafter_here(store: Store, pair: Pair, type_: str, target: RemoteFile) -> Iterator[Path]:
    """The converted drafter on this machine; the target's tokenizer comes from its header over there."""
    from dflashcpp.pairs import ensure_drafter, ensure_source, local_target

    here = local_target(pair)
    if here is not None:
        yield ensure_drafter(pair, store.progress, type=type_, target=here)
        return
    from dflashcpp.conversion import convert

    source = ensure_source(pair, store.progress)
    with files.header_copy(store.host, target) as header:
        made = header.with_name(f"dflash-{pair.name}-{type_}.gguf")
        convert(source, target=header, type=type_, output=made, progress=store.progress)
        yield made
