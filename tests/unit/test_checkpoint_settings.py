"""From config.json to a Drafter: nothing that matters has a silent default."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dflashcpp.checkpoint import Checkpoint, open_checkpoint
from dflashcpp.errors import DflashError
from tests.support.checkpoints import random_entries, t1, t1_v2, write_checkpoint

SLIDING = ["sliding_attention", "full_attention"]


def opened(folder: Path, config: dict[str, Any], **overrides: Any) -> Checkpoint:
    base = t1_v2() if "conv_kernel_size" in config.get("dflash_config", {}) else t1()
    return open_checkpoint(
        write_checkpoint(folder, config, entries=random_entries(base)), overrides=overrides
    )


def refused(folder: Path, config: dict[str, Any], *words: str) -> None:
    with pytest.raises(DflashError) as caught:
        opened(folder, config)
    text = f"{caught.value.message} {caught.value.hint or ''}"
    for word in words:
        assert word in text, text


def test_taps_are_the_layers_whose_input_is_read(tmp_path: Path) -> None:
    assert opened(tmp_path, t1()).drafter.taps == (2, 4)


def test_keys_may_stand_nested_or_flat(tmp_path: Path) -> None:
    nested = opened(tmp_path / "a", t1_v2()).drafter
    flat = {**t1_v2(dflash_config={}), **t1_v2()["dflash_config"]}
    del flat["dflash_config"]
    assert (
        open_checkpoint(write_checkpoint(tmp_path / "b", flat, entries=random_entries(t1_v2()))).drafter
        == nested
    )


def test_nested_and_flat_in_conflict_is_refused(tmp_path: Path) -> None:
    refused(tmp_path, t1(dflash_config={"block_size": 8}), "block_size", "16", "8", "--set")


def test_nested_and_flat_that_agree_are_fine(tmp_path: Path) -> None:
    assert opened(tmp_path, t1(mask_token_id=500)).drafter.mask_token_id == 500


@pytest.mark.parametrize(
    ("edit", "word"),
    [
        ({"block_size": ...}, "block_size"),
        ({"dflash_config": {"mask_token_id": ...}}, "mask_token_id"),
        ({"dflash_config": {"target_layer_ids": ...}}, "target_layer_ids"),
        ({"rope_theta": ...}, "rope_theta"),
        ({"rms_norm_eps": ...}, "rms_norm_eps"),
        ({"max_position_embeddings": ...}, "max_position_embeddings"),
    ],
)
def test_what_has_no_safe_default_must_be_said(tmp_path: Path, edit: dict[str, Any], word: str) -> None:
    refused(tmp_path, t1(**edit), word, "config.json")


def test_missing_taps_are_never_guessed_though_the_formula_is_shown(tmp_path: Path) -> None:
    refused(tmp_path, t1(dflash_config={"target_layer_ids": ...}), "[1, 3]", "wrong for most")


@pytest.mark.parametrize("mask", [512, 10**6, -1, "500", 500.0, True, [500]])
def test_a_mask_that_is_no_token_is_refused(tmp_path: Path, mask: object) -> None:
    refused(tmp_path, t1(dflash_config={"mask_token_id": mask}), "mask_token_id")


@pytest.mark.parametrize("mask", [500, 511])
def test_a_mask_inside_the_vocabulary_is_taken(tmp_path: Path, mask: int) -> None:
    assert opened(tmp_path, t1(dflash_config={"mask_token_id": mask})).drafter.mask_token_id == mask


def test_the_pad_token_never_stands_in_for_the_mask(tmp_path: Path) -> None:
    config = t1(dflash_config={"mask_token_id": ...}, pad_token_id=5, eos_token_id=5)
    refused(tmp_path, config, "mask_token_id")


@pytest.mark.parametrize("size", [0, 1, -3, "16", 16.0, None])
def test_a_block_has_at_least_two_rows(tmp_path: Path, size: object) -> None:
    refused(tmp_path, t1(block_size=size), "block_size")


def test_the_longest_draft_is_the_block_without_its_anchor(tmp_path: Path) -> None:
    assert opened(tmp_path, t1()).drafter.max_draft == 15


@pytest.mark.parametrize("ids", [[1], [1, 2, 3], [1, 6], [-1, 3], [1, True], [1, 3.0], "1,3", [1, 10**9]])
def test_taps_that_make_no_sense_are_refused(tmp_path: Path, ids: object) -> None:
    refused(tmp_path, t1(dflash_config={"target_layer_ids": ids}), "target_layer_ids")


def test_taps_keep_their_order(tmp_path: Path) -> None:
    assert opened(tmp_path, t1(dflash_config={"target_layer_ids": [3, 1]})).drafter.taps == (4, 2)


def test_a_tap_named_twice_is_mentioned(tmp_path: Path) -> None:
    checkpoint = opened(tmp_path, t1(dflash_config={"target_layer_ids": [3, 3]}))
    assert any("twice" in warning for warning in checkpoint.warnings)


@pytest.mark.parametrize(
    "edit",
    [
        {"rope_theta": 5e5},
        {"rope_theta": ..., "rope_parameters": {"rope_theta": 500000, "rope_type": "default"}},
        {"rope_theta": ..., "rope_parameters": {"full_attention": {"rope_theta": 5e5}}},
        {"rope_theta": 500000, "rope_parameters": {"rope_theta": 500000.0}},
    ],
)
def test_theta_is_found_wherever_it_stands(tmp_path: Path, edit: dict[str, Any]) -> None:
    assert opened(tmp_path, t1(**edit)).drafter.rope.theta == 5e5


def test_two_thetas_are_a_question(tmp_path: Path) -> None:
    refused(tmp_path, t1(rope_parameters={"rope_theta": 5e5}), "rope_theta", "500000", "1e+06")
    assert (
        opened(tmp_path / "b", t1(rope_parameters={"rope_theta": 5e5}), rope_theta=2e6).drafter.rope.theta
        == 2e6
    )


def test_full_and_sliding_layers_with_different_thetas_are_refused(tmp_path: Path) -> None:
    groups = {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}
    refused(tmp_path, t1(rope_theta=..., rope_parameters=groups), "one rope")


def test_yarn_is_read(tmp_path: Path) -> None:
    scaling = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "beta_fast": 16}
    rope = opened(tmp_path, t1(rope_scaling=scaling)).drafter.rope
    assert (rope.type, rope.factor, rope.original_context, rope.beta_fast, rope.beta_slow) == (
        "yarn",
        32.0,
        4096,
        16,
        1,
    )
    assert rope.attention_factor == pytest.approx(1.3465735902799727)


@pytest.mark.parametrize("kind", ["dynamic", "longrope", "su", "proportional", 7])
def test_unknown_rope_scalings_are_refused(tmp_path: Path, kind: object) -> None:
    refused(tmp_path, t1(rope_scaling={"rope_type": kind, "factor": 2.0}), "rope type")


@pytest.mark.parametrize("key", ["factor", "original_max_position_embeddings", "low_freq_factor"])
def test_a_scaling_without_one_of_its_numbers_is_refused(tmp_path: Path, key: str) -> None:
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    del scaling[key]
    refused(tmp_path, t1(rope_scaling=scaling), key)


def test_a_leaked_partial_rotary_factor_is_not_used_and_said(tmp_path: Path) -> None:
    checkpoint = opened(tmp_path, t1(partial_rotary_factor=0.25))
    assert checkpoint.drafter.rope.dims is None
    assert any("partial_rotary_factor" in warning for warning in checkpoint.warnings)
    said = opened(tmp_path / "b", t1(partial_rotary_factor=0.25), partial_rotary_factor=0.25)
    assert said.drafter.rope.dims == 16


def test_sliding_layers_get_their_window_without_the_switch(tmp_path: Path) -> None:
    checkpoint = opened(tmp_path, t1(layer_types=SLIDING, sliding_window=8, is_causal=False))
    assert checkpoint.drafter.sliding == (True, False)
    assert checkpoint.drafter.window == 8
    assert any("use_sliding_window" in warning for warning in checkpoint.warnings)


@pytest.mark.parametrize("window", [None, 0, -1])
def test_sliding_layers_without_a_window_are_refused(tmp_path: Path, window: int | None) -> None:
    refused(tmp_path, t1(layer_types=SLIDING, sliding_window=window, use_sliding_window=True), "window")


@pytest.mark.parametrize(
    "types", [["full_attention"], ["full_attention"] * 3, ["full_attention", "linear"], "full", [1, 2]]
)
def test_layer_types_must_be_known_and_one_a_layer(tmp_path: Path, types: object) -> None:
    refused(tmp_path, t1(layer_types=types), "layer_types")


def test_use_swa_makes_every_layer_slide(tmp_path: Path) -> None:
    config = t1(
        dflash_config={"use_swa": True, "swa_window_size": 1024, "causal": False}, sliding_window=4096
    )
    drafter = opened(tmp_path, config).drafter
    assert (drafter.sliding, drafter.window, drafter.causal) == ((True, True), 1024, (False, False))


def test_without_layer_types_the_rule_of_transformers_decides(tmp_path: Path) -> None:
    config = t1(
        layer_types=..., use_sliding_window=True, sliding_window=8, max_window_layers=1, is_causal=False
    )
    assert opened(tmp_path, config).drafter.sliding == (False, True)


@pytest.mark.parametrize(
    ("edit", "causal"),
    [
        ({}, (True, False)),
        ({"is_causal": False}, (False, False)),
        ({"is_causal": True}, (True, True)),
        ({"dflash_config": {"causal": False}}, (False, False)),
        ({"dflash_config": {"causal": True}, "is_causal": False}, (False, False)),
        ({"sliding_window_non_causal": True}, (False, False)),
    ],
)
def test_causality_follows_the_order_of_the_keys(
    tmp_path: Path, edit: dict[str, Any], causal: tuple[bool, ...]
) -> None:
    config = t1(layer_types=SLIDING, sliding_window=8, use_sliding_window=True, **edit)
    checkpoint = opened(tmp_path, config)
    assert checkpoint.drafter.causal == causal
    assert any("causal_pattern" in warning for warning in checkpoint.warnings) == (causal == (True, False))


def test_a_full_attention_drafter_is_not_causal_without_a_word(tmp_path: Path) -> None:
    checkpoint = opened(tmp_path, t1())
    assert checkpoint.drafter.causal == (False, False)
    assert checkpoint.warnings == []


@pytest.mark.parametrize(
    ("edit", "word"),
    [
        ({"attention_bias": True}, "attention_bias"),
        ({"hidden_act": "relu"}, "hidden_act"),
        ({"sample_from_anchor": True}, "sample_from_anchor"),
        ({"dflash_config": {"attention_sink_bias": True}}, "sinks"),
        ({"dflash_config": {"output_multiplier": 0.0}}, "output_multiplier"),
        ({"architectures": ["LlamaForCausalLM"]}, "LlamaForCausalLM"),
        ({"architectures": ...}, "nothing"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
    ],
)
def test_what_llama_cpp_cannot_do_is_refused(tmp_path: Path, edit: dict[str, Any], word: str) -> None:
    refused(tmp_path, t1(**edit), word)


def test_a_softcap_of_zero_is_none(tmp_path: Path) -> None:
    drafter = opened(
        tmp_path, t1(dflash_config={"final_logit_softcapping": 0.0, "output_multiplier": 0.5})
    ).drafter
    assert (drafter.softcap, drafter.logit_scale) == (None, 0.5)


def test_candidates_that_fill_more_than_a_hidden_row_are_warned_about(tmp_path: Path) -> None:
    checkpoint = opened(tmp_path, t1_v2(dflash_config={"selector_top_k": 16}))
    assert any("selector_top_k 16" in warning and "272" in warning for warning in checkpoint.warnings)
    assert not any("selector_top_k" in warning for warning in opened(tmp_path / "few", t1_v2()).warnings)


def test_an_override_replaces_a_value_and_is_believed(tmp_path: Path) -> None:
    drafter = opened(tmp_path, t1(dflash_config={"mask_token_id": ...}), mask_token_id=7).drafter
    assert drafter.mask_token_id == 7


@pytest.mark.parametrize(
    ("edit", "name"),
    [
        ({"dflash_config": {"projector_type": "domino"}}, "Domino"),
        ({"dflash_config": {"projector_type": "dspark"}}, "DSpark"),
        ({"architectures": ["DFlashLagunaForCausalLM"]}, "Laguna"),
        ({"architectures": ["Eagle3Speculator"]}, "EAGLE"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "GPTQ"),
        ({"quantization_config": {"quant_method": "awq"}}, "AWQ"),
        ({"quantization_config": {"quant_algo": "NVFP4"}}, "NVFP4"),
        ({"quantization_config": {"format": "pack-quantized"}}, "packed integers"),
        ({"quantization": {"bits": 4, "group_size": 64}}, "MLX"),
    ],
)
def test_other_kinds_of_drafters_are_refused_by_name(tmp_path: Path, edit: dict[str, Any], name: str) -> None:
    refused(tmp_path, t1(**edit), name)


@pytest.mark.parametrize(
    ("tensor", "name"),
    [
        ("prefix_gru.weight_ih_l0", "Domino"),
        ("logit_head.prefix_gru.weight_hh_l0", "Domino"),
        ("markov_w1.weight", "DSpark"),
        ("layers.0.self_attn.qkv_proj.weight", "Laguna"),
        ("midlayer.self_attn.q_proj.weight", "EAGLE"),
        ("layers.0.mlp.up_proj.qweight", "GPTQ"),
        ("layers.0.mlp.up_proj.weight_packed", "packed integers"),
        ("layers.0.mlp.up_proj.scales", "MLX"),
        ("layers.0.mlp.up_proj.weight_scale_2", "NVFP4"),
    ],
)
def test_other_kinds_are_recognised_by_a_tensor_too(tmp_path: Path, tensor: str, name: str) -> None:
    entries = random_entries(t1())
    entries[tensor] = entries["norm.weight"]
    with pytest.raises(DflashError, match=name):
        open_checkpoint(write_checkpoint(tmp_path, t1(), entries=entries))
