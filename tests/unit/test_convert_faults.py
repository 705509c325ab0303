"""Faults found by trying to break the converter: each is one sentence, and nothing is written."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dflashcpp.conversion import ConvertResult, convert
from dflashcpp.errors import DflashError
from dflashcpp.gguf_file import GgufWriter, Kv, TensorType, read_header
from dflashcpp.streaming import check_scales
from tests.support.checkpoints import (
    Entry,
    array_entry,
    random_entries,
    t1,
    t1_v2,
    write_checkpoint,
    write_target,
)

YARN = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096}
DEFAULT = {"rope_type": "default", "rope_theta": 1000000}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("target") / "target.gguf", weights=False)


def made(
    tmp_path: Path,
    target: Path | None,
    config: dict[str, Any],
    *,
    entries: dict[str, Entry] | None = None,
    **options: Any,
) -> ConvertResult:
    base = t1_v2() if "conv_kernel_size" in config.get("dflash_config", {}) else t1()
    source = write_checkpoint(tmp_path / "d", config, entries=entries or random_entries(base))
    options = {"type": "BF16", "output": tmp_path / "out.gguf", **options}
    return convert(source, target=target, **options)


def refused(tmp_path: Path, target: Path | None, config: dict[str, Any], *words: str, **options: Any) -> str:
    """The error's sentence and hint, which must hold `words`; the old output must still be there, alone."""
    out = tmp_path / "place" / "out.gguf"
    out.parent.mkdir(exist_ok=True)
    out.write_text("old")
    with pytest.raises(DflashError) as caught:
        made(tmp_path, target, config, **{"output": out, **options})
    said = f"{caught.value.message}\n{caught.value.hint}"
    assert caught.value.hint
    assert all(word in said for word in words), said
    assert out.read_text() == "old" and [path.name for path in out.parent.iterdir()] == ["out.gguf"]
    return said


# -- what a config may say ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        ({"block_size": 5 * 10**9}, ("block_size", "5000000000", "--set")),
        ({"max_position_embeddings": 1 << 33}, ("max_position_embeddings", "--set")),
        ({"rms_norm_eps": 1e-60}, ("rms_norm_eps",)),
        ({"num_hidden_layers": "2"}, ("num_hidden_layers", '"2"')),
        ({"attention_value_scale": 0}, ("attention_value_scale", "greater than 0")),
        ({"input_embedding_scale": -2.0}, ("input_embedding_scale", "greater than 0")),
        ({"dflash_config": [1]}, ("dflash_config", "object")),
        ({"dflash_config": {"projector_type": "DSpark"}}, ("DSpark",)),
        ({"dflash_config": {"projector_type": "mystery"}}, ("projector_type", "mystery", "=null")),
        ({"quantization_config": {"quant_method": "GPTQ"}}, ("GPTQ",)),
        ({"target_hidden_size": 512}, ("target_hidden_size", "512", "256")),
        ({"rope_theta": ..., "rope_parameters": DEFAULT, "rope_scaling": YARN}, ("rope_scaling=null",)),
        ({"rope_scaling": {**YARN, "type": "linear"}}, ("yarn", "linear")),
        ({"rope_scaling": {"factor": 4.0}}, ("rope_type", "4.0")),
    ],
)
def test_a_config_that_makes_no_sense_is_refused_by_key(
    tmp_path: Path, target: Path, edit: dict[str, Any], words: tuple[str, ...]
) -> None:
    refused(tmp_path, target, t1(**edit), "config.json", *words)


def test_two_places_of_one_rope_may_agree(tmp_path: Path, target: Path) -> None:
    config = t1(rope_theta=..., rope_parameters={**YARN, "rope_theta": 5e5}, rope_scaling=YARN)
    rope = made(tmp_path, target, config).drafter.rope
    assert (rope.type, rope.factor, rope.theta) == ("yarn", 32.0, 5e5)


@pytest.mark.parametrize(
    ("key", "field"),
    [
        ("rope_scaling.factor", "factor"),
        ("rope_scaling.original_max_position_embeddings", "original_context"),
    ],
)
def test_a_value_inside_a_group_can_be_set(tmp_path: Path, target: Path, key: str, field: str) -> None:
    result = made(tmp_path, target, t1(rope_scaling=YARN), overrides={key: 64})
    assert getattr(result.drafter.rope, field) == 64


def test_a_group_can_be_made_by_set(tmp_path: Path, target: Path) -> None:
    overrides = {"rope_scaling.rope_type": "linear", "rope_scaling.factor": 4}
    assert made(tmp_path, target, t1(), overrides=overrides).drafter.rope.type == "linear"


def test_a_misspelt_override_is_an_error_that_names_the_right_one(tmp_path: Path, target: Path) -> None:
    refused(tmp_path, target, t1(), "rope_thetta", "rope_theta", overrides={"rope_thetta": 5})


@pytest.mark.parametrize("place", ["is_causal", "dflash_config.is_causal", "dflash_config.causal", "causal"])
def test_causality_is_read_nested_and_flat(tmp_path: Path, target: Path, place: str) -> None:
    group, _, key = place.rpartition(".")
    edit: dict[str, Any] = {group: {key: False}} if group else {key: False}
    config = t1(layer_types=["sliding_attention"] * 2, sliding_window=8, use_sliding_window=True, **edit)
    assert made(tmp_path, target, config).drafter.causal == (False, False)


def test_an_unknown_key_of_the_drafters_group_is_warned_about(tmp_path: Path, target: Path) -> None:
    result = made(tmp_path, target, t1(dflash_config={"residual_gate": True}))
    assert any("dflash_config.residual_gate" in warning for warning in result.warnings)


def test_sinks_that_the_config_switches_off_are_not_used_in_silence(tmp_path: Path, target: Path) -> None:
    sinks = {f"layers.{i}.self_attn.attention_sink_bias": array_entry(np.ones(4, "f4")) for i in range(2)}
    entries = {**random_entries(t1()), **sinks}
    refused(tmp_path, target, t1(attention_sink_bias=False), "attention_sink_bias", entries=entries)


def test_a_config_with_a_byte_order_mark_is_read(tmp_path: Path, target: Path) -> None:
    source = write_checkpoint(tmp_path / "d", t1())
    (source / "config.json").write_text(json.dumps(t1()), encoding="utf-8-sig")
    assert convert(source, target=target, type="BF16", output=tmp_path / "o.gguf").drafter.layers == 2


# -- tensors --------------------------------------------------------------------------------------


def test_a_head_without_a_row_for_every_token_needs_d2t(tmp_path: Path, target: Path) -> None:
    head = {"lm_head.weight": array_entry(np.ones((480, 256), "f4"))}
    refused(tmp_path, target, t1(), "lm_head.weight", "480", "512", entries={**random_entries(t1()), **head})


@pytest.mark.parametrize("given", ["m-00002-of-00002.safetensors", "m-00001-of-00002.safetensors"])
def test_one_shard_stands_for_its_series(tmp_path: Path, target: Path, given: str) -> None:
    names = ("m-00001-of-00002.safetensors", "m-00002-of-00002.safetensors")
    source = write_checkpoint(tmp_path / "d", t1(), shards=names)
    (source / "model.safetensors.index.json").unlink()
    result = convert(source / given, target=target, type="BF16", output=tmp_path / "o.gguf")
    assert result.tensors == 25


def test_a_link_to_weights_finds_the_config_where_it_leads(tmp_path: Path, target: Path) -> None:
    source = write_checkpoint(tmp_path / "far" / "d", t1())
    (tmp_path / "link.safetensors").symlink_to(source / "model.safetensors")
    result = convert(tmp_path / "link.safetensors", target=target, type="BF16", output=tmp_path / "o.gguf")
    assert result.tensors == 25


def test_a_repository_of_the_hubs_cache_is_told_which_folder_to_give(tmp_path: Path, target: Path) -> None:
    source = write_checkpoint(tmp_path / "models--org--name" / "snapshots" / ("0" * 40), t1())
    with pytest.raises(DflashError, match="repository of the Hub's cache") as caught:
        convert(tmp_path / "models--org--name", target=target, output=tmp_path / "o.gguf")
    assert str(source) in str(caught.value.hint)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json"])
def test_a_json_file_as_source_is_told_to_give_the_folder(tmp_path: Path, target: Path, name: str) -> None:
    source = write_checkpoint(tmp_path / "d", t1(), shards=("a.safetensors",))
    with pytest.raises(DflashError, match="JSON file") as caught:
        convert(source / name, target=target, output=tmp_path / "o.gguf")
    assert str(source) in str(caught.value.hint)


@pytest.mark.parametrize(
    ("kind", "value", "fine"),
    [
        ("Q8_0", 1e30, 7e6),  # 127 times the largest F16 is 8.3e6
        ("Q4_0", 7e5, 5e5),  # 8 times: 5.2e5
        ("Q1_0", 7e4, 6.5e4),
        ("Q2_0", 7e4, 6.5e4),  # gguf-py does not know the type
        ("BF16", 3.4e38, 3.38e38),
        ("F16", 7e4, 6.5e4),
    ],
)
def test_a_number_that_a_type_cannot_hold_is_named(
    tmp_path: Path, target: Path, kind: str, value: float, fine: float
) -> None:
    weight = np.zeros((256, 512), "f4")
    weight[7, 300] = value
    entries = {**random_entries(t1()), "layers.1.mlp.down_proj.weight": array_entry(weight, "F32")}
    words = ("model.safetensors", "layers.1.mlp.down_proj.weight[7, 300]", kind)
    refused(tmp_path, target, t1(), *words, type=kind, entries=entries)
    weight[7, 300] = fine
    entries["layers.1.mlp.down_proj.weight"] = array_entry(weight, "F32")
    assert made(tmp_path, target, t1(), type=kind, entries=entries).written


def test_scales_are_looked_at_only_where_numbers_are_large() -> None:
    """The check reads the blocks back; small numbers never get that far (None would crash it)."""
    check_scales(np.full((2, 32), 65503.0, "f4"), None, None, 0, TensorType.Q8_0)  # type: ignore[arg-type]


# -- the target -----------------------------------------------------------------------------------


@pytest.mark.parametrize("group", ["", "dflash_config"])
def test_a_mask_token_given_as_text_is_looked_up_in_the_target(
    tmp_path: Path, target: Path, group: str
) -> None:
    edit: dict[str, Any] = {"dflash_config": {"mask_token_id": ...}}
    text = {"mask_token": "<|extra_200|>"}
    edit = {"dflash_config": {"mask_token_id": ..., **text}} if group else {**edit, **text}
    result = made(tmp_path, target, t1(**edit))
    assert read_header(result.file).get("tokenizer.ggml.mask_token_id") == 456 == result.drafter.mask_token_id
    assert any("extra_200" in warning and "456" in warning for warning in result.warnings)


@pytest.mark.parametrize("given", [True, False])
def test_a_mask_token_that_nobody_can_number_is_an_error(tmp_path: Path, target: Path, given: bool) -> None:
    config = t1(dflash_config={"mask_token_id": ...}, mask_token="<|MASK|>")
    refused(tmp_path, target if given else None, config, "<|MASK|>", "--set mask_token_id=")


def test_a_pair_may_differ_in_padding_rows_only(tmp_path: Path) -> None:
    padded = write_target(tmp_path / "t.gguf", vocab=512, tokens=505, weights=False)
    result = made(tmp_path, padded, t1(vocab_size=505))
    assert result.drafter.vocab == 512 == read_header(result.file).kv["tokenizer.ggml.tokens"].count
    assert any("505" in warning and "512" in warning for warning in result.warnings)
    refused(tmp_path, padded, t1(vocab_size=504), "504", "512")  # a token of the target would be missing


def test_padding_rows_count_for_codebooks(tmp_path: Path) -> None:
    padded = write_target(tmp_path / "t.gguf", vocab=512, tokens=505, weights=False)
    config = t1_v2(vocab_size=505)
    entries = random_entries(config)
    refused(tmp_path, padded, config, "505", "512", entries=entries)


def test_a_target_without_a_tokenizer_model_is_refused(tmp_path: Path, target: Path) -> None:
    header = read_header(target)
    changed = tmp_path / "none.gguf"
    with GgufWriter(changed) as writer:
        for key, value in header.kv.items():
            writer.add(key, Kv.string("none") if key == "tokenizer.ggml.model" else value)
        writer.begin()
        writer.commit()
    refused(tmp_path, changed, t1(), "tokenizer.ggml.model", "none.gguf")


def test_speculators_numbers_that_look_like_outputs_are_warned_about_by_the_targets_layers(
    tmp_path: Path, target: Path
) -> None:
    """speculators' configs do not say how many layers the target has; the target does."""
    layer = {key: value for key, value in t1().items() if key not in ("dflash_config", "architectures")}
    config = {
        "architectures": ["DFlashSpeculator"],
        "transformer_layer_config": {**layer, "rope_parameters": DEFAULT},
        "block_size": 16,
        "mask_token_id": 500,
    }
    taken = {**config, "aux_hidden_state_layer_ids": [1, 3]}  # z-lab's formula for 6 layers
    assert any("z-lab's numbering" in w for w in made(tmp_path, target, taken).warnings)
    other = {**config, "aux_hidden_state_layer_ids": [2, 4]}
    assert not any("z-lab's numbering" in w for w in made(tmp_path, target, other).warnings)
    refused(tmp_path, target, config, "--set aux_hidden_state_layer_ids")


# -- the output -----------------------------------------------------------------------------------


def test_an_input_is_never_the_output(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "d", t1())
    target = write_target(tmp_path / "d" / "target.gguf", weights=False)
    (tmp_path / "hard.gguf").hardlink_to(target)
    (tmp_path / "soft.gguf").symlink_to(source / "model.safetensors")
    before = {path: path.read_bytes() for path in source.iterdir()}
    for output in (*before, tmp_path / "hard.gguf", tmp_path / "soft.gguf"):
        for dry in (False, True):
            with pytest.raises(DflashError, match="cannot be the output"):
                convert(source, target=target, type="BF16", output=output, dry_run=dry)
    assert {path: path.read_bytes() for path in source.iterdir()} == before


def test_an_earlier_conversion_beside_the_checkpoint_is_replaced(tmp_path: Path, target: Path) -> None:
    source = write_checkpoint(tmp_path / "d", t1())
    for kind in ("BF16", "F32"):
        convert(source, target=target, type=kind, output=source / "mine.gguf")
    assert read_header(source / "mine.gguf").get("general.file_type") == 0


@pytest.mark.parametrize("dry", [False, True])
def test_what_is_no_ordinary_file_is_not_replaced(tmp_path: Path, target: Path, dry: bool) -> None:
    """`-o /dev/null` by root would otherwise put a file where the device was."""
    pipe = tmp_path / "pipe.gguf"
    os.mkfifo(pipe)
    with pytest.raises(DflashError, match="no ordinary file"):
        made(tmp_path, target, t1(), output=pipe, dry_run=dry)
    assert pipe.is_fifo()


def test_a_dry_run_finds_a_missing_folder(tmp_path: Path, target: Path) -> None:
    with pytest.raises(DflashError, match="does not exist"):
        made(tmp_path, target, t1(), output=tmp_path / "no" / "o.gguf", dry_run=True)


def test_names_that_are_empty_do_not_mean_the_current_folder(tmp_path: Path, target: Path) -> None:
    with pytest.raises(DflashError, match="source's name is empty"):
        convert("", target=target)
    source = write_checkpoint(tmp_path / "d", t1())
    with pytest.raises(DflashError, match="target's name is empty"):
        convert(source, target="")


def test_leftovers_of_any_name_go_and_those_in_use_stay(tmp_path: Path, target: Path) -> None:
    import fcntl

    dead = tmp_path / ".dflashcpp-0123456789ab-00000000.partial"
    live = tmp_path / ".dflashcpp-0123456789ab-00000001.partial"
    dead.write_bytes(b"x")
    with live.open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        made(tmp_path, target, t1())
        assert live.exists() and not dead.exists()


def test_a_hidden_file_taken_for_a_leftover_at_birth_is_made_again(
    tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import fcntl

    real, taken = fcntl.flock, []

    def flock(fd: int, how: int) -> None:
        if not taken:
            taken.extend(tmp_path.glob(".dflashcpp-*.partial"))
            taken[0].unlink()  # what another process does between our open and our lock
        real(fd, how)

    monkeypatch.setattr(fcntl, "flock", flock)
    assert made(tmp_path, target, t1()).written
    assert taken and not list(tmp_path.glob(".dflashcpp-*"))


@pytest.mark.parametrize("closed", ["2>&-", "<&- >&- 2>&-"])
def test_closed_standard_streams_do_not_stop_a_conversion(tmp_path: Path, target: Path, closed: str) -> None:
    """Nor may the file get their numbers: what is said on stderr would stand in it."""
    source = write_checkpoint(tmp_path / "d", t1())
    command = f'"$0" -m dflashcpp convert "$1" --target "$2" -q BF16 -o "$3" {closed}'
    made_here = made(tmp_path, target, t1(), output=tmp_path / "same.gguf")
    for name in ("a.gguf", "b.gguf"):
        arguments = [sys.executable, str(source), str(target), str(tmp_path / name)]
        done = subprocess.run(["sh", "-c", command, *arguments], cwd=tmp_path, check=False)
        assert done.returncode == 0
        assert (tmp_path / name).read_bytes() == made_here.file.read_bytes()


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("mount") is None, reason="mounting needs root")
def test_a_disk_that_fills_up_after_the_check(tmp_path: Path, target: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(small)], check=False)
    if mounted.returncode:
        pytest.skip("no mounts in this container")
    try:
        _fill_during_conversion(tmp_path, target, small)
    finally:
        subprocess.run(["umount", str(small)], check=True)


def _fill_during_conversion(tmp_path: Path, target: Path, small: Path) -> None:
    out = small / "out.gguf"
    out.write_text("old")
    begin = GgufWriter.begin

    def full(writer: GgufWriter) -> None:
        begin(writer)
        fd = os.open(small / "other", os.O_CREAT | os.O_WRONLY)
        try:
            while os.write(fd, b"x" * 65536):
                pass
        except OSError:
            os.close(fd)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GgufWriter, "begin", full)
        with pytest.raises(DflashError, match="no room") as caught:
            made(tmp_path, target, t1(), output=out, type="BF16")
    assert caught.value.hint and out.read_text() == "old"
    assert sorted(path.name for path in small.iterdir()) == ["other", "out.gguf"]
