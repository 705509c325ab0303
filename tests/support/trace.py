"""Replays a trace of the patched llama-server (patches/README.md) through the reference drafter."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dflashcpp.reference.model import ReferenceDrafter
from dflashcpp.reference.selector import edges


@dataclass(frozen=True)
class Drafted:
    """One draft of the engine: the features of every position before it, and what it drafted."""

    position: int
    anchor: int
    tokens: tuple[int, ...]
    features: torch.Tensor  # [position, taps * hidden]
    lattice: list[dict[str, Any]]


@dataclass(frozen=True)
class Replayed:
    """One drafted token against the reference, given the tokens drafted before it. In logits.

    `gap`: by how much the reference prefers its own choice among the same candidates (0: the same
    token). `outside`: by how much the best token that the engine left out of its candidates beats the
    worst it took (0: the same candidates). `score_error`: the largest difference from the engine's
    scores. `spread`: standard deviation of the scores chosen from, to compare these with.
    """

    position: int
    slot: int
    gap: float
    outside: float
    score_error: float
    spread: float

    @property
    def same(self) -> bool:
        """The reference drafts this token too, if it has the engine's candidates."""
        return self.gap == 0

    @property
    def off(self) -> float:
        """The largest of the three differences."""
        return max(self.gap, self.outside, self.score_error)


def read_trace(path: Path) -> Iterator[Drafted]:
    """The drafts of slot 0 in order; a position's features are those injected last.

    Zeros stand for positions that were never injected: prompt that a windowed drafter does not see.
    """
    rows = np.memmap(path.with_name(path.name + ".f32"), dtype="<f4", mode="r")
    features: dict[int, torch.Tensor] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        event = json.loads(line)
        if event["event"] == "inject":
            count, width = len(event["pos"]), event["width"]
            block = np.array(rows[event["offset"] :][: count * width]).reshape(count, width)
            features.update(zip(event["pos"], torch.from_numpy(block), strict=True))
        elif event["drafted"]:
            unseen = torch.zeros(width)
            known = torch.stack([features.get(position, unseen) for position in range(event["pos0"])])
            yield Drafted(event["pos0"], event["anchor"], tuple(event["drafted"]), known, event["lattice"])


@torch.inference_mode()
def replay(drafter: ReferenceDrafter, drafted: Drafted) -> list[Replayed]:
    """Each token of one draft against what the reference scores there, along the engine's path."""
    start, anchor = torch.tensor([drafted.position]), torch.tensor([drafted.anchor])
    context = drafter.inject(drafted.features[None], torch.arange(drafted.position)[None])
    draft = drafter.draft(context, anchor, start, rows=len(drafted.tokens) + 1)
    previous, found = drafted.anchor, []
    for slot, token in enumerate(drafted.tokens):
        hidden, logits = draft.hidden[0, slot], draft.logits[0, slot]
        if drafted.lattice:
            found.append(_candidates(drafter, drafted, slot, hidden, logits, previous))
        else:
            gap = float(logits.max() - logits[token])
            found.append(Replayed(drafted.position, slot, gap, 0.0, 0.0, float(logits.std())))
        previous = token
    return found


def _candidates(
    drafter: ReferenceDrafter,
    drafted: Drafted,
    slot: int,
    hidden: torch.Tensor,
    logits: torch.Tensor,
    previous: int,
) -> Replayed:
    """A slot of DFlash-2: the engine's candidates and scores against the reference's."""
    lattice = drafted.lattice[slot]
    ids = torch.tensor(lattice["ids"])
    gate = drafter.weights.linear("selector_hidden.weight", hidden[None])
    scores = logits[ids] + edges(drafter.weights, gate, torch.tensor([previous]), ids[None])[0]
    others = logits.index_fill(0, ids, float("-inf"))
    return Replayed(
        drafted.position,
        slot,
        gap=float(scores.max() - scores[lattice["ids"].index(drafted.tokens[slot])]),
        outside=max(0.0, float(others.max() - logits[ids].min())),
        score_error=float((scores - torch.tensor(lattice["scores"])).abs().max()),
        spread=float(scores.std()),
    )
