"""Drafters that bring an embedding or a head of their own, perhaps with a reduced vocabulary (d2t)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dflashcpp.checkpoint.config import Config
from dflashcpp.checkpoint.placement import Placed
from dflashcpp.checkpoint.safetensors_file import RawTensor
from dflashcpp.checkpoint.weights import Reader
from dflashcpp.errors import DflashError

if TYPE_CHECKING:
    import numpy as np

_EMBEDDING, _HEAD, _MAP = "token_embd.weight", "output.weight", "d2t"


def vocabulary_features(placed: Placed, config: Config, dflash2: bool, warnings: list[str]) -> set[str]:
    """Which of own embedding, own head and reduced vocabulary are kept.

    An embedding that llama.cpp must not see is taken out of `placed`, with a warning: given an
    embedding but no head, llama.cpp uses the embedding as the head (`src/models/dflash.cpp`).
    Raises DflashError for a reduced vocabulary that cannot work.
    """
    if _EMBEDDING in placed.tensors and (reason := _drop_embedding(placed, config)):
        dropped = placed.tensors.pop(_EMBEDDING)
        placed.dropped[dropped.name] = reason
        warnings.append(f"{dropped.name} is left out: {reason}")
    found = {_EMBEDDING: "own_embedding", _HEAD: "own_head", _MAP: "reduced_vocab"}
    features = {feature for name, feature in found.items() if name in placed.tensors}
    _check(placed, config, dflash2)
    _check_head(placed, config)
    return features | ({"own_head"} if "reduced_vocab" in features else set())


def _drop_embedding(placed: Placed, config: Config) -> str | None:
    if config.get("has_embed_tokens") is False:
        return "has_embed_tokens is false, the target's embedding is used"
    if _HEAD not in placed.tensors and _MAP not in placed.tensors:
        return "there is no lm_head with it, so the target's embedding and head are used"
    return None


def _check(placed: Placed, config: Config, dflash2: bool) -> None:
    said, vocab = config.get("draft_vocab"), config.get("vocab")
    mapped = _MAP in placed.tensors
    reduced = mapped or (said is not None and vocab is not None and said != vocab)
    if not reduced:
        return
    if dflash2:
        raise DflashError(
            f"{config.source}: a DFlash-2 drafter with a reduced vocabulary ({said or 'd2t'} of {vocab}): "
            "its selector's codebooks cover the whole one",
            hint="no engine runs such a drafter; take one with the full vocabulary",
        )
    if not mapped:
        raise DflashError(
            f"{config.source}: draft_vocab_size is {said} of {vocab} tokens, "
            "but there is no tensor d2t that says which ones",
            hint="the checkpoint is incomplete; download it again",
        )


def _check_head(placed: Placed, config: Config) -> None:
    """A head without d2t must have a row for every token: row i is taken for token i."""
    head, vocab = placed.tensors.get(_HEAD), config.get("vocab")
    if head is None or _MAP in placed.tensors or vocab is None or not head.shape or head.shape[0] == vocab:
        return
    raise DflashError(
        f"{head.file}: {head.name} is {list(head.shape)}, but {config.source} says {vocab} tokens, "
        "and there is no tensor d2t that says which of them the rows are",
        hint="config.json and weights belong to different checkpoints, or the checkpoint is incomplete",
    )


def draft_to_target(reader: Reader, raw: RawTensor, vocab: int) -> np.ndarray:
    """d2t as llama.cpp wants it: absolute target ids, int64 [draft vocabulary].

    Checkpoints store offsets: target id = draft id + d2t[draft id] (speculators, EAGLE-3). Raises
    DflashError for ids outside the vocabulary and for two draft tokens with the same target token.
    """
    import numpy as np

    if raw.dtype not in ("I64", "I32"):
        raise DflashError(f"{raw.file.name}: {raw.name} is {raw.dtype}, it must be I64 or I32")
    kind = "<i8" if raw.dtype == "I64" else "<i4"
    offsets = np.frombuffer(reader.read(raw.file, raw.offset, raw.nbytes), dtype=kind).astype(np.int64)
    inside = np.abs(offsets) < max(vocab, 1)
    ids = np.where(inside, offsets, 0) + np.arange(len(offsets))
    wrong = np.flatnonzero(~inside | (ids < 0) | (ids >= vocab))
    if len(wrong):
        index = int(wrong[0])
        raise DflashError(
            f"{raw.file.name}: {raw.name}[{index}] is {int(offsets[index])}, outside of the {vocab} tokens",
            hint="d2t holds offsets: target id = draft id + d2t[draft id]",
        )
    if len(np.unique(ids)) != len(ids):
        raise DflashError(
            f"{raw.file.name}: {raw.name} leads from several draft tokens to the same target token",
            hint="d2t holds offsets: target id = draft id + d2t[draft id]; the checkpoint is damaged",
        )
    return ids
