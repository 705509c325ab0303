"""The reference computes what z-lab's own code computes, to 1e-5 of the largest value, in float32."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.support.checkpoints import LLAMA3, t1, t1_v2
from tests.support.oracle import Both

pytestmark = pytest.mark.parity

BOUND = 1e-5
CLEARLY_DIFFERENT = 1e-2
LENGTHS = (1, 30, 200)

MIXED = {
    "layer_types": ["sliding_attention", "full_attention"],
    "use_sliding_window": True,
    "sliding_window": 8,
}
ALL_SLIDING = {**MIXED, "layer_types": ["sliding_attention"] * 2}
YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 1024,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}
LINEAR = {"rope_type": "linear", "factor": 4.0}

CASES: dict[str, dict[str, Any]] = {
    "v1": t1(),
    "v1, causal everywhere": t1(is_causal=True),
    "v1, window, causal where it slides": t1(**MIXED),
    "v1, window on all layers, not causal": t1(**ALL_SLIDING, is_causal=False),
    "v1, yarn": t1(rope_scaling=YARN),
    "v1, yarn with its own attention factor": t1(rope_scaling={**YARN, "attention_factor": 0.8}),
    "v1, llama3": t1(rope_scaling=LLAMA3),
    "v1, linear": t1(rope_scaling=LINEAR),
    "v1, nested rope": t1(
        rope_theta=..., rope_scaling=..., rope_parameters={"rope_theta": 5e5, "rope_type": "default"}
    ),
    "v2": t1_v2(),
    "v2, window": t1_v2(**ALL_SLIDING),
    "v2, kernel 3, groups of 32": t1_v2(dflash_config={"conv_kernel_size": 3, "conv_group_size": 32}),
    "v2, multiplier and softcap": t1_v2(
        dflash_config={"output_multiplier": 0.3, "final_logit_softcapping": 5.0}
    ),
}


def difference(theirs: torch.Tensor, ours: torch.Tensor) -> float:
    """Largest difference over the largest value."""
    return float((theirs - ours).abs().max() / theirs.abs().max())


@pytest.mark.parametrize("name", CASES)
def test_block_rows_agree(zlab: ModuleType, tmp_path: Path, name: str) -> None:
    both = Both(zlab, tmp_path, CASES[name])
    for context in LENGTHS:
        theirs, ours = both.hidden(context)
        assert theirs.abs().mean() > 0.1
        assert difference(theirs, ours) < BOUND


@pytest.mark.parametrize("rows", [2, 3, 8])
def test_short_blocks_agree(zlab: ModuleType, tmp_path: Path, rows: int) -> None:
    theirs, ours = Both(zlab, tmp_path, t1_v2(dflash_config={"conv_kernel_size": 3})).hidden(20, rows)
    assert difference(theirs, ours) < BOUND


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("v2")])
def test_logits_and_drafted_paths_agree(zlab: ModuleType, tmp_path: Path, name: str) -> None:
    both = Both(zlab, tmp_path, CASES[name])
    (tokens, candidates, q), draft = both.drafts(30, temperature=0.0)
    theirs, _ = both.hidden(30)
    logits = both.theirs.compute_logits(theirs[:, 1:], both.head)
    assert difference(logits, draft.logits) < BOUND
    assert torch.equal(tokens, draft.tokens)
    assert torch.equal(candidates.sort().values, draft.candidates.sort().values)
    assert q is None and draft.q is None


@pytest.mark.parametrize("seed", range(5))
def test_sampled_paths_and_their_probabilities_agree(zlab: ModuleType, tmp_path: Path, seed: int) -> None:
    both = Both(zlab, tmp_path, t1_v2())
    (tokens, candidates, q), draft = both.drafts(30, temperature=0.7, seed=seed)
    assert torch.equal(tokens, draft.tokens)
    spread = torch.zeros(1, 7, 512)
    theirs = spread.scatter(-1, candidates, q)
    assert (theirs - spread.scatter(-1, draft.candidates, draft.q)).abs().max() < BOUND


def test_v1_logits_agree_after_multiplier_and_softcap(zlab: ModuleType, tmp_path: Path) -> None:
    config = t1(dflash_config={"output_multiplier": 0.3, "final_logit_softcapping": 5.0})
    both = Both(zlab, tmp_path, config)
    theirs, ours = both.hidden(30)
    logits = both.theirs.compute_logits(theirs, both.head)
    assert difference(logits, both.ours.logits(ours)) < BOUND


WRONG: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "theta": (t1(), t1(rope_theta=500000)),
    "window one key short": (t1(**ALL_SLIDING), t1(**{**ALL_SLIDING, "sliding_window": 7})),
    "no window": (t1(**ALL_SLIDING, is_causal=True), t1(is_causal=True)),
    "causality of the sliding layer": (t1(**MIXED), t1(**MIXED, is_causal=False)),
    "yarn forgotten": (t1(rope_scaling=YARN), t1()),
    "llama3 forgotten": (t1(rope_scaling=LLAMA3), t1()),
    "linear forgotten": (t1(rope_scaling=LINEAR), t1()),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_setting_is_clearly_seen(zlab: ModuleType, tmp_path: Path, name: str) -> None:
    """The bound means something: each setting, when wrong, is far outside of it."""
    right, wrong = WRONG[name]
    theirs, ours = Both(zlab, tmp_path, right, ours=wrong).hidden(200)
    assert difference(theirs, ours) > CLEARLY_DIFFERENT
