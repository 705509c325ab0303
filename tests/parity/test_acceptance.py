"""Acceptance on the small real pair: the reference drafts with its target in torch, on held-out prompts.

The card's figures (56 prompts): mean accepted length 2.01 in all with 7 drafted. By this code, 24 prompts
(6 of each kind, 128 tokens): all 2.02, code 2.36, list 2.01, explain 1.62, rewrite 2.40.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dflashcpp import pairs
from dflashcpp.checkpoint import open_checkpoint
from dflashcpp.drafter import Drafter
from tests.support.acceptance import CHECKPOINT, RealPair, held_out

pytestmark = [pytest.mark.parity, pytest.mark.slow]

KINDS = ("code", "explain", "list", "rewrite")
MEASURED = 1.862  # over the first two prompts of each kind, 48 tokens each
TOLERANCE = 0.05  # greedy and seedless: only a near tie that rounds the other way moves it


@pytest.fixture(scope="module")
def target() -> Path:
    return pairs.ensure_target(pairs.load_pair())


def mean_accepted_length(target: Path, drafter: Drafter | None = None) -> float:
    requests = [request for kind in KINDS for request in held_out(kind, 2)]
    return RealPair(target, drafter=drafter).mean_accepted_length(requests, 48)


def test_the_shipped_drafter_is_accepted_as_its_card_says(target: Path) -> None:
    assert abs(mean_accepted_length(target) - MEASURED) < TOLERANCE


def test_taps_in_another_order_are_accepted_next_to_never(target: Path) -> None:
    drafter = open_checkpoint(CHECKPOINT).drafter
    wrong = RealPair(target, drafter=replace(drafter, taps=drafter.taps[::-1]))
    assert wrong.mean_accepted_length(held_out("code", 1) + held_out("list", 1), 24) < 1.2


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_drafting_changes_no_greedy_text_and_keeps_going_when_sampling(
    target: Path, temperature: float
) -> None:
    pair = RealPair(target)
    request = held_out("code", 2)[1]
    answer = pair.answer(request, 32, temperature=temperature, seed=3)
    assert len(answer.tokens) == 32 and answer.mean_accepted_length is not None
    assert sum(step.accepted + 1 for step in answer.steps) + 1 >= 32
    if temperature == 0:
        assert answer.tokens == _plain(pair, request, 32)


def _plain(pair: RealPair, request: str, count: int) -> tuple[int, ...]:
    """The target alone, token by token."""
    pair.target.reset()
    tokens, fed = [], pair.bpe.chat(request)
    with torch.inference_mode():
        for _ in range(count):
            logits, _ = pair.target.feed(fed)
            fed = [int(logits[-1].argmax())]
            tokens += fed
    return tuple(tokens)
