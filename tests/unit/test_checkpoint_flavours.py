"""The same drafter as each publisher writes it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dflashcpp.checkpoint import open_checkpoint
from dflashcpp.conversion import convert
from dflashcpp.drafter import Drafter
from dflashcpp.errors import DflashError
from dflashcpp.gguf_file import read_header
from tests.support.checkpoints import (
    Entry,
    array_entry,
    random_entries,
    random_entry,
    t1,
    t1_v2,
    write_checkpoint,
    write_target,
)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("t") / "target.gguf", weights=False)


def speculators(config: dict[str, Any], **edits: Any) -> dict[str, Any]:
    """A z-lab config as vllm-project/speculators would say it."""
    draft = {"block_size": config.get("block_size"), **config["dflash_config"]}
    inner = {
        key: config[key] for key in config if key not in ("architectures", "dflash_config", "block_size")
    }
    inner["rope_parameters"] = {"rope_theta": inner.pop("rope_theta"), "rope_type": "default"}
    two = "conv_kernel_size" in draft
    extra = {key: draft[key] for key in draft if key.startswith(("conv_", "selector_"))}
    result = {
        "architectures": ["DFlash2DraftModel" if two else "DFlashSpeculator"],
        "speculators_model_type": "dflash2" if two else "dflash",
        "transformer_layer_config": inner,
        "draft_vocab_size": 512,
        "block_size": draft["block_size"],
        "aux_hidden_state_layer_ids": [number + 1 for number in draft["target_layer_ids"]],
        "mask_token_id": draft["mask_token_id"],
        "target_hidden_size": None,
        "sample_from_anchor": False,
        "sliding_window_non_causal": two,
        "speculators_config": {"algorithm": "dflash", "verifier": {"name_or_path": "tiny/Target-1B"}},
        **extra,
        **edits,
    }
    return {key: value for key, value in result.items() if value is not ...}


@pytest.mark.parametrize("config", [t1(), t1_v2()], ids=["v1", "v2"])
def test_speculators_and_z_lab_configs_give_the_same_bytes(
    tmp_path: Path, target: Path, config: dict[str, Any]
) -> None:
    entries = random_entries(config)
    theirs = speculators(config)
    theirs["transformer_layer_config"].pop("num_target_layers")
    plain = write_checkpoint(tmp_path / "a" / "drafter", config, entries=entries)
    other = write_checkpoint(tmp_path / "b" / "drafter", theirs, entries=entries)
    files = [
        convert(source, target=target, type="BF16", output=tmp_path / f"{number}.gguf").file
        for number, source in enumerate((plain, other))
    ]
    assert open_checkpoint(other).flavour.name.startswith("speculators")
    assert files[0].read_bytes() == files[1].read_bytes()


def test_the_verifier_of_speculators_is_named_when_the_target_is_missing(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "d", speculators(t1()), entries=random_entries(t1()))
    with pytest.raises(DflashError, match="tiny/Target-1B"):
        convert(source, type="F32", output=tmp_path / "x.gguf")


def test_sliding_layers_without_the_causality_key_are_mentioned(tmp_path: Path) -> None:
    config = t1(layer_types=["sliding_attention"] * 2, sliding_window=8)
    silent = speculators(config, sliding_window_non_causal=...)
    checkpoint = open_checkpoint(write_checkpoint(tmp_path, silent, entries=random_entries(t1())))
    assert checkpoint.drafter.causal == (True, True)
    assert any("is_causal" in warning for warning in checkpoint.warnings)


def test_taps_that_look_like_z_labs_numbering_are_mentioned(tmp_path: Path) -> None:
    config = speculators(t1(), aux_hidden_state_layer_ids=[1, 3])
    config["num_target_layers"] = 6
    checkpoint = open_checkpoint(write_checkpoint(tmp_path, config, entries=random_entries(t1())))
    assert checkpoint.drafter.taps == (1, 3)
    assert any("z-lab" in warning for warning in checkpoint.warnings)


def reduced(offsets: np.ndarray, rows: int = 128) -> dict[str, Entry]:
    """Tensors of a drafter with its own head of `rows` tokens, and what older exports carry along."""
    entries = random_entries(t1())
    entries["lm_head.weight"] = random_entry("lm_head.weight", (rows, 256), "BF16", 1)
    entries["d2t"] = array_entry(offsets, "I64")
    entries["t2d"] = array_entry(np.zeros(512, np.uint8), "BOOL")
    entries["verifier_lm_head.weight"] = random_entry("v", (512, 256), "BF16", 1)
    entries["verifier_norm.weight"] = random_entry("n", (256,), "BF16", 1)
    return entries


def test_a_reduced_vocabulary_becomes_absolute_ids(tmp_path: Path, target: Path) -> None:
    from gguf import GGUFReader

    offsets = np.arange(128) * 2  # draft i stands for target 3 i
    config = speculators(t1(), draft_vocab_size=128)
    source = write_checkpoint(tmp_path / "d", config, entries=reduced(offsets))
    result = convert(source, target=target, type="BF16", output=tmp_path / "x.gguf")
    assert result.drafter.draft_vocab == 128 and result.drafter.own_head
    found = {tensor.name: tensor for tensor in GGUFReader(result.file).tensors}
    assert found["d2t"].tensor_type.name == "I64"
    assert found["d2t"].data.view(np.int64).tolist() == [3 * number for number in range(128)]
    assert list(found["output.weight"].shape) == [256, 128]
    assert not {"t2d", "verifier_norm.weight", "token_embd.weight"} & found.keys()
    assert Drafter.from_gguf(read_header(result.file)).draft_vocab == 128


@pytest.mark.parametrize(
    ("offsets", "words"),
    [
        (np.zeros(128, np.int64) - np.arange(128), "same target token"),
        (np.full(128, 511), "outside"),
        (np.full(128, -200), "outside"),
        (np.full(128, 2**62), "outside"),
    ],
)
def test_a_map_that_makes_no_sense_is_refused(tmp_path: Path, offsets: np.ndarray, words: str) -> None:
    config = speculators(t1(), draft_vocab_size=128)
    with pytest.raises(DflashError, match=words):
        open_checkpoint(write_checkpoint(tmp_path, config, entries=reduced(offsets)))


def test_a_reduced_vocabulary_needs_its_map_and_its_head(tmp_path: Path) -> None:
    config = speculators(t1(), draft_vocab_size=128)
    without_map, without_head = reduced(np.arange(128)), reduced(np.arange(128))
    del without_map["d2t"], without_head["lm_head.weight"]
    with pytest.raises(DflashError, match="d2t"):
        open_checkpoint(write_checkpoint(tmp_path / "a", config, entries=without_map))
    with pytest.raises(DflashError, match="lm_head"):
        open_checkpoint(write_checkpoint(tmp_path / "b", config, entries=without_head))


def test_the_head_has_as_many_rows_as_the_config_says(tmp_path: Path) -> None:
    config = speculators(t1(), draft_vocab_size=128)
    with pytest.raises(DflashError, match="lm_head"):
        open_checkpoint(write_checkpoint(tmp_path, config, entries=reduced(np.arange(128), rows=100)))


def test_dflash2_with_a_reduced_vocabulary_is_refused(tmp_path: Path) -> None:
    config = speculators(t1_v2(), draft_vocab_size=128)
    with pytest.raises(DflashError, match="reduced vocabulary"):
        open_checkpoint(write_checkpoint(tmp_path, config, entries=random_entries(t1_v2())))


def test_an_own_embedding_and_head_are_kept(tmp_path: Path, target: Path) -> None:
    entries = random_entries(t1(), "own_embedding", "own_head")
    source = write_checkpoint(tmp_path / "d", speculators(t1()), entries=entries)
    result = convert(source, target=target, type="BF16", output=tmp_path / "x.gguf")
    assert result.drafter.own_embedding and result.drafter.own_head
    assert {"token_embd.weight", "output.weight"} <= read_header(result.file).tensors.keys()


@pytest.mark.parametrize(("head", "config"), [(False, {}), (True, {"has_embed_tokens": False})])
def test_an_embedding_that_would_become_the_head_is_left_out_and_said(
    tmp_path: Path, head: bool, config: dict[str, Any]
) -> None:
    entries = random_entries(t1(), "own_embedding", *(["own_head"] if head else []))
    checkpoint = open_checkpoint(write_checkpoint(tmp_path, t1(**config), entries=entries))
    assert not checkpoint.drafter.own_embedding
    assert any("embed_tokens.weight" in warning for warning in checkpoint.warnings)


MUSE_ASSISTANT = {
    "architectures": ["MuseGlimmerAssistantModel"],
    "model_type": "muse_glimmer_assistant",
    "block_size": 16,
    "mask_token_id": 500,
    "target_layer_ids": [1, 3],
    "layer_types": ["sliding_attention"] * 2,
    "sliding_window": 64,
    "rope_parameters": {"rope_theta": 500000.0, "rope_type": "default"},
    "rms_norm_eps": 1e-5,
    "head_dim": 64,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
}


def test_the_muse_assistant_takes_its_vocabulary_from_the_target(tmp_path: Path, target: Path) -> None:
    renamed = {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"}
    entries = {renamed.get(name, name): entry for name, entry in random_entries(t1()).items()}
    source = write_checkpoint(tmp_path / "d", MUSE_ASSISTANT, entries=entries)
    checkpoint = open_checkpoint(source)
    assert (checkpoint.flavour.name, checkpoint.drafter.vocab) == ("muse-assistant", None)
    assert checkpoint.warnings == []
    result = convert(source, target=target, type="BF16", output=tmp_path / "x.gguf")
    drafter = Drafter.from_gguf(read_header(result.file))
    assert (drafter.vocab, drafter.mask_token_id, drafter.window) == (512, 500, 64)
    assert (drafter.sliding, drafter.causal) == ((True, True), (False, False))


def test_a_gemma_target_scales_the_embedding(tmp_path: Path) -> None:
    target = write_target(tmp_path / "g.gguf", arch="gemma4", weights=False)
    result = convert(write_checkpoint(tmp_path / "d"), target=target, type="BF16", output=tmp_path / "x.gguf")
    assert read_header(result.file).get("dflash.embedding_scale") == pytest.approx(16.0)
    own = t1(dflash_config={"input_embedding_scale": 3.0})
    other = convert(
        write_checkpoint(tmp_path / "e", own), target=target, type="BF16", output=tmp_path / "y.gguf"
    )
    assert other.drafter.embedding_scale == 3.0


def test_an_m_rope_target_gives_its_drafter_degenerate_sections(tmp_path: Path) -> None:
    target = write_target(
        tmp_path / "q.gguf",
        arch="qwen35",
        weights=False,
        extra=lambda writer: writer.add_rope_dimension_sections([11, 11, 10, 0]),
    )
    config = t1(
        rope_parameters={"rope_theta": 1000000, "mrope_section": [11, 11, 10], "rope_type": "default"}
    )
    result = convert(
        write_checkpoint(tmp_path / "d", config), target=target, type="BF16", output=tmp_path / "x"
    )
    assert read_header(result.file).get("dflash.rope.dimension_sections") == [32, 0, 0, 0]
    assert any("mrope_section" in warning for warning in result.warnings)


def test_llama3_scaling_becomes_a_tensor_of_divisors(tmp_path: Path, target: Path) -> None:
    from gguf import GGUFReader

    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    source = write_checkpoint(tmp_path / "d", t1(rope_scaling=scaling, rope_theta=500000))
    result = convert(source, target=target, type="BF16", output=tmp_path / "x.gguf")
    found = next(t for t in GGUFReader(result.file).tensors if t.name == "rope_freqs.weight")
    frequencies = 500000.0 ** (-np.arange(0, 64, 2) / 64)
    wavelengths = 2 * np.pi / frequencies
    assert found.tensor_type.name == "F32" and found.data.shape == (32,)
    assert (found.data[wavelengths < 8192 / 4] == 1).all() and (found.data[wavelengths > 8192] == 8).all()
    middle = (wavelengths >= 8192 / 4) & (wavelengths <= 8192)
    smooth = (8192 / wavelengths[middle] - 1) / 3
    expected = 1 / ((1 - smooth) / 8 + smooth)
    assert middle.any() and np.allclose(found.data[middle], expected, rtol=1e-6)
    back = Drafter.from_gguf(read_header(result.file)).rope
    assert (back.type, back.factor, back.original_context, back.high_freq_factor) == (
        "llama3",
        8.0,
        8192,
        4.0,
    )


def test_neighbouring_rotary_pairs_are_reordered_to_halves(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "d", t1(rope_is_neox_style=False))
    plain = write_checkpoint(tmp_path / "e", t1())
    order = np.concatenate([np.arange(0, 64, 2), np.arange(1, 64, 2)])
    with open_checkpoint(source) as a, open_checkpoint(plain) as b:
        query = b.read_rows("blk.0.attn_q.weight").reshape(4, 64, 256)[:, order].reshape(256, 256)
        assert (a.read_rows("blk.0.attn_q.weight") == query).all()
        assert (a.read_rows("blk.0.attn_q.weight", 60, 70) == query[60:70]).all()
        norm = b.read_rows("blk.1.attn_k_norm.weight")[:, order]
        assert (a.read_rows("blk.1.attn_k_norm.weight") == norm).all()
        assert (a.read_rows("blk.0.attn_v.weight") == b.read_rows("blk.0.attn_v.weight")).all()


def test_nemo_names_and_leaked_keys_are_handled(tmp_path: Path) -> None:
    config = t1(
        architectures=["Qwen3DFlashDraftModel"],
        partial_rotary_factor=0.25,
        linear_num_key_heads=16,
        full_attention_interval=4,
        mrope_section=[11, 11, 10],
    )
    entries = {f"model.{name}": entry for name, entry in random_entries(t1()).items()}
    checkpoint = open_checkpoint(write_checkpoint(tmp_path, config, entries=entries))
    assert (checkpoint.flavour.name, checkpoint.drafter.rope.dims) == ("nemo", None)
    assert any("partial_rotary_factor" in warning for warning in checkpoint.warnings)


def test_model_optimizer_marks_sliding_by_use_swa(tmp_path: Path) -> None:
    config = t1(
        dflash_config={"use_swa": True, "swa_window_size": 128, "causal": False},
        sliding_window=128,
        torch_dtype="bfloat16",
    )
    entries = {f"dflash_module.{name}": entry for name, entry in random_entries(t1()).items()}
    entries["dflash_module.rotary_emb.inv_freq"] = array_entry(np.ones(32, np.float32), "F32")
    checkpoint = open_checkpoint(write_checkpoint(tmp_path, config, entries=entries))
    assert checkpoint.flavour.name == "model-optimizer"
    assert (checkpoint.drafter.sliding, checkpoint.drafter.window) == ((True, True), 128)


FP8_NAME = "layers.0.mlp.down_proj.weight"  # [256, 512]


def fp8(folder: Path, scale: np.ndarray | None, name: str, dtype: str = "F8_E4M3", **config: Any) -> Path:
    """T1 with one FP8 tensor of all 256 codes but NaN and infinity, and its scale."""
    entries = random_entries(t1())
    codes = np.resize(np.array([code for code in range(256) if code & 0x7F < 0x7C], np.uint8), (256, 512))
    entries[FP8_NAME] = Entry(dtype, (256, 512), lambda: iter([codes.tobytes()]))
    if scale is not None:
        entries[name] = array_entry(scale, "F32")
    return write_checkpoint(folder, t1(**config), entries=entries)


def fp8_values(dtype: Any) -> np.ndarray:
    import torch

    codes = np.resize(np.array([code for code in range(256) if code & 0x7F < 0x7C], np.uint8), (256, 512))
    return torch.from_numpy(codes).view(dtype).float().numpy()


@pytest.mark.parametrize("dtype", ["F8_E4M3", "F8_E5M2"])
def test_fp8_with_a_scale_is_dequantised_exactly(tmp_path: Path, dtype: str) -> None:
    torch = pytest.importorskip("torch")
    kind = torch.float8_e4m3fn if dtype == "F8_E4M3" else torch.float8_e5m2
    generator = np.random.default_rng(3)
    blocks = generator.random((2, 4), np.float32)
    cases: list[tuple[np.ndarray, str, np.ndarray, dict[str, Any]]] = [
        (np.array([0.37], np.float32), "_scale", np.float32(0.37), {}),
        (rows := generator.random((256, 1), np.float32), "_scale", rows, {}),
        (
            blocks,
            "_scale_inv",
            np.kron(blocks, np.ones((128, 128), np.float32)),
            {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}},
        ),
    ]
    for number, (scale, suffix, factor, config) in enumerate(cases):
        folder = fp8(tmp_path / str(number), scale, FP8_NAME + suffix, dtype, **config)
        with open_checkpoint(folder) as checkpoint:
            expected = fp8_values(kind) * factor
            assert (checkpoint.read_rows("blk.0.ffn_down.weight") == expected).all()
            assert (checkpoint.read_rows("blk.0.ffn_down.weight", 120, 140) == expected[120:140]).all()


@pytest.mark.parametrize(
    ("scale", "name", "words"),
    [
        (None, "", "scale is missing"),
        (np.ones((3, 4), np.float32), FP8_NAME + "_scale_inv", "does not fit"),
        (np.ones(1, np.float32), "layers.0.mlp.up_proj.weight_scale", "BF16 and yet has a scale"),
    ],
)
def test_fp8_without_its_scale_or_with_a_wrong_one_is_refused(
    tmp_path: Path, scale: np.ndarray | None, name: str, words: str
) -> None:
    with pytest.raises(DflashError, match=words):
        open_checkpoint(fp8(tmp_path, scale, name))


def test_integers_are_no_weights(tmp_path: Path) -> None:
    entries = random_entries(t1())
    entries["fc.weight"] = array_entry(np.ones((256, 512)), "I32")
    with pytest.raises(DflashError, match=r"fc\.weight is I32"):
        open_checkpoint(write_checkpoint(tmp_path, t1(), entries=entries))
