"""Drafter GGUFs of other tools: named, and rewritten to what a direct conversion gives."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from dflashcpp.conversion import convert
from dflashcpp.dialects import detect, repair
from dflashcpp.drafter import Drafter
from dflashcpp.errors import DflashError
from dflashcpp.gguf_file import GgufWriter, Header, Kv, TensorType, ValueType, read_header
from tests.support.checkpoints import t1, t1_v2, write_checkpoint, write_target
from tests.support.gguf_drafters import tensor_data

Keys = dict[str, Kv]
BUUN = {
    "fc.weight": "dflash_fc.weight",
    "enc.output_norm.weight": "dflash_hidden_norm.weight",
    "ffn_norm": "post_attention_norm",
}
LUCEBOX = {"fc.weight": "dflash.fc.weight", "enc.output_norm.weight": "dflash.hidden_norm.weight"}
SLIDING = {
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 8,
    "use_sliding_window": True,
}


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return write_target(tmp_path / "target.gguf")


def direct(folder: Path, target: Path, config: dict, kind: str = "Q8_0") -> Path:
    source = write_checkpoint(folder / "checkpoint", config)
    return convert(source, target=target, type=kind, output=folder / "direct.gguf").file


def foreign(
    path: Path,
    source: Path,
    arch: str,
    names: dict[str, str],
    edit: Callable[[Keys], None] = lambda keys: None,
    extra: tuple[str, ...] = (),
    without: tuple[str, ...] = (),
) -> Path:
    """`source` as another tool would have written it: its names, taps as outputs, no tokenizer."""
    header = read_header(source)
    keys = foreign_keys(header, arch)
    edit(keys)
    tensors = {renamed(name, names): info for name, info in reversed(header.tensors.items())}
    with GgufWriter(path) as out:
        for key, value in keys.items():
            out.add(key, value)
        for name, info in tensors.items():
            if name not in without:
                out.declare(name, info.ne, info.type)
        for name in extra:
            out.declare(name, (32,), TensorType.F32)
        out.begin()
        for name, info in tensors.items():
            if name not in without:
                out.write(name, 0, tensor_data(source, header.data_start, info))
        for name in extra:
            out.write(name, 0, bytes(128))
        out.commit()
    return path


def renamed(name: str, names: dict[str, str]) -> str:
    if name in names:
        return names[name]
    for ours, theirs in names.items():
        if "." not in ours and f".{ours}." in name:
            return name.replace(ours, theirs)
    return name


def foreign_keys(header: Header, arch: str) -> Keys:
    nested = ("block_size", "conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
    keys = {"general.architecture": Kv.string(arch), "general.name": Kv.string("foreign")}
    for key, value in header.kv.items():
        if key.startswith("dflash.") and key != "dflash.target_layers":
            suffix = key.removeprefix("dflash.")
            keys[f"{arch}.{'dflash.' if suffix in nested else ''}{suffix}"] = value
    taps = [tap - 1 for tap in header.get("dflash.target_layers")]
    keys[f"{arch}.dflash.target_layer_ids"] = Kv.array(ValueType.UINT32, taps)
    keys[f"{arch}.dflash.mask_token_id"] = Kv.u32(header.get("tokenizer.ggml.mask_token_id"))
    keys[f"{arch}.dflash.n_target_features"] = Kv.u32(header.tensors["fc.weight"].ne[0])
    return keys


def assert_equal_but_for_origin(repaired: Path, direct: Path) -> None:
    ours, theirs = read_header(repaired), read_header(direct)
    assert list(ours.tensors) == list(theirs.tensors)
    for name, info in theirs.tensors.items():
        assert ours.tensors[name] == info
        assert tensor_data(repaired, ours.data_start, info) == tensor_data(direct, theirs.data_start, info)
    own = {"general.name", "general.license"}
    mine = {k: v for k, v in ours.kv.items() if not k.startswith("dflashcpp.") and k not in own}
    his = {k: v for k, v in theirs.kv.items() if not k.startswith("dflashcpp.") and k not in own}
    assert mine == his
    assert list(mine) == list(his)
    assert Drafter.from_gguf(ours) == Drafter.from_gguf(theirs)


@pytest.mark.parametrize(
    ("arch", "names", "dialect"),
    [
        ("dflash-draft", BUUN, "dflash-draft"),
        ("qwen35-dflash-draft", LUCEBOX, "lucebox"),
        ("gemma4-dflash-draft", LUCEBOX, "lucebox"),
    ],
)
@pytest.mark.parametrize(
    "config", [t1(), t1_v2(), t1(is_causal=False, **SLIDING)], ids=["v1", "v2", "sliding"]
)
def test_a_foreign_file_becomes_what_a_direct_conversion_gives(
    arch: str, names: dict[str, str], dialect: str, config: dict, target: Path, tmp_path: Path
) -> None:
    plain = direct(tmp_path, target, config)
    other = foreign(tmp_path / "foreign.gguf", plain, arch, names)
    assert detect(read_header(other)).name == dialect  # type: ignore[union-attr]
    result = repair(read_header(other), tmp_path / "fixed.gguf", target=target)
    assert result.dialect == dialect
    assert_equal_but_for_origin(result.file, plain)
    assert any("[2, 4]" in change for change in result.changes)


def test_silent_causality_of_sliding_layers_becomes_the_reference_rule_with_a_warning(
    target: Path, tmp_path: Path
) -> None:
    plain = direct(tmp_path, target, t1(**SLIDING))

    def silent(keys: Keys) -> None:
        for key in [key for key in keys if "causal" in key]:
            del keys[key]

    other = foreign(tmp_path / "foreign.gguf", plain, "dflash-draft", BUUN, silent)
    result = repair(read_header(other), tmp_path / "fixed.gguf", target=target)
    assert result.drafter.causal == (True, False)
    assert "sliding layers were marked causal" in result.warnings[0]
    assert_equal_but_for_origin(result.file, plain)


def test_norms_in_half_precision_become_f32_exactly(target: Path, tmp_path: Path) -> None:
    plain = direct(tmp_path, target, t1())
    other = foreign(tmp_path / "foreign.gguf", plain, "dflash-draft", BUUN)
    header = read_header(other)
    halved = tmp_path / "halved.gguf"
    with GgufWriter(halved) as out:
        for key, value in header.kv.items():
            out.add(key, value)
        for name, info in header.tensors.items():
            out.declare(name, info.ne, TensorType.BF16 if "norm" in name else info.type)
        out.begin()
        for name, info in header.tensors.items():
            data = tensor_data(other, header.data_start, info)
            if "norm" in name:
                data = (np.frombuffer(data, np.uint32) >> 16).astype(np.uint16).tobytes()
            out.write(name, 0, data)
        out.commit()
    result = repair(read_header(halved), tmp_path / "fixed.gguf", target=target)
    assert_equal_but_for_origin(result.file, plain)  # the checkpoint was bf16, so nothing was lost
    assert any("converted exactly" in change for change in result.changes)


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (
            lambda keys: keys.pop("dflash-draft.dflash.target_layer_ids"),
            "which layers of the target it reads",
        ),
        (lambda keys: keys.pop("dflash-draft.dflash.mask_token_id"), "the mask token"),
        (lambda keys: keys.pop("dflash-draft.rope.freq_base"), "rope theta"),
        (lambda keys: keys.pop("dflash-draft.dflash.block_size"), "the block size"),
        (
            lambda keys: keys.update({"dflash-draft.dflash.target_layer_ids": Kv.string("1,3")}),
            "which layers of the target it reads",
        ),
        (
            lambda keys: keys.update(
                {"dflash-draft.dflash.target_layer_ids": Kv.array(ValueType.INT32, [1])}
            ),
            "fc.weight is",
        ),
        (
            lambda keys: keys.update({"dflash-draft.dflash.mask_token_id": Kv.u32(512)}),
            "uses token 512 as its mask",
        ),
    ],
)
def test_what_is_not_in_the_file_is_never_guessed(
    edit: Callable[[Keys], None], words: str, target: Path, tmp_path: Path
) -> None:
    plain = direct(tmp_path, target, t1())
    other = foreign(tmp_path / "foreign.gguf", plain, "dflash-draft", BUUN, edit)
    with pytest.raises(DflashError, match=words):
        repair(read_header(other), tmp_path / "fixed.gguf", target=target)
    assert not (tmp_path / "fixed.gguf").exists()


@pytest.mark.parametrize(
    ("extra", "without", "words"),
    [
        (("dflash.domino.start",), (), "no place for dflash.domino.start"),
        (
            ("dflash.aux_hidden_norm.0.weight", "blk.0.attn_gate.weight"),
            (),
            "no place for dflash.aux_hidden_norm",
        ),
        (("fc.weight",), (), "two of its tensors are fc.weight"),
        ((), ("blk.1.ffn_down.weight",), "blk.1.ffn_down.weight is missing"),
    ],
)
def test_tensors_that_have_no_place_or_are_missing_are_named(
    extra: tuple[str, ...], without: tuple[str, ...], words: str, target: Path, tmp_path: Path
) -> None:
    plain = direct(tmp_path, target, t1())
    other = foreign(
        tmp_path / "foreign.gguf", plain, "qwen35-dflash-draft", LUCEBOX, extra=extra, without=without
    )
    with pytest.raises(DflashError, match=words):
        repair(read_header(other), tmp_path / "fixed.gguf", target=target)


def test_without_a_target_the_tokenizer_must_be_in_the_file(target: Path, tmp_path: Path) -> None:
    plain = direct(tmp_path, target, t1())
    other = foreign(tmp_path / "foreign.gguf", plain, "dflash-draft", BUUN)
    with pytest.raises(DflashError, match="has no tokenizer of its own") as caught:
        repair(read_header(other), tmp_path / "fixed.gguf")
    assert "--target" in (caught.value.hint or "")
    tokenizer = {k: v for k, v in read_header(plain).kv.items() if k.startswith("tokenizer.")}
    other = foreign(tmp_path / "with.gguf", plain, "dflash-draft", BUUN, lambda keys: keys.update(tokenizer))
    result = repair(read_header(other), tmp_path / "fixed.gguf")
    assert read_header(result.file).get("tokenizer.ggml.mask_token_id") == 500


def test_the_form_before_the_merge_is_named_and_not_guessed(target: Path, tmp_path: Path) -> None:
    plain = direct(tmp_path, target, t1())

    def early(keys: Keys) -> None:
        keys["dflash.target_layer_ids"] = keys.pop("dflash.dflash.target_layer_ids")

    other = foreign(tmp_path / "foreign.gguf", plain, "dflash", LUCEBOX, early)
    assert detect(read_header(other)).name == "dflash-early"  # type: ignore[union-attr]
    with pytest.raises(DflashError, match="outputs or inputs"):
        repair(read_header(other), tmp_path / "fixed.gguf", target=target)


def test_a_good_file_needs_no_repair_and_a_target_is_no_drafter(target: Path, tmp_path: Path) -> None:
    plain = direct(tmp_path, target, t1())
    assert detect(read_header(plain)).name == "llama.cpp"  # type: ignore[union-attr]
    with pytest.raises(DflashError, match="needs no repair"):
        repair(read_header(plain), tmp_path / "fixed.gguf", target=target)
    assert detect(read_header(target)) is None
    with pytest.raises(DflashError, match="no drafter that is known"):
        repair(read_header(target), tmp_path / "fixed.gguf")


def test_the_file_to_be_repaired_is_never_overwritten(target: Path, tmp_path: Path) -> None:
    plain = direct(tmp_path, target, t1())
    other = foreign(tmp_path / "foreign.gguf", plain, "dflash-draft", BUUN)
    before = other.read_bytes()
    with pytest.raises(DflashError, match="give another name"):
        repair(read_header(other), other, target=target)
    assert other.read_bytes() == before
