"""DFlash-2's candidate selector: the top K of each slot, joined by a low-rank edge score, then a walk.

score(prev, c) = logit[c] + sum_r A[prev, r] * gate[r] * S[c, r], with gate = Wh . hidden.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dflashcpp.reference.sampling import draw
from dflashcpp.reference.weights import Weights


@dataclass(frozen=True)
class Walk:
    """A drafted path and what it was drawn from.

    `tokens` [batch, slots]; `candidates` [batch, slots, K]; `scores` [batch, slots, K] along the path;
    `q` [batch, slots, K] the probabilities of the draws (None: greedy).
    """

    tokens: torch.Tensor
    candidates: torch.Tensor
    scores: torch.Tensor
    q: torch.Tensor | None


def edges(
    weights: Weights, gate: torch.Tensor, previous: torch.Tensor, candidates: torch.Tensor
) -> torch.Tensor:
    """Edge scores from `previous` [batch] to `candidates` [batch, K], given `gate` [batch, rank]."""
    before = weights.gather("selector_predecessor.weight", previous) * gate
    after = weights.gather("selector_successor.weight", candidates)
    return torch.einsum("br,bkr->bk", before, after)


def walk(
    weights: Weights,
    hidden: torch.Tensor,
    logits: torch.Tensor,
    anchor: torch.Tensor,
    top_k: int,
    temperature: float = 0.0,
    generator: torch.Generator | None = None,
) -> Walk:
    """Walk the slots from left to right, each choice given the one before it.

    `hidden` [batch, slots, hidden] final-normed rows, `logits` [batch, slots, vocab] after multiplier
    and softcap, `anchor` [batch]. Temperature 0 takes the best; above it draws from softmax(scores / T).
    """
    unary, candidates = logits.topk(top_k, dim=-1)
    gates = weights.linear("selector_hidden.weight", hidden)
    previous, tokens, scores, rows = anchor, [], [], []
    for slot in range(hidden.shape[1]):
        score = unary[:, slot] + edges(weights, gates[:, slot], previous, candidates[:, slot])
        choice = score.argmax(dim=-1)
        if temperature > 0:
            rows.append((score / temperature).softmax(dim=-1))
            choice = draw(rows[-1], generator)
        previous = candidates[:, slot].gather(-1, choice[:, None])[:, 0]
        tokens.append(previous)
        scores.append(score)
    return Walk(
        tokens=torch.stack(tokens, dim=1),
        candidates=candidates,
        scores=torch.stack(scores, dim=1),
        q=torch.stack(rows, dim=1) if rows else None,
    )
