"""Finding and reading the files of a checkpoint; anything else is said in one sentence."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest

from dflashcpp.checkpoint import open_checkpoint
from dflashcpp.checkpoint.safetensors_file import read_safetensors
from dflashcpp.errors import DflashError
from tests.support.checkpoints import layout, random_entries, t1, t1_v2, write_checkpoint, write_safetensors

ODD_SHARDS = ("dflash_draft_model-00001-of-00003.safetensors", "b.safetensors", "weights final.safetensors")


def fails(path: Path, *words: str, **options: object) -> str:
    with pytest.raises(DflashError) as caught:
        open_checkpoint(path, **options)  # type: ignore[arg-type]
    text = f"{caught.value.message} {caught.value.hint or ''}"
    for word in words:
        assert word in text, text
    assert "\n" not in text
    return text


def test_a_folder_and_its_weights_file_open_the_same_checkpoint(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "a b")
    assert open_checkpoint(folder).drafter == open_checkpoint(folder / "model.safetensors").drafter


def test_shards_with_odd_names_load_through_the_index(tmp_path: Path) -> None:
    one = write_checkpoint(tmp_path / "one")
    many = write_checkpoint(tmp_path / "many", shards=ODD_SHARDS)
    with open_checkpoint(one) as a, open_checkpoint(many) as b:
        assert a.drafter == b.drafter
        assert list(a.tensors) == list(b.tensors)
        for name in a.tensors:
            assert (a.read_rows(name) == b.read_rows(name)).all(), name


def test_one_shard_given_loads_all_of_its_index(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, shards=ODD_SHARDS)
    assert len(open_checkpoint(folder / "b.safetensors").tensors) == 25


def test_shards_without_an_index_are_merged(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, shards=("a.safetensors", "b.safetensors"))
    (folder / "model.safetensors.index.json").unlink()
    assert len(open_checkpoint(folder).tensors) == 25


def test_a_missing_shard_is_named_with_its_tensors(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, shards=ODD_SHARDS)
    (folder / "b.safetensors").unlink()
    fails(folder, "b.safetensors", "missing", "layers.")


def test_a_missing_part_of_a_numbered_series_is_named_without_an_index(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, shards=tuple(f"m-0000{n}-of-00003.safetensors" for n in (1, 2, 3)))
    (folder / "model.safetensors.index.json").unlink()
    (folder / "m-00002-of-00003.safetensors").unlink()
    fails(folder, "m-00002-of-00003.safetensors", "missing")


def test_a_tensor_listed_but_absent_is_named(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, shards=("a.safetensors", "b.safetensors"))
    index = folder / "model.safetensors.index.json"
    listed = json.loads(index.read_text())
    listed["weight_map"]["layers.0.self_attn.extra.weight"] = "a.safetensors"
    index.write_text(json.dumps(listed))
    fails(folder, "layers.0.self_attn.extra.weight")


def test_an_index_may_not_reach_outside_its_folder(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "c", shards=("a.safetensors", "b.safetensors"))
    index = folder / "model.safetensors.index.json"
    index.write_text(index.read_text().replace('"a.safetensors"', '"../a.safetensors"'))
    fails(folder, "../a.safetensors")


def test_a_file_the_index_does_not_list_is_mentioned(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, shards=("a.safetensors", "b.safetensors"))
    write_safetensors(folder / "other.safetensors", {})
    assert any("other.safetensors" in warning for warning in open_checkpoint(folder).warnings)


def test_the_only_checkpoint_inside_a_folder_is_taken(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "dflash")
    assert open_checkpoint(tmp_path).drafter.layers == 2


def test_two_checkpoints_inside_a_folder_are_a_question(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "one")
    write_checkpoint(tmp_path / "two")
    fails(tmp_path, "one", "two")


def test_weights_alone_ask_for_the_config(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "a")
    config = (folder / "config.json").rename(tmp_path / "elsewhere.json")
    fails(folder, "config.json", "--config")
    assert open_checkpoint(folder, config).drafter.layers == 2


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is empty"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:abc\nsize 5544328424\n", "Git LFS pointer"),
        (b"GGUF\x03\x00\x00\x00", "GGUF"),
        (b"PK\x03\x04aaaaaaaa", "PyTorch"),
        (b"<!DOCTYPE html><html></html>", "web page"),
        (struct.pack("<Q", 16384) + b'{"a": {"dtype"', "cut off"),
        (struct.pack("<Q", 1 << 60) + b"{}", "not a safetensors"),
        (struct.pack("<Q", 2) + b"[]", "no JSON object"),
        (struct.pack("<Q", 2) + b"{}", "holds no tensors"),
        (struct.pack("<Q", 3) + b"{]}", "not JSON"),
    ],
)
def test_what_is_no_safetensors_file_is_told_apart(tmp_path: Path, content: bytes, words: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(t1()))
    (tmp_path / "model.safetensors").write_bytes(content)
    fails(tmp_path, words)


def test_a_truncated_file_says_how_much_is_missing(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path) / "model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-100])
    fails(tmp_path, str(len(whole)), str(len(whole) - 100))


def test_bytes_behind_the_data_are_not_ignored(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path) / "model.safetensors"
    path.write_bytes(path.read_bytes() + b"\0" * 10)
    fails(tmp_path, "describes only")


def header_of(entry: dict[str, object]) -> bytes:
    text = json.dumps({"t": entry}).encode()
    return struct.pack("<Q", len(text)) + text + b"\0" * 8


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [2], "data_offsets": [8, 0]},
        {"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [1 << 60, 1 << 60], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [True, 2], "data_offsets": [0, 8]},
        {"dtype": "F33", "shape": [2], "data_offsets": [0, 8]},
        {"dtype": ["F32"], "shape": [2], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": "2", "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [2], "data_offsets": [4, 12]},
        {"dtype": "F32", "shape": [2], "data_offsets": [0]},
        {"dtype": "F32", "shape": [1] * 40 + [2], "data_offsets": [0, 8]},
        {},
    ],
)
def test_entries_that_make_no_sense_are_refused(tmp_path: Path, entry: dict[str, object]) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(header_of(entry))
    with pytest.raises(DflashError, match=r"tensor t|holds|bytes"):
        read_safetensors(path)


def test_deep_nesting_and_double_keys_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    for text, words in ((b'{"a":' + b"[" * 200_000, "JSON"), (b'{"a": 1, "a": 2}', "twice")):
        path.write_bytes(struct.pack("<Q", len(text)) + text)
        with pytest.raises(DflashError, match=words):
            read_safetensors(path)


@pytest.mark.parametrize(
    "prefix", ["model.", "draft.", "draft_model.", "language_model.", "model.language_model."]
)
def test_a_common_prefix_is_taken_off(tmp_path: Path, prefix: str) -> None:
    entries = {prefix + name: entry for name, entry in random_entries(t1()).items()}
    folder = write_checkpoint(tmp_path, t1(), entries=entries)
    assert set(open_checkpoint(folder).tensors) == set(
        open_checkpoint(write_checkpoint(tmp_path / "x")).tensors
    )


def test_two_names_that_differ_by_a_prefix_only_are_refused(tmp_path: Path) -> None:
    entries = random_entries(t1())
    entries["model.fc.weight"] = entries["fc.weight"]
    fails(write_checkpoint(tmp_path, t1(), entries=entries), "fc.weight", "model.fc.weight")


def test_every_unknown_tensor_is_named(tmp_path: Path) -> None:
    entries = random_entries(t1())
    for name in ("pre_fc_norms.0.weight", "layers.1.attn_gate.weight", "layers.0.aux_norm.weight"):
        entries[name] = entries["norm.weight"]
    folder = write_checkpoint(tmp_path, t1(), entries=entries)
    fails(
        folder, "pre_fc_norms.0.weight", "layers.1.attn_gate.weight", "layers.0.aux_norm.weight", "3 tensors"
    )


def test_every_missing_tensor_is_named(tmp_path: Path) -> None:
    entries = random_entries(t1())
    del entries["layers.1.mlp.up_proj.weight"], entries["hidden_norm.weight"]
    fails(
        write_checkpoint(tmp_path, t1(), entries=entries), "layers.1.mlp.up_proj.weight", "hidden_norm.weight"
    )


def test_half_a_dflash2_is_refused(tmp_path: Path) -> None:
    entries = {name: entry for name, entry in random_entries(t1_v2()).items() if "selector" not in name}
    fails(write_checkpoint(tmp_path, t1_v2(), entries=entries), "candidate_selector.predecessor_codebook")


def test_a_dflash2_config_with_dflash1_weights_is_refused(tmp_path: Path) -> None:
    fails(write_checkpoint(tmp_path, t1_v2(), entries=random_entries(t1())), "DFlash2DraftModel", "selector")


def test_a_dflash1_config_with_dflash2_weights_is_converted_as_dflash2(tmp_path: Path) -> None:
    config = t1_v2(architectures=["DFlashDraftModel"])
    checkpoint = open_checkpoint(write_checkpoint(tmp_path, config))
    assert checkpoint.drafter.version == 2
    assert any("DFlash-2" in warning for warning in checkpoint.warnings)


def test_biases_are_refused_by_name(tmp_path: Path) -> None:
    entries = random_entries(t1())
    entries["layers.0.self_attn.q_proj.bias"] = entries["norm.weight"]
    fails(write_checkpoint(tmp_path, t1(), entries=entries), "layers.0.self_attn.q_proj.bias", "biases")


def test_a_wrong_shape_names_what_was_expected(tmp_path: Path) -> None:
    entries = random_entries(t1())
    entries["layers.1.mlp.down_proj.weight"] = entries["layers.1.mlp.up_proj.weight"]
    fails(write_checkpoint(tmp_path, t1(), entries=entries), "layers.1.mlp.down_proj.weight", "[256, 512]")


def test_sizes_of_the_config_must_be_those_of_the_tensors(tmp_path: Path) -> None:
    for key, value in (("intermediate_size", 640), ("num_attention_heads", 8), ("head_dim", 32)):
        folder = write_checkpoint(tmp_path / key, t1(**{key: value}), entries=random_entries(t1()))
        fails(folder, key, str(value))


def test_layers_beyond_the_config_are_refused(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, t1(num_hidden_layers=1), entries=random_entries(t1()))
    fails(folder, "num_hidden_layers")


def test_a_huge_layer_number_is_no_layer(tmp_path: Path) -> None:
    entries = random_entries(t1())
    entries["layers.999999999.mlp.up_proj.weight"] = entries["layers.0.mlp.up_proj.weight"]
    fails(write_checkpoint(tmp_path, t1(), entries=entries), "layers.999999999")


def test_the_writer_of_the_tests_makes_the_published_tensor_list() -> None:
    assert len(layout(t1())) == 3 + 11 * 2
    assert len(layout(t1_v2())) == 6 + 15 * 2
