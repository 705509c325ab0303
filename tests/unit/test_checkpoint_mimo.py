"""Xiaomi MiMo's drafters: sinks, a part of each head rotated, value scale, a vector for the mask."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dflashcpp.checkpoint import open_checkpoint
from dflashcpp.checkpoint.torch_file import read_mask_embedding
from dflashcpp.conversion import convert
from dflashcpp.drafter import Drafter
from dflashcpp.errors import DflashError
from dflashcpp.gguf_file import read_header
from tests.support.checkpoints import random_entries, t1, write_checkpoint, write_target

SHARDS = ("dflash_draft_model-00001-of-00002.safetensors", "dflash_draft_model-00002-of-00002.safetensors")


def mimo(**edits: Any) -> dict[str, Any]:
    """T1 with MiMo's keys, as the published config has them."""
    draft = {
        "backbone_rotary_base": 5000000,
        "block_size": 8,
        "use_swa": True,
        "swa_window_size": 64,
        "attention_value_scale": 0.612,
        "attention_sink_bias": True,
        "target_layer_ids": [0, 5],
    }
    return t1(
        block_size=...,
        layer_types=...,
        rope_theta=10000,
        partial_rotary_factor=0.5,
        dflash_config=draft,
        **edits,
    )


def published(folder: Path) -> Path:
    return write_checkpoint(folder, mimo(), entries=random_entries(t1(), "sinks"), shards=SHARDS)


def test_two_rotary_bases_are_a_question_that_set_answers(tmp_path: Path) -> None:
    with pytest.raises(DflashError, match="backbone_rotary_base") as caught:
        open_checkpoint(published(tmp_path))
    assert caught.value.hint and "--set rope_theta=" in caught.value.hint


def test_all_of_mimo_arrives(tmp_path: Path) -> None:
    target = write_target(tmp_path / "t.gguf", arch="mimo2", weights=False)
    result = convert(
        published(tmp_path / "dflash"),
        target=target,
        type="BF16",
        output=tmp_path / "x.gguf",
        overrides={"rope_theta": 5000000},
    )
    header = read_header(result.file)
    drafter = Drafter.from_gguf(header)
    assert (drafter.rope.theta, drafter.rope.dims, drafter.window) == (5e6, 32, 64)
    assert drafter.value_scale == pytest.approx(0.612) and drafter.sinks
    assert (drafter.taps, drafter.sliding) == ((1, 6), (True, True))
    assert header.tensors["blk.1.attn_sinks.weight"].ne == (4,)
    assert header.tensors["blk.1.attn_sinks.weight"].type == 0


def test_the_last_layer_is_only_to_be_had_from_some_targets(tmp_path: Path) -> None:
    target = write_target(tmp_path / "t.gguf", arch="qwen3", weights=False)
    with pytest.raises(DflashError, match="last layer"):
        convert(published(tmp_path / "d"), target=target, type="BF16", overrides={"rope_theta": 5e6})


def with_mask(folder: Path, vector: Any, token: int = 500) -> Path:
    torch = pytest.importorskip("torch")
    source = write_checkpoint(folder, t1())
    torch.save({"mask_token_id": token, "embedding": vector}, source / "mask_embedding.pt")
    return source


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_the_mask_vector_replaces_its_row_and_nothing_else(tmp_path: Path, dtype: str) -> None:
    torch = pytest.importorskip("torch")
    from gguf import GGUFReader

    vector = torch.randn(300, generator=torch.Generator().manual_seed(1)).to(getattr(torch, dtype))[44:]
    target = write_target(tmp_path / "t.gguf")
    source = with_mask(tmp_path / "d", torch.nn.Parameter(vector))
    result = convert(source, target=target, type="BF16", output=tmp_path / "x.gguf")
    theirs = {tensor.name: tensor.data for tensor in GGUFReader(target).tensors}
    ours = {tensor.name: tensor.data for tensor in GGUFReader(result.file).tensors}
    expected = theirs["token_embd.weight"].copy()
    expected[500] = vector.detach().float().numpy().astype(np.float16)
    assert (ours["token_embd.weight"] == expected).all()
    assert (ours["output.weight"] == theirs["output.weight"]).all()
    assert result.drafter.own_embedding and result.drafter.own_head and result.tensors == 27


def test_the_mask_vector_of_another_token_is_refused(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    with pytest.raises(DflashError, match="token 499"):
        open_checkpoint(with_mask(tmp_path, torch.ones(256), token=499))


def test_a_mask_vector_needs_the_target_on_this_machine(tmp_path: Path) -> None:
    from tests.unit.test_convert_tokenizer import folder_of, tokenizer_json

    torch = pytest.importorskip("torch")
    source = with_mask(tmp_path / "d", torch.ones(256))
    with pytest.raises(DflashError, match="mask_embedding"):
        convert(source, target=folder_of(tmp_path / "t", tokenizer_json()), type="BF16")


def test_a_mask_vector_of_another_size_is_refused(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    with pytest.raises(DflashError, match="hidden size"):
        open_checkpoint(with_mask(tmp_path, torch.ones(128)))


def zipped(path: Path, pickle: bytes, numbers: bytes = b"\0" * 512) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x/data.pkl", pickle)
        archive.writestr("x/data/0", numbers)
    return path


@pytest.mark.parametrize(
    "pickle",
    [
        b"",
        b"\x80\x02.",
        b"\x80\x02}q\x00.",
        b"cos\nsystem\n(S'touch hacked'\ntR.",
        b"\x80\x02cos\nsystem\nX\x05\x00\x00\x00touch\x85R.",
        b"\x80\x02(((((",
        b"\x80\x02}X\x01\x00\x00\x00au.",
        b"\x80\x02h\x05.",
        b"X\xff\xff\xff\x7f",
        b"\x80\x02" + b"}" * 70_000 + b".",
    ],
)
def test_a_hostile_pickle_is_only_looked_at(
    tmp_path: Path, pickle: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DflashError, match="not the file of a mask embedding"):
        read_mask_embedding(zipped(tmp_path / "m.pt", pickle), 256)
    assert [path.name for path in tmp_path.iterdir()] == ["m.pt"]


def test_what_is_no_zip_is_told(tmp_path: Path) -> None:
    (tmp_path / "m.pt").write_bytes(b"\x80\x02}q\x00.")
    with pytest.raises(DflashError, match="mask embedding"):
        read_mask_embedding(tmp_path / "m.pt", 256)


@pytest.mark.parametrize("value", [float("nan"), float("-inf"), 7e4])
def test_a_mask_vector_with_impossible_numbers_is_refused_by_index(tmp_path: Path, value: float) -> None:
    torch = pytest.importorskip("torch")
    vector = torch.ones(256)
    vector[17] = value
    with pytest.raises(DflashError, match=r"mask_embedding\.pt: embedding\[17\]"):
        open_checkpoint(with_mask(tmp_path, vector))


def test_a_mask_file_damaged_anywhere_is_refused_in_a_sentence_or_read(tmp_path: Path) -> None:
    """Every byte of the zip's directory and headers turned around, one at a time."""
    torch = pytest.importorskip("torch")
    path = with_mask(tmp_path, torch.ones(256)) / "mask_embedding.pt"
    whole, refused = path.read_bytes(), 0
    for place in [*range(0, 400, 3), *range(len(whole) - 700, len(whole), 2)]:
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0xFF]) + whole[place + 1 :])
        try:
            read_mask_embedding(path, 256)
        except DflashError as error:
            refused += 1
            assert "mask_embedding.pt" in error.message and error.hint
    assert refused > 50
