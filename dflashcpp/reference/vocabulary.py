"""Token embedding and output head, which a drafter borrows from its target."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from dflashcpp.drafter import Drafter
from dflashcpp.errors import DflashError
from dflashcpp.reference.weights import GgufWeights, Weights

if TYPE_CHECKING:
    from dflashcpp.gguf_file import Header

_HEAD_ROWS = 8192
_EMBEDDING_SCALE = 0.1  # about what trained embeddings have


class Vocabulary:
    """What a drafter needs of a vocabulary; `origin` says in words where it comes from."""

    origin: str
    size: int

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """Raw embedding rows: float32 [*ids.shape, hidden]."""
        raise NotImplementedError

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Head applied to `hidden` [..., hidden]: float32 [..., size], no multiplier, no softcap."""
        raise NotImplementedError


@dataclass
class BorrowedVocabulary(Vocabulary):
    """The embedding and head of a GGUF (a target's, or a drafter's own); tied if it has one matrix.

    `mapping` [rows of the head] names the token of each row of a reduced head; the other tokens get
    minus infinity.
    """

    weights: Weights
    origin: str
    size: int = 0
    mapping: torch.Tensor | None = None

    def __post_init__(self) -> None:
        self._head = "output.weight" if "output.weight" in self.weights.names() else "token_embd.weight"
        self.size = self.size or self.weights.shape(self._head)[0]

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        return self.weights.gather("token_embd.weight", ids)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        rows = self.weights.linear(self._head, hidden)
        if self.mapping is None:
            return rows
        full = torch.full((*rows.shape[:-1], self.size), float("-inf"))
        full[..., self.mapping] = rows
        return full


@dataclass
class SplitVocabulary(Vocabulary):
    """The embedding of one vocabulary with the head of another (a drafter with a head of its own)."""

    embedding: Vocabulary
    head: Vocabulary

    def __post_init__(self) -> None:
        self.size = self.head.size
        self.origin = f"embedding: {self.embedding.origin}; head: {self.head.origin}"

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        return self.embedding.embed(ids)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.head.logits(hidden)


@dataclass
class RandomVocabulary(Vocabulary):
    """Seeded random rows, made when asked for: any size costs no memory.

    `head_scale` sets how far the logits spread.
    """

    size: int
    hidden: int
    seed: int
    head_scale: float = 1.0

    def __post_init__(self) -> None:
        self.origin = f"random embedding and head ({self.size} x {self.hidden}, seed {self.seed})"

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        known, where = ids.reshape(-1).unique(return_inverse=True)
        rows = [self._normal(1, 2 * token) for token in known.tolist()]
        return _EMBEDDING_SCALE * torch.cat(rows)[where].view(*ids.shape, self.hidden)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        parts = []
        for start in range(0, self.size, _HEAD_ROWS):
            rows = self._normal(min(_HEAD_ROWS, self.size - start), 2 * start + 1)
            parts.append(hidden @ (rows * self.head_scale).T)
        return torch.cat(parts, dim=-1)

    def _normal(self, rows: int, stream: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(self.seed * 2**32 + stream)
        return torch.randn(rows, self.hidden, generator=generator)


def shared_vocabulary(target: Header | None, size: int, hidden: int, seed: int) -> Vocabulary:
    """The target's embedding and head; without a target seeded random ones of this size.

    Raises DflashError when the target's rows have another length.
    """
    if target is None:
        return RandomVocabulary(size, hidden, seed)
    weights = GgufWeights(target)
    found = weights.shape("token_embd.weight")
    if found[-1] != hidden:
        raise DflashError(
            f"{target.source} has hidden size {found[-1]}, the drafter has {hidden}",
            hint="give the target that this drafter was trained for",
        )
    return BorrowedVocabulary(weights, f"embedding and head of {target.source}")


def with_own(shared: Vocabulary, drafter: Drafter, weights: Weights) -> Vocabulary:
    """`shared`, with the drafter's own embedding or head in its place where it has one."""
    if not drafter.own_embedding and not drafter.own_head:
        return shared
    mapping = weights.integers("d2t") if drafter.draft_vocab else None
    size = 0 if mapping is None else shared.size
    own = BorrowedVocabulary(weights, f"the drafter's own in {weights.label}", size, mapping)
    return own if drafter.own_embedding else SplitVocabulary(shared, own)
