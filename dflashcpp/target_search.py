"""Finding a drafter's target: as given, beside the checkpoint, by the known pairs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from dflashcpp.checkpoint import Checkpoint
from dflashcpp.drafter import Drafter
from dflashcpp.errors import DflashError
from dflashcpp.progress import Progress
from dflashcpp.provenance import read_card, verifier
from dflashcpp.target import Target, read_target

if TYPE_CHECKING:
    from dflashcpp.pairs import Pair


def find_target(
    checkpoint: Checkpoint, place: Path, given: str | Path | Target | None, progress: Progress
) -> Target:
    """The target of a checkpoint.

    `given` is what the user said; without it: a GGUF beside the checkpoint, the known pair with this
    drafter. Raises DflashError naming the target that the drafter wants.
    """
    if isinstance(given, Target):
        return given
    if given is not None:
        return given_target(given, progress)
    found = _beside(checkpoint) or _by_pair(checkpoint, progress) or _in_hub_cache(checkpoint, progress)
    return found or _nothing(checkpoint)


def given_target(given: str | Path, progress: Progress) -> Target:
    """The target that the user named: GGUF file or URL, folder, Hub id with or without `:QUANT`."""
    if not str(given):
        raise DflashError("the target's name is empty", hint="--target wants a GGUF, a folder, or a Hub id")
    path = Path(given)
    if path.is_dir():
        return _in_folder(path)
    if path.exists() or str(given).startswith(("http://", "https://")):
        return read_target(given)
    return _on_hub(str(given), progress)


def _on_hub(given: str, progress: Progress) -> Target:
    """`org/repo:QUANT`: the header of a GGUF by range; a repository without GGUF: its tokenizer files."""
    from dflashcpp.hub_repo import HubId, choose_gguf, fetch_tokenizer, look_up
    from dflashcpp.target_hf import read_target_folder

    wanted = HubId.parse(given)
    if wanted is None:
        raise DflashError(
            f"there is no target {given}",
            hint="--target wants a GGUF, a folder, or a Hub id (org/repo:QUANT)",
        )
    repo = look_up(wanted)
    name = choose_gguf(repo)
    if name is None:
        return read_target_folder(fetch_tokenizer(repo, progress))
    progress.say(f"reading the header of {wanted.repo} {name}")
    return read_target(repo.url(name))


def _in_folder(folder: Path) -> Target:
    """A folder given as target: the GGUF in it, else config.json and a tokenizer."""
    from dflashcpp.target_hf import read_target_folder

    found = _ggufs(folder)
    if found:
        return found[0]
    return read_target_folder(folder)


def _ggufs(folder: Path) -> list[Target]:
    found = []
    for path in sorted(folder.glob("*.gguf")):
        try:
            found.append(read_target(path))
        except DflashError:
            continue  # a drafter, or no complete GGUF
    return found


def _beside(checkpoint: Checkpoint) -> Target | None:
    """The one GGUF beside the checkpoint that is no drafter."""
    found = _ggufs(checkpoint.path)
    fitting = [target for target in found if target.hidden == checkpoint.drafter.hidden]
    if len(fitting) > 1:
        names = ", ".join(target.source for target in fitting)
        raise DflashError(
            f"several GGUF files beside the checkpoint could be its target: {names}",
            hint="say which one with --target",
        )
    return fitting[0] if fitting else None


def _by_pair(checkpoint: Checkpoint, progress: Progress) -> Target | None:
    """The target of the known pair whose drafter has this geometry."""
    from dflashcpp import pairs

    for pair in pairs.list_pairs():
        if not _is_drafter_of(checkpoint.drafter, pair):
            continue
        progress.say(f"target: {pair.target.where}, of the known pair {pair.name}")
        local = pairs.local_target(pair)
        if local is not None:
            return read_target(local)
        return _remote(pair, progress)
    return None


def _remote(pair: Pair, progress: Progress) -> Target:
    """The target of a pair that is not on this machine: the header alone when it is on the Hub."""
    from dflashcpp.hub_repo import HubId, Repo
    from dflashcpp.pairs import ensure_target

    place = pair.target
    if place.kind != "hub":
        return read_target(ensure_target(pair, progress))
    repo = Repo(HubId(str(place.repo)), place.revision or "main", place.files)
    return read_target(repo.url(place.files[0]))


def _in_hub_cache(checkpoint: Checkpoint, progress: Progress) -> Target | None:
    """The target that config or card name, when the Hub's cache holds its config and tokenizer."""
    from dflashcpp.hub_repo import HubId, cached_snapshot

    wanted = HubId.parse(wanted_target(checkpoint) or "")
    snapshot = cached_snapshot(wanted) if wanted else None
    if snapshot is None:
        return None
    try:
        found = _in_folder(snapshot)
    except DflashError as error:
        progress.say(f"{snapshot} in the Hub cache is no use as the target: {error.message}")
        return None
    progress.say(f"target: {snapshot}, in the Hub cache")
    return found


def _is_drafter_of(drafter: Drafter, pair: Pair) -> bool:
    """Whether the pair's target is this drafter's: taps, hidden size; layers and vocabulary if known."""
    ours, theirs = pair.facts.get("drafter", {}), pair.facts.get("target", {})
    return (
        ours.get("taps") == list(drafter.taps)
        and theirs.get("hidden") == drafter.hidden
        and drafter.target_layers in (None, theirs.get("layers"))
        and drafter.vocab in (None, theirs.get("vocab"))
    )


def _nothing(checkpoint: Checkpoint) -> Target:
    drafter, named = checkpoint.drafter, wanted_target(checkpoint)
    layers = f"{drafter.target_layers} layers, " if drafter.target_layers else ""
    vocab = f", {drafter.vocab} tokens" if drafter.vocab else ""
    wanted = named or f"a target with {layers}hidden size {drafter.hidden}{vocab}"
    raise DflashError(
        f"{checkpoint.files.weights[0]} has no tokenizer and no target was given; it is for {wanted}",
        hint="pass it with --target: a GGUF, a folder or a Hub id (only header or tokenizer are read)",
    )


def wanted_target(checkpoint: Checkpoint) -> str | None:
    """The target's name as the config or the model card gives it."""
    return verifier(checkpoint) or read_card(checkpoint.path).get("base_model")
