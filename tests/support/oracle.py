"""One drafter checkpoint run twice: by z-lab's package and by our reference."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from dflashcpp.checkpoint import open_checkpoint
from dflashcpp.reference.model import ReferenceDrafter
from dflashcpp.reference.vocabulary import BorrowedVocabulary
from dflashcpp.reference.weights import CheckpointWeights, TensorWeights
from tests.support.checkpoints import write_checkpoint

ANCHOR = 7


class Both:
    """The same checkpoint, embedding and head in both; `rows` of context and a block that follows it."""

    def __init__(
        self, zlab: ModuleType, folder: Path, config: dict[str, Any], *, ours: dict[str, Any] | None = None
    ) -> None:
        write_checkpoint(folder / "theirs", config, dtype="F32")
        two = "selector_rank" in config["dflash_config"]
        kind = zlab.DFlash2DraftModel if two else zlab.DFlashDraftModel
        self.theirs = kind.from_pretrained(folder / "theirs", dtype=torch.float32).eval()
        write_checkpoint(folder / "ours", ours or config, dtype="F32")
        self.checkpoint = open_checkpoint(folder / "ours")
        self.drafter = self.checkpoint.drafter
        self._make_vocabulary(config["vocab_size"], config["hidden_size"])
        self.ours = ReferenceDrafter(self.drafter, CheckpointWeights(self.checkpoint), self.vocabulary)

    def _make_vocabulary(self, size: int, hidden: int) -> None:
        generator = torch.Generator().manual_seed(1)
        self.embedding = torch.randn(size, hidden, generator=generator)
        self.head = torch.nn.Linear(hidden, size, bias=False).requires_grad_(False)
        self.head.weight.data = torch.randn(size, hidden, generator=generator) / hidden**0.5
        tensors = {"token_embd.weight": self.embedding, "output.weight": self.head.weight}
        self.vocabulary = BorrowedVocabulary(TensorWeights(tensors), "test")

    def inputs(self, context: int, rows: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Features [1, context, taps * hidden] and block ids [1, rows]."""
        generator = torch.Generator().manual_seed(2)
        width = len(self.drafter.taps) * self.drafter.hidden
        ids = torch.full((1, rows or self.drafter.block_size), self.drafter.mask_token_id)
        ids[0, 0] = ANCHOR
        return 5 * torch.randn(1, context, width, generator=generator), ids

    @torch.no_grad()
    def hidden(self, context: int, rows: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Final-normed rows [1, rows, hidden], theirs and ours."""
        features, ids = self.inputs(context, rows)
        positions = torch.arange(context + ids.shape[1])[None]
        theirs = self.theirs(
            position_ids=positions, noise_embedding=self.embedding[ids], target_hidden=features
        )
        injected = self.ours.inject(features, positions[:, :context])
        return theirs, self.ours.block(injected, ids, torch.tensor([context]))

    @torch.no_grad()
    def drafts(self, context: int, temperature: float, seed: int = 0) -> tuple[Any, Any]:
        """What both draft: (their tokens, candidates, q) and our `Draft`; the same random numbers."""
        features, ids = self.inputs(context)
        theirs, _ = self.hidden(context)
        torch.manual_seed(seed)
        proposed = self.theirs.propose(theirs[:, 1:], ids[:, 0], self.head, temperature)
        torch.manual_seed(seed)
        injected = self.ours.inject(features, torch.arange(context)[None])
        start = torch.tensor([context])
        return proposed, self.ours.draft(injected, ids[:, 0], start, temperature=temperature)
