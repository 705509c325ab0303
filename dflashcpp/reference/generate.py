"""Speculative decoding by the reference: draft, verify, keep what the target agrees with.

The loop of the spec: the anchor is the last token, whose taps are not known yet; a step verifies
[anchor, drafted ...] with the target, keeps `accepted` of them and the target's own next token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from dflashcpp.reference.model import Context, Draft, ReferenceDrafter
from dflashcpp.reference.sampling import Verdict, draw, probabilities, verify_greedy, verify_sampled


class Target(Protocol):
    """Any target that can be fed tokens and rewound."""

    def feed(self, tokens: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Append `tokens`; give their logits [n, vocab] and the drafter's taps [n, taps * hidden]."""
        ...

    def rewind(self, length: int) -> None:
        """Forget everything after the first `length` tokens."""
        ...


@dataclass(frozen=True)
class Sampling:
    """How the target's tokens are chosen; temperature 0 is greedy."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0


@dataclass(frozen=True)
class Step:
    """One draft and its verification: `anchor` at `position`, what was drafted, how much was kept."""

    position: int
    anchor: int
    drafted: tuple[int, ...]
    accepted: int


@dataclass(frozen=True)
class Generation:
    """The tokens after the prompt and the steps that made them."""

    tokens: tuple[int, ...]
    steps: tuple[Step, ...]

    @property
    def mean_accepted_length(self) -> float | None:
        """Tokens a verify step yields, its own one included; None if there was no step."""
        if not self.steps:
            return None
        return sum(step.accepted + 1 for step in self.steps) / len(self.steps)


@torch.inference_mode()
def generate(
    drafter: ReferenceDrafter,
    target: Target,
    prompt: Sequence[int],
    max_new: int,
    *,
    sampling: Sampling | None = None,
    rows: int | None = None,
    stop: Sequence[int] = (),
    generator: torch.Generator | None = None,
) -> Generation:
    """Continue `prompt` by at most `max_new` tokens, or to the first token of `stop`.

    `rows` is the width of a block, anchor included (None: as trained); the last blocks are narrower.
    """
    sampling = sampling or Sampling()
    logits, features = target.feed(prompt)
    context = drafter.inject(features[None], torch.arange(len(prompt))[None])
    tokens, steps = [_choose(logits[-1], sampling, generator)], list[Step]()
    while len(tokens) < max_new and tokens[-1] not in stop:
        width = min(rows or drafter.drafter.block_size, max_new - len(tokens) + 1)
        position = len(prompt) + len(tokens) - 1
        drafted, kept, verdict, context = _step(
            drafter, target, context, tokens[-1], position, width, sampling, generator
        )
        steps.append(Step(position, tokens[-1], drafted, verdict.accepted))
        tokens += _up_to_stop([*kept, verdict.bonus], stop)
    return Generation(tuple(tokens[:max_new]), tuple(steps))


def _step(
    drafter: ReferenceDrafter,
    target: Target,
    context: Context,
    anchor: int,
    position: int,
    width: int,
    sampling: Sampling,
    generator: torch.Generator | None,
) -> tuple[tuple[int, ...], tuple[int, ...], Verdict, Context]:
    """Draft, verify, commit: (drafted, kept, verdict, context that now holds the committed tokens)."""
    draft = drafter.draft(
        context,
        torch.tensor([anchor]),
        torch.tensor([position]),
        rows=width,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        generator=generator,
    )
    drafted = tuple(draft.tokens[0].tolist())
    logits, features = target.feed((anchor, *drafted))
    verdict = _verify(draft, logits, sampling, generator)
    committed = verdict.accepted + 1
    target.rewind(position + committed)
    positions = torch.arange(position, position + committed)[None]
    context = context.extended(drafter.inject(features[None, :committed], positions))
    return drafted, drafted[: verdict.accepted], verdict, context


def _verify(
    draft: Draft, logits: torch.Tensor, sampling: Sampling, generator: torch.Generator | None
) -> Verdict:
    if draft.q is None:
        return verify_greedy(draft.tokens[0], logits)
    p = probabilities(logits, sampling.temperature, top_k=sampling.top_k, top_p=sampling.top_p)
    candidates = None if draft.candidates is None else draft.candidates[0]
    return verify_sampled(draft.tokens[0], p, draft.q[0], candidates, generator)


def _choose(logits: torch.Tensor, sampling: Sampling, generator: torch.Generator | None) -> int:
    if sampling.temperature <= 0:
        return int(logits.argmax())
    p = probabilities(logits, sampling.temperature, top_k=sampling.top_k, top_p=sampling.top_p)
    return int(draw(p[None], generator))


def _up_to_stop(tokens: list[int], stop: Sequence[int]) -> list[int]:
    for index, token in enumerate(tokens):
        if token in stop:
            return tokens[: index + 1]
    return tokens
