"""`verify` passes right conversions and fails wrong ones, each for its own reason."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dflashcpp.cli.app import run
from dflashcpp.conversion import convert
from dflashcpp.errors import DflashError
from dflashcpp.gguf_file import Kv, ValueType, read_header
from dflashcpp.verify import VerifyResult, verify
from tests.support.checkpoints import edited, t1, t1_v2, write_checkpoint, write_target
from tests.support.gguf_edit import rewrite

pytestmark = pytest.mark.parity

WINDOWED = {
    "layer_types": ["sliding_attention", "full_attention"],
    "use_sliding_window": True,
    "sliding_window": 40,
}
V1 = t1(block_size=8, dflash_config={"target_layer_ids": [1, 3]})
V1_WINDOWED = edited(V1, **WINDOWED)
V2 = t1_v2(dflash_config={"output_multiplier": 0.5, "final_logit_softcapping": 20.0})


class Made:
    """A checkpoint, its target and its GGUF, in a folder of their own."""

    def __init__(self, folder: Path, config: Mapping[str, Any], type: str = "BF16") -> None:
        self.source = write_checkpoint(folder / "a source", config)
        self.target = write_target(folder / "target.gguf")
        self.gguf = folder / "drafter.gguf"
        convert(self.source, target=self.target, type=type, output=self.gguf, force=True)

    def verify(self, **settings: Any) -> VerifyResult:
        return verify(self.gguf, self.source, blocks=4, **settings)

    def verify_edited(self, **config: Any) -> VerifyResult:
        """Against the same weights with another config.json."""
        return verify(self.gguf, self.source, blocks=4, overrides=config)


@pytest.fixture(scope="module", params=["v1", "v1 windowed", "v2"])
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Made:
    config = {"v1": V1, "v1 windowed": V1_WINDOWED, "v2": V2}[request.param]
    return Made(tmp_path_factory.mktemp("made"), config)


@pytest.fixture(scope="module")
def v2(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return Made(tmp_path_factory.mktemp("v2"), V2)


@pytest.fixture(scope="module")
def windowed(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return Made(tmp_path_factory.mktemp("windowed"), V1_WINDOWED)


def test_a_right_conversion_is_the_drafter_of_its_source(made: Made) -> None:
    result = made.verify()
    assert result.passed and result.problems == ()
    assert result.numbers is not None
    assert result.numbers.kl_max < 1e-6
    assert result.numbers.top1 == result.numbers.blocks_equal == 1.0
    assert result.settings > 35 and result.tensors == len(read_header(made.gguf).tensors)


@pytest.mark.parametrize("type", ["Q8_0", "Q6_K", "Q5_K_M", "Q4_K_M", "Q4_0", "IQ4_XS", "Q3_K_M", "Q2_K"])
@pytest.mark.parametrize("config", [V1_WINDOWED, V2], ids=["v1", "v2"])
def test_quantised_conversions_are_within_their_bounds(tmp_path: Path, type: str, config: Any) -> None:
    made = Made(tmp_path, config, type)
    for seed in range(3):
        result = made.verify(seed=seed)
        assert result.problems == ()
        assert result.numbers is not None and result.numbers.kl_mean > 0


def test_float_types_are_within_their_bounds(tmp_path: Path) -> None:
    for type in ("F32", "F16"):
        result = Made(tmp_path / type, V2, type).verify()
        assert result.problems == ()
        assert result.numbers is not None and result.numbers.kl_mean < 1e-5


SETTINGS: dict[str, tuple[str, dict[str, Kv | None], str]] = {
    "taps in another order": (
        "v2",
        {"dflash.target_layers": Kv.array(ValueType.INT32, [4, 2])},
        "taps is (4, 2) in the GGUF, (2, 4) in the source",
    ),
    "taps off by one": ("v2", {"dflash.target_layers": Kv.array(ValueType.INT32, [1, 3])}, "taps is (1, 3)"),
    "theta": ("v2", {"dflash.rope.freq_base": Kv.f32(10000.0)}, "rope theta is 10000"),
    "window short by one": ("windowed", {"dflash.attention.sliding_window": Kv.u32(39)}, "window is 39"),
    "no window": ("windowed", {"dflash.attention.sliding_window": None}, "window is None"),
    "causality lost": ("windowed", {"dflash.attention.causal_pattern": None}, "causal is (False, False)"),
    "mask token": ("v2", {"tokenizer.ggml.mask_token_id": Kv.u32(499)}, "mask token id is 499"),
    "multiplier lost": ("v2", {"dflash.logit_scale": None}, "logit scale is None"),
    "softcap lost": ("v2", {"dflash.final_logit_softcapping": None}, "softcap is None"),
    "eps": ("v2", {"dflash.attention.layer_norm_rms_epsilon": Kv.f32(1e-2)}, "rms eps is 0.01"),
    "block size": ("v2", {"dflash.block_size": Kv.u32(7)}, "block size is 7"),
    "selector width": ("v2", {"dflash.selector_top_k": Kv.u32(4)}, "selector top k is 4"),
}
_UNSEEN_BY_NUMBERS = {"block size", "selector width"}


@pytest.mark.parametrize("name", SETTINGS)
def test_a_wrong_setting_fails_and_is_named(name: str, v2: Made, windowed: Made) -> None:
    which, kv, sentence = SETTINGS[name]
    made = {"v2": v2, "windowed": windowed}[which]
    result = verify(rewrite(made.gguf, kv), made.source, blocks=4)
    assert not result.passed
    assert any(problem.startswith(sentence) for problem in result.problems)
    if name not in _UNSEEN_BY_NUMBERS:
        assert result.numbers is not None and result.allowed is not None
        assert result.numbers.kl_mean > 100 * result.allowed.kl_mean


CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "taps": ("v2", {"dflash_config.target_layer_ids": [3, 1]}),
    "theta": ("v2", {"rope_theta": 10000.0}),
    "window": ("windowed", {"sliding_window": 41}),
    "causality": ("windowed", {"is_causal": False}),
    "softcap": ("v2", {"dflash_config.final_logit_softcapping": 5.0}),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_another_config_of_the_source_fails(name: str, v2: Made, windowed: Made) -> None:
    which, config = CONFIGS[name]
    result = {"v2": v2, "windowed": windowed}[which].verify_edited(**config)
    assert not result.passed
    assert result.numbers is not None and result.numbers.kl_mean > 1e-4


def _swap_sides(raw: bytes) -> bytes:
    half = len(raw) // 2
    return raw[half:] + raw[:half]


def _swap_taps(raw: bytes) -> bytes:
    """Columns of fc: the first tap's and the second's."""
    rows = np.frombuffer(raw, dtype=np.uint16).reshape(256, 2, 256)
    return rows[:, ::-1].tobytes()


TENSORS: dict[str, dict[str, Callable[[bytes], bytes] | str]] = {
    "norms of encoder and output swapped": {
        "enc.output_norm.weight": "output_norm.weight",
        "output_norm.weight": "enc.output_norm.weight",
    },
    "sides of a kernel swapped": {"blk.0.attn_conv_base": _swap_sides},
    "sides of a kernel's projection swapped": {"blk.1.ffn_conv_proj.weight": _swap_sides},
    "codebooks swapped": {
        "selector_predecessor.weight": "selector_successor.weight",
        "selector_successor.weight": "selector_predecessor.weight",
    },
    "columns of fc in another tap order": {"fc.weight": _swap_taps},
    "gate and up swapped": {
        "blk.0.ffn_gate.weight": "blk.0.ffn_up.weight",
        "blk.0.ffn_up.weight": "blk.0.ffn_gate.weight",
    },
    "layers swapped": {
        "blk.0.attn_q.weight": "blk.1.attn_q.weight",
        "blk.1.attn_q.weight": "blk.0.attn_q.weight",
    },
    "a norm of zeros": {"blk.1.attn_k_norm.weight": lambda raw: bytes(len(raw))},
}


@pytest.mark.parametrize("name", TENSORS)
def test_wrong_weights_fail_and_are_named(name: str, v2: Made) -> None:
    result = verify(rewrite(v2.gguf, tensors=TENSORS[name]), v2.source, blocks=4)
    assert not result.passed
    for tensor in TENSORS[name]:
        assert any(problem.startswith(f"tensor {tensor} ") for problem in result.problems)


def test_wrong_weights_are_seen_in_the_numbers_too(v2: Made) -> None:
    """Without errors to explain it, a difference of one tensor is far outside of the limits."""
    for name, tensors in TENSORS.items():
        numbers = verify(rewrite(v2.gguf, tensors=tensors), v2.source, blocks=4).numbers
        assert numbers is not None
        seen = numbers.edge_error if name == "codebooks swapped" else numbers.hidden_error
        assert seen is not None and seen > 0.02, name


def test_a_q4_file_with_swapped_kernel_sides_fails(tmp_path: Path) -> None:
    made = Made(tmp_path, V2, "Q4_K_M")
    swapped = rewrite(made.gguf, tensors={"blk.0.attn_conv_proj.weight": _swap_sides})
    assert any("attn_conv_proj" in problem for problem in verify(swapped, made.source, blocks=4).problems)


def test_a_missing_tensor_is_named_and_nothing_is_run(v2: Made, tmp_path: Path) -> None:
    other = write_checkpoint(tmp_path, edited(V1, dflash_config={"target_layer_ids": [1, 3]}))
    result = verify(v2.gguf, other, blocks=4)
    assert result.numbers is None and not result.passed
    assert "tensor selector_hidden.weight is not in the source" in result.problems
    assert result.to_dict()["kl_mean"] is None


def test_another_geometry_with_the_same_shapes_is_a_difference_not_a_crash(v2: Made) -> None:
    kv = {"dflash.attention.head_count": Kv.u32(8), "dflash.attention.key_length": Kv.u32(32)}
    result = verify(rewrite(v2.gguf, kv), v2.source, blocks=4)
    assert result.numbers is None
    assert "heads is 8 in the GGUF, 4 in the source" in result.problems


def test_the_same_seed_gives_the_same_numbers_and_another_gives_others(tmp_path: Path) -> None:
    made = Made(tmp_path, V2, "Q8_0")
    first, again, other = (made.verify(seed=seed).numbers for seed in (1, 1, 2))
    assert first == again and first != other


def test_with_a_target_its_embedding_and_head_are_used(v2: Made) -> None:
    result = v2.verify(target=v2.target)
    assert result.passed and result.vocabulary == f"embedding and head of {v2.target}"
    assert result.unchecked == ()


def test_what_only_the_target_knows_is_said_to_be_unchecked_without_it(tmp_path: Path) -> None:
    made = Made(tmp_path, V2)
    scaled = rewrite(made.gguf, {"dflash.embedding_scale": Kv.f32(16.0)})
    alone = verify(scaled, made.source, blocks=2)
    assert alone.passed and any(what.startswith("embedding_scale 16") for what in alone.unchecked)
    with_target = verify(scaled, made.source, target=made.target, blocks=2)
    assert "embedding scale is 16 in the GGUF, None in the source" in with_target.problems


def test_a_target_of_another_size_is_refused(v2: Made, tmp_path: Path) -> None:
    other = write_target(tmp_path / "other.gguf", hidden=128)
    with pytest.raises(DflashError, match="hidden size 128"):
        verify(v2.gguf, v2.source, target=other, blocks=2)


def test_a_target_given_as_drafter_is_refused(v2: Made) -> None:
    with pytest.raises(DflashError, match="not a drafter"):
        verify(v2.target, v2.source)


def test_without_torch_the_pip_command_is_said(v2: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(DflashError) as raised:
        verify(v2.gguf, v2.source)
    assert raised.value.hint == "pip install torch"


def test_command_prints_one_object_and_its_exit_code_is_the_verdict(
    v2: Made, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--source", str(v2.source), "--blocks", "2", "--json"]
    assert run(["verify", str(v2.gguf), *arguments]) == 0
    right = json.loads(capsys.readouterr().out)
    assert right["pass"] is True and right["blocks"] == 2
    assert {"kl_mean", "kl_max", "top1", "blocks_equal"} <= right.keys()
    wrong = rewrite(v2.gguf, {"dflash.rope.freq_base": Kv.f32(10000.0)})
    assert run(["verify", str(wrong), *arguments]) == 1
    failed = json.loads(capsys.readouterr().out)
    assert failed["pass"] is False and failed["problems"]


@pytest.mark.parametrize("type", ["Q8_0", "Q4_0", "BF16"])
@pytest.mark.parametrize("config", [V1, V2], ids=["v1", "v2"])
def test_a_head_stored_anew_is_the_targets_or_is_said(tmp_path: Path, type: str, config: Any) -> None:
    source, target = write_checkpoint(tmp_path / "d", config), write_target(tmp_path / "t.gguf")
    gguf = convert(source, target=target, type="BF16", head=type, output=tmp_path / "x.gguf").file
    with_target = verify(gguf, source, target=target, blocks=4)
    assert with_target.passed and with_target.unchecked == ()
    alone = verify(gguf, source, blocks=4)
    assert alone.passed and any("output.weight" in line for line in alone.unchecked)
    assert with_target.tensors == alone.tensors + 1
    damaged = rewrite(gguf, tensors={"output.weight": _swap_sides})
    assert any("output.weight" in line for line in verify(damaged, source, target=target, blocks=4).problems)
