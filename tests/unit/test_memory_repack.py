"""The second copy of weights that llama.cpp makes on the CPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from dflashcpp.gguf_file import TensorType
from dflashcpp.memory import planning, repack, sources
from dflashcpp.memory.settings import Settings
from tests.support.gguf_shapes import TARGETS, write_target

AVX512 = frozenset({"avx2", "avx512f"})
# CPU_Mapped and CPU_REPACK of llama-server 0c1e570 on a processor with AVX-512, two layers each.
TOLD = {
    ("qwen3-4b", TensorType.Q4_K): (276.91, 316.93),
    ("qwen3-8b", TensorType.Q4_0): (793.77, 540.84),
    ("qwen3-30b-a3b", TensorType.Q2_K): (397.60, 487.18),
    ("qwen3.5-27b", TensorType.Q4_K): (1632.19, 1093.18),
    ("qwen3-4b", TensorType.Q8_0): (598.70, 0.0),
}


@pytest.mark.parametrize(("name", "kind"), TOLD)
def test_mapped_and_copied_weights_are_the_engines(name: str, kind: TensorType, tmp_path: Path) -> None:
    target = replace(TARGETS[name], weights=kind, layers=2)
    model = sources.from_gguf(write_target(tmp_path / "t.gguf", target))
    sizes = [size / 2**20 for size in repack.split(model.tensors, model.tied, AVX512)]
    assert sizes == pytest.approx(TOLD[name, kind], abs=0.006)


def test_what_is_copied_depends_on_the_processor_and_on_the_number_of_rows() -> None:
    assert repack.is_repacked(TensorType.Q4_K, (256, 64), frozenset({"avx2"}))
    assert not repack.is_repacked(TensorType.Q4_K, (256, 63), frozenset({"avx2"}))
    assert not repack.is_repacked(TensorType.Q2_K, (256, 64), frozenset({"avx2"}))
    assert not repack.is_repacked(TensorType.Q4_K, (256, 64), frozenset())
    assert repack.is_repacked(TensorType.Q8_0, (256, 64), frozenset({"asimddp"}))
    assert not repack.is_repacked(TensorType.F32, (256,), AVX512)


def test_without_repacking_the_weights_are_the_files(tmp_path: Path) -> None:
    model = sources.from_gguf(write_target(tmp_path / "t.gguf", replace(TARGETS["qwen3-4b"], layers=2)))
    lines = planning.make_lines(model, None, Settings(context=256, on_device=False, repack=False))
    (line,) = [line for line in lines if line.kind == "weights"]
    assert line.mib * 2**20 == sum(tensor.nbytes for tensor in model.tensors.values())
