"""`convert --head`: the target's head travels in the drafter's file, in a type of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dflashcpp.conversion import convert
from dflashcpp.errors import DflashError
from dflashcpp.gguf_file import TensorInfo, TensorType, read_header
from dflashcpp.quantize import decode, encode, load_libggml
from tests.support.checkpoints import random_entries, t1, t1_v2, write_checkpoint, write_target
from tests.support.gguf_edit import rewrite


def stored(file: Path, info: TensorInfo) -> np.ndarray:
    """The bytes of a tensor, a row each."""
    start = read_header(file).data_start + info.offset
    return np.frombuffer(file.read_bytes(), np.uint8, info.nbytes, start).reshape(info.ne[1], -1)


def with_head(folder: Path, kind: str, target: Path, config: dict[str, Any] | None = None) -> Any:
    source = write_checkpoint(folder / "source", config or t1())
    return convert(source, target=target, type="BF16", head=kind, output=folder / "x.gguf")


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", ["Q4_0", "q8_0", "BF16", "F16"])
def test_the_targets_head_is_stored_in_the_type_asked_for(tmp_path: Path, kind: str, tied: bool) -> None:
    target = write_target(tmp_path / "t.gguf")
    if tied:
        target = rewrite(target, tensors={"output.weight": None})
    result = with_head(tmp_path, kind, target)
    assert result.drafter.own_head and not result.drafter.own_embedding
    theirs = read_header(target).tensors["token_embd.weight" if tied else "output.weight"]
    ours = read_header(result.file).tensors["output.weight"]
    assert TensorType(ours.type).name == kind.upper()
    rows = decode(theirs.type, stored(target, theirs), "the target's head")
    assert (stored(result.file, ours) == encode(ours.type, rows, load_libggml())).all()


def test_all_other_tensors_are_those_of_a_conversion_without_it(tmp_path: Path) -> None:
    target = write_target(tmp_path / "t.gguf")
    plain = convert(
        write_checkpoint(tmp_path / "d", t1_v2()), target=target, type="Q8_0", output=tmp_path / "p.gguf"
    )
    more = convert(tmp_path / "d", target=target, type="Q8_0", head="Q4_0", output=tmp_path / "m.gguf")
    assert more.tensors == plain.tensors + 1
    before, after = (read_header(result.file).tensors for result in (plain, more))
    assert set(after) - set(before) == {"output.weight"}
    for name in before:
        if len(before[name].ne) == 2:
            assert (stored(plain.file, before[name]) == stored(more.file, after[name])).all(), name


def test_a_dry_run_knows_the_size_of_the_head(tmp_path: Path) -> None:
    target, source = write_target(tmp_path / "t.gguf"), write_checkpoint(tmp_path / "d")
    options: dict[str, Any] = {"target": target, "head": "Q4_0", "output": tmp_path / "x.gguf"}
    planned = convert(source, dry_run=True, **options)
    assert not (tmp_path / "x.gguf").exists()
    assert (planned.bytes, planned.types) == ((made := convert(source, **options)).bytes, made.types)


def test_a_head_that_cannot_be_had_is_refused(tmp_path: Path) -> None:
    target, source = write_target(tmp_path / "t.gguf"), write_checkpoint(tmp_path / "d")
    place: dict[str, Any] = {"target": target, "output": tmp_path / "x.gguf"}
    with pytest.raises(DflashError, match="no tensor type 'Q4_K_M'"):
        convert(source, head="Q4_K_M", **place)
    entries = random_entries(t1(), "own_embedding", "own_head")
    own = write_checkpoint(tmp_path / "own", entries=entries)
    with pytest.raises(DflashError, match="a head of its own"):
        convert(own, head="Q8_0", **place)
    narrow = write_target(tmp_path / "narrow.gguf", hidden=64)
    thin = write_checkpoint(tmp_path / "thin", t1(hidden_size=64))
    with pytest.raises(DflashError, match="no multiple of its blocks of 256"):
        convert(thin, target=narrow, head="Q4_K", output=tmp_path / "x.gguf", type="BF16")
    assert not (tmp_path / "x.gguf").exists()
