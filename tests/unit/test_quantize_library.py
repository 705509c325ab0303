"""The bridge to libggml: right bytes, and no call that the library would answer with garbage or an abort."""

from __future__ import annotations

import threading
from pathlib import Path

import gguf.quants
import numpy as np
import pytest

from dflashcpp.errors import DflashError
from dflashcpp.gguf_file import TensorType, block_size, row_bytes
from dflashcpp.quantize import LibGgml, encode, libggml, load_libggml


@pytest.fixture(scope="module")
def library() -> LibGgml:
    """Any library that is installed; xllamacpp is a dependency of the tests."""
    path, origin = next(iter(libggml.find_libraries()))
    return LibGgml(path, origin)


def rows(count: int = 6, length: int = 512) -> np.ndarray:
    values = np.random.default_rng(1).standard_normal((count, length), dtype=np.float32)
    values[2] = 0
    values[3, ::7] *= 1000
    return values


@pytest.mark.parametrize(
    "name", ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "TQ1_0", "TQ2_0"]
)
def test_bytes_equal_those_of_the_gguf_package(library: LibGgml, name: str) -> None:
    values = rows()
    expected = gguf.quants.quantize(values, gguf.GGMLQuantizationType[name])
    assert encode(TensorType[name], values, library).tobytes() == expected.tobytes()
    assert library.quantize(TensorType[name], values).tobytes() == expected.tobytes()


@pytest.mark.parametrize(
    ("name", "worst"), [("Q6_K", 0.03), ("Q5_K", 0.05), ("Q4_K", 0.1), ("Q3_K", 0.2), ("Q2_K", 0.4)]
)
def test_k_quants_come_back_near_what_went_in(library: LibGgml, name: str, worst: float) -> None:
    values = np.random.default_rng(1).standard_normal((8, 1024), dtype=np.float32)
    packed = library.quantize(TensorType[name], values)
    back = gguf.quants.dequantize(packed, gguf.GGMLQuantizationType[name])
    assert np.sqrt(np.mean((back - values) ** 2)) < worst


@pytest.mark.parametrize(
    "value", [1.0, -1.0, 65504.0, 1e-8, 3.3895313892515355e38, 1.0 + 2**-8, 1.0 + 3 * 2**-8]
)
def test_floats_round_as_ggml_does(library: LibGgml, value: float) -> None:
    values = np.full((1, 32), value, np.float32)
    kinds = [TensorType.BF16] if value > 1e5 else [TensorType.BF16, TensorType.F16]
    for kind in kinds:
        assert encode(kind, values).tobytes() == library.quantize(kind, values).tobytes()


def test_a_row_that_is_no_multiple_of_the_block_is_refused(library: LibGgml) -> None:
    for kind in TensorType:
        if (
            library.supports(kind)
            and block_size(kind) > 1
            and kind.name not in {"IQ1_S", "IQ2_XXS", "IQ2_XS"}
        ):
            with pytest.raises(DflashError, match="a multiple of"):
                library.quantize(kind, rows(4, 520))


@pytest.mark.parametrize("name", ["IQ1_S", "IQ2_XXS", "IQ2_XS"])
def test_types_that_would_end_the_process_are_refused(library: LibGgml, name: str) -> None:
    with pytest.raises(DflashError, match="importance matrix"):
        library.quantize(TensorType[name], rows())


@pytest.mark.parametrize("name", ["Q8_1", "Q8_K", "I32", "F64"])
def test_types_that_cannot_be_written_are_refused(library: LibGgml, name: str) -> None:
    with pytest.raises(DflashError, match=f"cannot make {name}"):
        library.quantize(TensorType[name], rows())


def test_strided_rows_and_an_output_buffer_work(library: LibGgml) -> None:
    values = rows(8, 1024)[::2, :512]
    out = np.empty((4, row_bytes(TensorType.Q4_K, 512)), np.uint8)
    assert library.quantize(TensorType.Q4_K, values, out) is out
    assert out.tobytes() == library.quantize(TensorType.Q4_K, values.copy()).tobytes()
    with pytest.raises(ValueError, match="contiguous uint8"):
        library.quantize(TensorType.Q4_K, values, np.empty((4, 3), np.uint8))


def test_many_threads_get_the_bytes_of_one(library: LibGgml) -> None:
    values = rows(64, 512)
    expected = library.quantize(TensorType.IQ3_S, values)
    got = np.zeros_like(expected)

    def work(begin: int) -> None:
        got[begin : begin + 8] = library.quantize(TensorType.IQ3_S, values[begin : begin + 8])

    threads = [threading.Thread(target=work, args=(begin,)) for begin in range(0, 64, 8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert np.array_equal(got, expected)


def test_a_file_that_is_no_library_is_passed_over_with_a_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "libggml-base.so"
    broken.write_bytes(b"\x7fELF broken")
    good = next(iter(libggml.find_libraries()))
    monkeypatch.setattr(libggml, "find_libraries", lambda: iter([(broken, "a broken one"), good]))
    said: list[str] = []
    progress = libggml.Progress()
    monkeypatch.setattr(progress, "say", said.append)
    assert load_libggml(progress).path == good[0]
    assert "cannot be loaded" in said[0]


def test_a_library_of_something_else_is_named() -> None:
    import _ctypes

    with pytest.raises(DflashError, match="is no libggml-base"):
        LibGgml(_ctypes.__file__)


def test_with_no_library_at_all_ggml_base_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    from dflashcpp import llamacpp

    good = next(iter(libggml.find_libraries()))
    monkeypatch.setattr(libggml, "find_libraries", lambda: iter(()))
    monkeypatch.setattr(llamacpp, "build_ggml_base", lambda progress: good[0])
    assert load_libggml().origin == "built for this"
