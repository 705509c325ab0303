"""From logits to probabilities, and the rule that keeps speculative decoding lossless.

Rejection sampling as in Leviathan et al. 2023 and Chen et al. 2023: a token drawn from q is kept with
probability min(1, p / q); the first one refused is replaced by a draw from max(p - q, 0).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Verdict:
    """How many drafted tokens stay, and the target's own token after them."""

    accepted: int
    bonus: int


def draw(probabilities: torch.Tensor, generator: torch.Generator | None = None) -> torch.Tensor:
    """One index a row of `probabilities` [rows, n]: int64 [rows]."""
    return torch.multinomial(probabilities, 1, generator=generator)[:, 0]


def probabilities(
    logits: torch.Tensor, temperature: float, *, top_k: int = 0, top_p: float = 1.0
) -> torch.Tensor:
    """softmax(logits / temperature) after top-k, then top-p, over the last dimension.

    `temperature` must be above 0; `top_k` 0 and `top_p` 1 keep everything. Top-p keeps the most
    likely tokens up to and with the one that reaches `top_p`.
    """
    scores = logits.float() / temperature
    if 0 < top_k < scores.shape[-1]:
        best, index = scores.topk(top_k, dim=-1)
        scores = torch.full_like(scores, float("-inf")).scatter(-1, index, best)
    chances = scores.softmax(dim=-1)
    if top_p >= 1.0:
        return chances
    ordered, order = chances.sort(dim=-1, descending=True)
    kept = ordered * (ordered.cumsum(dim=-1) - ordered < top_p)
    chances = torch.zeros_like(chances).scatter(-1, order, kept)
    return chances / chances.sum(dim=-1, keepdim=True)


def verify_greedy(drafted: torch.Tensor, logits: torch.Tensor) -> Verdict:
    """Temperature 0: keep the drafted prefix that the target would have chosen itself.

    `drafted` [slots]; `logits` [slots + 1, vocab], row j being the target's after j drafted tokens.
    """
    chosen = logits.argmax(dim=-1)
    accepted = int((drafted == chosen[:-1]).long().cumprod(0).sum())
    return Verdict(accepted, int(chosen[accepted]))


def verify_sampled(
    drafted: torch.Tensor,
    target: torch.Tensor,
    q: torch.Tensor,
    candidates: torch.Tensor | None = None,
    generator: torch.Generator | None = None,
) -> Verdict:
    """Temperature above 0: accept with min(1, p / q), else draw from what q left of p.

    `drafted` [slots]; `target` [slots + 1, vocab] probabilities p; `q` [slots, K] over `candidates`
    [slots, K], or [slots, vocab] without them. Each row of q must be the one its token was drawn from.
    """
    for slot, token in enumerate(drafted.tolist()):
        p, drawn_from = target[slot], _spread(q[slot], candidates, slot, target.shape[-1])
        if torch.rand((), generator=generator) * drawn_from[token] < p[token]:
            continue
        rest = (p - drawn_from).clamp_min(0)
        source = rest / rest.sum() if rest.sum() > 0 else p
        return Verdict(slot, int(draw(source[None], generator)))
    return Verdict(len(drafted), int(draw(target[-1:], generator)))


def _spread(q: torch.Tensor, candidates: torch.Tensor | None, slot: int, vocab: int) -> torch.Tensor:
    """One row of q over the whole vocabulary."""
    if candidates is None:
        return q
    return torch.zeros(vocab, dtype=q.dtype).scatter(0, candidates[slot], q)
