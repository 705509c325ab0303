"""What `inspect` says of checkpoints and GGUF files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest

from dflashcpp.cli.app import run
from dflashcpp.conversion import convert
from dflashcpp.errors import DflashError
from dflashcpp.inspection import inspect
from tests.support.checkpoints import random_entries, t1, t1_v2, write_checkpoint, write_target


@pytest.fixture(scope="module")
def drafter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    target = write_target(folder / "t.gguf", weights=False)
    source = write_checkpoint(folder / "d", t1_v2())
    return convert(source, target=target, type="BF16", output=folder / "drafter.gguf").file


def test_json_of_a_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_checkpoint(tmp_path, t1_v2())
    assert run(["inspect", str(source), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["kind"], said["dialect"], said["version"], said["problems"]) == (
        "checkpoint",
        "z-lab",
        2,
        [],
    )
    assert said["drafter"]["target_layer_ids"] == [1, 3] and said["tensors"]["types"] == {"BF16": 36}


def test_checkpoint_and_its_gguf_describe_the_same_drafter(tmp_path: Path, drafter: Path) -> None:
    ours, theirs = inspect(write_checkpoint(tmp_path, t1_v2())), inspect(drafter)
    assert theirs.kind == "gguf" and theirs.dialect == "llama.cpp" and theirs.problems == ()
    assert ours.drafter is not None and theirs.drafter is not None
    different = {
        key
        for key, value in ours.drafter.to_dict().items()
        if key not in ("rope", "rms_eps") and theirs.drafter.to_dict()[key] != value
    }
    assert different == set()


def test_a_refused_checkpoint_is_a_problem_with_a_fix(tmp_path: Path) -> None:
    found = inspect(
        write_checkpoint(
            tmp_path, t1(dflash_config={"projector_type": "domino"}), entries=random_entries(t1())
        )
    )
    assert found.drafter is None and "Domino" in found.problems[0].message and found.problems[0].fix


def test_what_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "x.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    assert run(["inspect", str(tmp_path / "x.safetensors")]) == 1
    with pytest.raises(DflashError, match="LFS"):
        inspect(tmp_path / "x.safetensors")


def test_a_target_is_no_drafter(tmp_path: Path) -> None:
    found = inspect(write_target(tmp_path / "t.gguf", weights=False))
    assert [problem.code for problem in found.problems] == ["no-drafter"]


def rewritten(
    source: Path,
    path: Path,
    change: Callable[[dict[str, Any], dict[str, Any]], object],
    arch: str = "dflash",
) -> Path:
    """A copy of a GGUF by gguf-py with its keys (name: field) and tensors changed."""
    reader = gguf.GGUFReader(source)
    keys = {name: found for name, found in reader.fields.items() if not name.startswith("GGUF.")}
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    change(keys, tensors)
    writer = gguf.GGUFWriter(path, arch)
    for name, found in keys.items():
        if name != "general.architecture":
            kind = found.types[0]
            inner = found.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
            renamed = name.replace("dflash.", f"{arch}.", 1) if name.startswith("dflash.") else name
            writer.add_key_value(renamed, found.contents(), kind, inner)
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor.data, raw_dtype=tensor.tensor_type)
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        step()
    writer.close()
    return path


@pytest.mark.parametrize(
    ("key", "word"),
    [
        ("dflash.target_layers", "target_layers"),
        ("dflash.rope.freq_base", "10000"),
        ("dflash.block_size", "block_size"),
        ("dflash.attention.key_length", "key_length"),
        ("tokenizer.ggml.mask_token_id", "accepted"),
        ("tokenizer.ggml.tokens", "tokenizer"),
    ],
)
def test_a_key_whose_default_is_wrong_is_missed(tmp_path: Path, drafter: Path, key: str, word: str) -> None:
    found = inspect(rewritten(drafter, tmp_path / "x.gguf", lambda keys, tensors: keys.pop(key)))
    assert any(problem.code == "missing-key" and word in problem.message for problem in found.problems)


def test_missing_and_unknown_tensors_are_named(tmp_path: Path, drafter: Path) -> None:
    def change(keys: dict[str, Any], tensors: dict[str, Any]) -> None:
        tensors["blk.0.attn_gate.weight"] = tensors.pop("blk.1.ffn_up.weight")

    found = {
        problem.code: problem.message
        for problem in inspect(rewritten(drafter, tmp_path / "x", change)).problems
    }
    assert "blk.1.ffn_up.weight" in found["missing-tensor"]
    assert "blk.0.attn_gate.weight" in found["unknown-tensor"]


def test_another_tools_gguf_is_named_and_can_be_fixed(
    tmp_path: Path, drafter: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def change(keys: dict[str, Any], tensors: dict[str, Any]) -> None:
        tensors["dflash_fc.weight"] = tensors.pop("fc.weight")
        tensors["dflash_hidden_norm.weight"] = tensors.pop("enc.output_norm.weight")

    foreign = rewritten(drafter, tmp_path / "x.gguf", change, arch="dflash-draft")
    assert "foreign-dialect" in [problem.code for problem in inspect(foreign).problems]
    assert inspect(foreign).dialect == "dflash-draft"
    target = write_target(tmp_path / "t.gguf", weights=False)
    fixed = tmp_path / "fixed.gguf"
    assert run(["inspect", str(foreign), "--fix", str(fixed), "--target", str(target), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["dialect"] == "dflash-draft" and said["changes"]
    again = inspect(fixed)
    assert again.problems == () and again.drafter is not None and again.drafter.taps == (3, 5)


def test_half_a_dflash2_is_missing_the_rest(tmp_path: Path, drafter: Path) -> None:
    def change(keys: dict[str, Any], tensors: dict[str, Any]) -> None:
        for name in [name for name in tensors if name.startswith("selector_")]:
            del tensors[name]

    codes = [problem.code for problem in inspect(rewritten(drafter, tmp_path / "x", change)).problems]
    assert "missing-tensor" in codes
