"""Speculative sampling leaves the target's distribution as it is, and accepts what theory says.

Bounds hold with probability 1 - 1e-6: for n draws over k outcomes the total variation distance of the
empirical distribution is at most sqrt(k / 4n) on average, and exceeds that by t with probability at
most exp(-2 n t^2) (McDiarmid); a mean of n values in [0, 1] is off by t with at most 2 exp(-2 n t^2).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch

from dflashcpp.checkpoint import open_checkpoint
from dflashcpp.reference.model import Draft, ReferenceDrafter
from dflashcpp.reference.sampling import Verdict, draw, probabilities, verify_greedy, verify_sampled
from dflashcpp.reference.vocabulary import RandomVocabulary
from dflashcpp.reference.weights import CheckpointWeights
from tests.support.checkpoints import t1, t1_v2, write_checkpoint

pytestmark = pytest.mark.parity

VOCAB, DRAWS, RISK = 8, 10_000, 1e-6
ANCHOR, MASK = 3, 7
TINY = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "vocab_size": VOCAB,
}
CONFIGS = {
    "v1": t1(**TINY, dflash_config={"mask_token_id": MASK}),
    "v2": t1_v2(**TINY, dflash_config={"mask_token_id": MASK, "selector_top_k": 4, "selector_rank": 16}),
}
HEAD_SCALE = {"v1": 0.08, "v2": 0.4}  # drafts neither flat nor certain
TARGETS = {
    "plain": {"temperature": 1.0},
    "temperature": {"temperature": 0.6},
    "top-k and top-p": {"temperature": 0.9, "top_k": 5, "top_p": 0.85},
}


def variation_bound(outcomes: int, draws: int) -> float:
    return math.sqrt(outcomes / (4 * draws)) + math.sqrt(math.log(1 / RISK) / (2 * draws))


def mean_bound(draws: int) -> float:
    return math.sqrt(math.log(2 / RISK) / (2 * draws))


class MarkovTarget:
    """A target whose next token depends on the last one only: `p[last, next]`."""

    def __init__(self, temperature: float, top_k: int = 0, top_p: float = 1.0) -> None:
        logits = 2 * torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(5))
        self.p = probabilities(logits, temperature, top_k=top_k, top_p=top_p)

    def pairs(self) -> torch.Tensor:
        """Exact joint distribution of the two tokens after the anchor."""
        return self.p[ANCHOR][:, None] * self.p


def drafts(folder: Path, name: str) -> Draft:
    """DRAWS sampled drafts of three tokens after the same context, by a random drafter."""
    checkpoint = open_checkpoint(write_checkpoint(folder, CONFIGS[name], dtype="F32", seed=4))
    vocabulary = RandomVocabulary(VOCAB, 64, seed=2, head_scale=HEAD_SCALE[name])
    drafter = ReferenceDrafter(checkpoint.drafter, CheckpointWeights(checkpoint), vocabulary)
    features = torch.randn(1, 4, 128, generator=torch.Generator().manual_seed(6))
    with torch.inference_mode():
        one = drafter.inject(features, torch.arange(4)[None])
        one.positions = one.positions.expand(DRAWS, -1)
        one.keys = [key.expand(DRAWS, -1, -1, -1) for key in one.keys]
        one.values = [value.expand(DRAWS, -1, -1, -1) for value in one.values]
        anchors, starts = torch.full((DRAWS,), ANCHOR), torch.full((DRAWS,), 4)
        generator = torch.Generator().manual_seed(7)
        return drafter.draft(one, anchors, starts, rows=4, temperature=0.8, generator=generator)


Rule = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Generator], Verdict]


def outputs(target: MarkovTarget, draft: Draft, rule: Rule) -> tuple[torch.Tensor, float]:
    """Empirical joint distribution of the first two tokens, and how often the first drafted one stays."""
    generator = torch.Generator().manual_seed(8)
    seen, first = torch.zeros(VOCAB, VOCAB), 0
    for row in range(DRAWS):
        drafted = draft.tokens[row]
        p = target.p[torch.cat((torch.tensor([ANCHOR]), drafted))]
        candidates = None if draft.candidates is None else draft.candidates[row]
        verdict = rule(drafted, p, draft.q[row], candidates, generator)
        tokens = [*drafted[: verdict.accepted].tolist(), verdict.bonus]
        if len(tokens) < 2:
            tokens.append(int(draw(target.p[tokens[0]][None], generator)))
        seen[tokens[0], tokens[1]] += 1
        first += verdict.accepted > 0
    return seen / DRAWS, first / DRAWS


def spread(draft: Draft) -> torch.Tensor:
    """q of the first slot over the vocabulary; the same in every row."""
    if draft.candidates is None:
        return draft.q[0, 0]
    return torch.zeros(VOCAB).scatter(0, draft.candidates[0, 0], draft.q[0, 0])


@pytest.mark.parametrize("version", CONFIGS)
@pytest.mark.parametrize("name", TARGETS)
def test_output_is_the_targets_distribution(tmp_path: Path, version: str, name: str) -> None:
    target, draft = MarkovTarget(**TARGETS[name]), drafts(tmp_path, version)
    empirical, acceptance = outputs(target, draft, verify_sampled)
    distance = (empirical - target.pairs()).abs().sum() / 2
    assert distance < variation_bound(VOCAB * VOCAB, DRAWS)
    expected = torch.minimum(target.p[ANCHOR], spread(draft)).sum()
    assert 0.05 < expected < 0.95
    assert abs(acceptance - expected) < mean_bound(DRAWS)


def _accept_by_ratio_then_plain(drafted, p, q, candidates, generator):  # type: ignore[no-untyped-def]
    """Wrong: a refused token is replaced by a draw from p instead of the residual."""
    verdict = verify_sampled(drafted, p, q, candidates, generator)
    if verdict.accepted == len(drafted):
        return verdict
    return Verdict(verdict.accepted, int(draw(p[verdict.accepted][None], generator)))


def _uniform_q(drafted, p, q, candidates, generator):  # type: ignore[no-untyped-def]
    """Wrong: q is not what the tokens were drawn from."""
    return verify_sampled(drafted, p, torch.full_like(q, 1 / q.shape[-1]), candidates, generator)


@pytest.mark.parametrize("wrong", [_accept_by_ratio_then_plain, _uniform_q])
def test_the_bound_catches_a_wrong_rule(tmp_path: Path, wrong: Rule) -> None:
    target, draft = MarkovTarget(temperature=1.0), drafts(tmp_path, "v2")
    empirical, _ = outputs(target, draft, wrong)
    distance = (empirical - target.pairs()).abs().sum() / 2
    assert distance > variation_bound(VOCAB * VOCAB, DRAWS)


def test_greedily_drafted_tokens_are_lossless_as_point_masses() -> None:
    target = MarkovTarget(temperature=1.0)
    tokens = torch.tensor([[1, 5, 2]]).expand(DRAWS, -1)
    draft = Draft(tokens, tokens, tokens, candidates=tokens[..., None], q=torch.ones(DRAWS, 3, 1))
    empirical, acceptance = outputs(target, draft, verify_sampled)
    assert (empirical - target.pairs()).abs().sum() / 2 < variation_bound(VOCAB * VOCAB, DRAWS)
    assert abs(acceptance - target.p[ANCHOR, 1]) < mean_bound(DRAWS)


def test_greedy_keeps_the_prefix_the_target_would_have_chosen() -> None:
    logits = torch.eye(VOCAB)[torch.tensor([4, 2, 6, 1])]
    assert verify_greedy(torch.tensor([4, 2, 6]), logits) == Verdict(3, 1)
    assert verify_greedy(torch.tensor([4, 3, 6]), logits) == Verdict(1, 2)
    assert verify_greedy(torch.tensor([0, 2, 6]), logits) == Verdict(0, 4)


def test_a_token_the_target_excludes_is_never_kept() -> None:
    p = torch.tensor([[0.0, 1.0, 0.0]]).expand(2, -1)
    q = torch.tensor([[1.0, 0.0, 0.0]])
    for seed in range(50):
        generator = torch.Generator().manual_seed(seed)
        assert verify_sampled(torch.tensor([0]), p, q, None, generator) == Verdict(0, 1)


@pytest.mark.parametrize("top_k", [0, 3, 100])
@pytest.mark.parametrize("top_p", [1.0, 0.9, 0.3])
def test_probabilities_are_zlabs(zlab: ModuleType, top_k: int, top_p: float) -> None:
    logits = 3 * torch.randn(4, 5, 40, generator=torch.Generator().manual_seed(9))
    theirs = zlab._sampling_probs(logits, 0.7, top_p, top_k)
    assert (theirs - probabilities(logits, 0.7, top_k=top_k, top_p=top_p)).abs().max() < 1e-6
