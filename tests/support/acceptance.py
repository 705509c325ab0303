"""Reference drafting on the small real pair: its checkpoint, its target in torch, held-out prompts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch

from dflashcpp import knowledge
from dflashcpp.checkpoint import open_checkpoint
from dflashcpp.drafter import Drafter
from dflashcpp.gguf_file import read_header
from dflashcpp.reference.generate import Generation, Sampling, generate
from dflashcpp.reference.model import ReferenceDrafter
from dflashcpp.reference.vocabulary import BorrowedVocabulary
from dflashcpp.reference.weights import CheckpointWeights, Weights
from tests.support.bpe import Bpe
from tests.support.llama_target import LlamaTarget

CHECKPOINT = knowledge.folder("models") / "smollm2-135m-dflash2"
END = 2  # <|im_end|>


def held_out(kind: str, count: int) -> list[str]:
    """The first `count` held-out prompts of a kind (code, explain, list, rewrite)."""
    prompts = json.loads((CHECKPOINT / "held-out-prompts.json").read_text(encoding="utf-8"))
    return [text for name, text in prompts if name == kind][:count]


class RealPair:
    """The small real drafter, by the reference, with the target at `path` run in torch."""

    def __init__(self, path: Path, *, drafter: Drafter | None = None, weights: Weights | None = None) -> None:
        checkpoint = open_checkpoint(CHECKPOINT)
        settings = drafter or checkpoint.drafter
        self.target = LlamaTarget(path, settings.taps)
        self.bpe = Bpe(read_header(path))
        words = BorrowedVocabulary(self.target.weights, "target")
        self.drafter = ReferenceDrafter(settings, weights or CheckpointWeights(checkpoint), words)

    def answer(self, request: str, max_new: int, *, temperature: float = 0.0, seed: int = 0) -> Generation:
        """One turn, drafted and verified."""
        self.target.reset()
        generator = torch.Generator().manual_seed(seed)
        return generate(
            self.drafter,
            self.target,
            self.bpe.chat(request),
            max_new,
            sampling=Sampling(temperature),
            stop=(END,),
            generator=generator,
        )

    def mean_accepted_length(self, requests: Sequence[str], max_new: int) -> float:
        """Over the verify steps of all `requests`, greedily."""
        steps = [step for request in requests for step in self.answer(request, max_new).steps]
        return sum(step.accepted + 1 for step in steps) / len(steps)
