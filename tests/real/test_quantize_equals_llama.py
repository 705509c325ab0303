"""Our quantising against llama-quantize itself: same types and same bytes, tensor by tensor."""

from __future__ import annotations

import itertools
import os
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from dflashcpp.errors import DflashError
from dflashcpp.gguf_file import Header, TensorInfo, TensorType, read_header
from dflashcpp.quantize import (
    LibGgml,
    choose_types,
    encode,
    load_libggml,
    parse_overrides,
    recipe,
    recipe_names,
)
from tests.support.gguf_drafters import Shape, tensor_data, write_drafter, write_real_drafter

pytestmark = [pytest.mark.real, pytest.mark.slow]

OURS_ONLY = {"META_KQUANT"}
NEEDS_IMATRIX = {"IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS"}
RECIPES = [name for name in recipe_names() if name not in OURS_ONLY]
V1 = Shape(hidden=256, ffn=256, heads=4, kv_heads=1, layers=3)
V2 = Shape(hidden=256, ffn=512, layers=2, rank=256, vocab=256)
UNEVEN = Shape(hidden=320, ffn=256, heads=5, kv_heads=1, layers=2, rank=128, taps=1, vocab=256)
TINY_ROWS = Shape(hidden=256, ffn=272, heads=3, kv_heads=3, head_dim=16, layers=1, rank=32, vocab=256)
SHAPES = {
    "v1": V1,
    "v2": V2,
    "v2-rows-of-320": UNEVEN,
    "v2-rows-of-48": TINY_ROWS,
    "own-embedding": V1.but(embedding=True, layers=1),
    "own-embedding-and-head": V1.but(embedding=True, head=True, layers=1),
    "own-head-rows-of-320": UNEVEN.but(rank=None, embedding=True, head=True, layers=1),
}


@pytest.fixture(scope="session")
def llama_quantize() -> Path:
    """llama-quantize of our own build, or of DFLASHCPP_TEST_LLAMA_BIN."""
    given = os.environ.get("DFLASHCPP_TEST_LLAMA_BIN")
    if given:
        return Path(given) / "llama-quantize"
    from dflashcpp.llamacpp import build, find_build

    return (find_build() or build()).binary("llama-quantize")


@pytest.fixture(scope="session")
def library(llama_quantize: Path) -> LibGgml:
    return LibGgml(llama_quantize.parent / "libggml-base.so", "the build under test")


def run_quantize(tool: Path, source: Path, target: Path, kind: str, options: Sequence[str] = ()) -> str:
    done = subprocess.run(
        [tool, *options, source, target, kind, "2"], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def quantise_ours(source: Path, header: Header, kind: str, library: LibGgml, **options: object) -> dict:
    """name -> (type, bytes) by our own policy and path."""
    choices = choose_types(kind, header.tensors.values(), **options)  # type: ignore[arg-type]
    result = {}
    for name, info in header.tensors.items():
        raw = tensor_data(source, header.data_start, info)
        choice = choices[name]
        if choice.type == info.type:
            result[name] = (choice.type, raw)
        else:
            result[name] = (choice.type, encode(choice.type, floats(info, raw), library).tobytes())
    return result


def floats(info: TensorInfo, raw: bytes) -> np.ndarray:
    if info.type == TensorType.BF16:
        bits = np.frombuffer(raw, np.uint16).astype(np.uint32) << 16
        return bits.view(np.float32).reshape(-1, info.ne[0])
    return np.frombuffer(raw, np.float32).reshape(-1, info.ne[0])


def assert_same(ours: dict, theirs: Path) -> None:
    header = read_header(theirs)
    assert set(ours) == set(header.tensors)
    types = {name: TensorType(kind).name for name, (kind, _) in ours.items()}
    assert types == {name: TensorType(info.type).name for name, info in header.tensors.items()}
    different = [
        name
        for name, info in header.tensors.items()
        if ours[name][1] != tensor_data(theirs, header.data_start, info)
    ]
    assert different == []


@pytest.mark.parametrize("shape", SHAPES)
def test_every_recipe_gives_the_types_and_bytes_of_llama_quantize(
    shape: str, llama_quantize: Path, library: LibGgml, tmp_path: Path
) -> None:
    source = write_drafter(tmp_path / "in.gguf", SHAPES[shape])
    for kind in RECIPES:
        check_recipe(source, tmp_path / "out.gguf", kind, llama_quantize, library)


def check_recipe(source: Path, target: Path, kind: str, tool: Path, library: LibGgml) -> None:
    header = read_header(source)
    if kind == "Q1_0" and has_rows_off(header, 128):
        with pytest.raises(DflashError, match="no type to fall back to"):
            choose_types(kind, header.tensors.values())
        return  # llama-quantize gives up on them as well
    run_quantize(tool, source, target, kind)
    assert_same(quantise_ours(source, header, kind, library), target)
    assert read_header(target).get("general.file_type") == recipe(kind).file_type


def has_rows_off(header: Header, block: int) -> bool:
    return any(info.ne[0] % block for info in header.tensors.values() if info.type != TensorType.F32)


def test_a_source_in_f32_is_quantised_like_llama_quantize_does(
    llama_quantize: Path, library: LibGgml, tmp_path: Path
) -> None:
    source = write_drafter(tmp_path / "in.gguf", V2, TensorType.F32)
    for kind in ("Q4_K_M", "Q5_K_S", "Q8_0", "BF16", "F16"):
        check_recipe(source, tmp_path / "out.gguf", kind, llama_quantize, library)


def test_the_real_drafter_is_quantised_like_llama_quantize_does(
    llama_quantize: Path, library: LibGgml, tmp_path: Path
) -> None:
    source = write_real_drafter(tmp_path / "in.gguf")
    for kind in ("Q8_0", "Q4_K_M", "Q5_K_M", "Q3_K_M", "Q2_K", "IQ4_XS", "Q4_0"):
        check_recipe(source, tmp_path / "out.gguf", kind, llama_quantize, library)


@pytest.mark.parametrize("layers", [1, 2, 4, 5, 6, 7, 8, 9, 12, 16, 17, 24, 32])
def test_any_number_of_layers_gets_the_types_of_llama_quantize(
    layers: int, llama_quantize: Path, tmp_path: Path
) -> None:
    shape = Shape(hidden=256, ffn=256, heads=1, kv_heads=1, head_dim=256, layers=layers, taps=1)
    source = write_drafter(tmp_path / "in.gguf", shape)
    tensors = read_header(source).tensors
    for kind in RECIPES:
        log = run_quantize(llama_quantize, source, tmp_path / "out.gguf", kind, ["--dry-run"])
        rows = re.findall(r"\] (\S+) +- \[.*type = +(\S+), size = .*MiB(?: \((\w+)\))?", log)
        theirs = {name: (new or old).upper() for name, old, new in rows}
        assert theirs == {
            name: choice.type.name for name, choice in choose_types(kind, tensors.values()).items()
        }


@pytest.mark.parametrize(
    "options",
    [
        ["--pure"],
        ["--tensor-type", "ffn_down=Q8_0"],
        ["--tensor-type", r"blk\.[02]\.attn_v=Q5_K"],
        [
            "--tensor-type",
            "BLK.(0|1).FFN=q3_k",
            "--tensor-type",
            "ffn=bf16",
            "--tensor-type",
            "^selector_=f16",
        ],
        ["--tensor-type", r"blk\.[[:digit:]]\.attn_(q|k)\.weight$=iq4_nl"],
        ["--pure", "--tensor-type", "fc=Q6_K"],
    ],
    ids=lambda options: " ".join(options),
)
def test_overrides_and_pure_mean_what_they_mean_to_llama_quantize(
    options: list[str], llama_quantize: Path, library: LibGgml, tmp_path: Path
) -> None:
    source = write_drafter(tmp_path / "in.gguf", V2.but(layers=8, ffn=256))
    texts = [text for flag, text in itertools.pairwise(options) if flag == "--tensor-type"]
    for kind in ("Q4_K_M", "Q4_K_S", "Q3_K_M"):
        target = tmp_path / "out.gguf"
        run_quantize(llama_quantize, source, target, kind, options)
        ours = quantise_ours(
            source,
            read_header(source),
            kind,
            library,
            overrides=parse_overrides(texts),
            pure="--pure" in options,
        )
        assert_same(ours, target)


def test_what_llama_quantize_refuses_for_lack_of_an_imatrix_we_refuse_by_name(
    llama_quantize: Path, tmp_path: Path
) -> None:
    source = write_drafter(tmp_path / "in.gguf", V1.but(layers=1), TensorType.BF16)
    for kind in ("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ2_M", "IQ3_XXS", "IQ3_XS", "Q2_K_S"):
        done = subprocess.run(
            [llama_quantize, source, tmp_path / "out.gguf", kind], capture_output=True, text=True, check=False
        )
        assert done.returncode != 0
        assert "imatrix" in done.stdout + done.stderr
        with pytest.raises(DflashError, match=f"{kind} needs an importance matrix"):
            recipe(kind)


def test_every_type_llama_quantize_offers_is_a_recipe_or_is_refused_for_its_imatrix(
    llama_quantize: Path,
) -> None:
    usage = subprocess.run([llama_quantize, "--help"], capture_output=True, text=True, check=False).stdout
    offered = re.findall(r"^ +(\d+) +or +(\S+) +:", usage, re.MULTILINE)
    assert len(offered) > 30
    for number, name in offered:
        try:
            assert recipe(name).file_type == int(number)
        except DflashError as error:
            assert "importance matrix" in error.message


def hard_inputs() -> dict[str, np.ndarray]:
    """Rows that reach the branches of the scale searches: zeros, constants, outliers, denormals, any bits."""
    random = np.random.default_rng(5)
    odd = random.standard_normal((64, 512), dtype=np.float32)
    odd[::3] = 0
    odd[1, :256], odd[4], odd[7, ::2] = 1, -2.5, 1e-38
    odd[8] *= 1e-40
    odd[10] *= 1e30
    odd[13, 5] = 1e6
    odd[14], odd[16], odd[17] = np.abs(odd[14]), -np.abs(odd[16]), np.round(odd[17])
    odd[19] = 1e-16 * np.sign(odd[19])
    bits = (random.integers(0, 2**16, (64, 512)).astype(np.uint32) << 16).view(np.float32)
    return {
        "normal": random.standard_normal((12, 1024), dtype=np.float32),
        "all of one sign": random.random((64, 512), dtype=np.float32) + 3,
        "heavy tails": random.standard_t(1.5, (128, 512)).astype(np.float32),
        "odd": odd,
        "any bf16 bits": np.where(np.abs(bits) < 1e15, bits, 0).astype(np.float32),
    }


def test_the_library_of_xllamacpp_gives_the_same_bytes_as_our_own_build(library: LibGgml) -> None:
    """An independent build of another llama.cpp: our patched searches must not change a bit."""
    xllamacpp = pytest.importorskip("xllamacpp")
    other = LibGgml(next(Path(xllamacpp.__file__).parent.glob("xllamacpp*.so")), "xllamacpp")
    kinds = [k for k in TensorType if library.supports(k) and other.supports(k)]
    kinds = [k for k in kinds if k.name not in NEEDS_IMATRIX]
    assert len(kinds) > 15
    for name, rows in hard_inputs().items():
        for kind in kinds if name == "normal" else ("Q8_0", "Q4_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"):
            kind = TensorType[kind] if isinstance(kind, str) else kind
            same = library.quantize(kind, rows).tobytes() == other.quantize(kind, rows).tobytes()
            assert same, f"{kind.name} of {name}"


def test_a_library_is_found_or_built() -> None:
    found = load_libggml()
    rows = np.ones((2, 256), np.float32)
    assert found.quantize(TensorType.Q8_0, rows).shape == (2, 272)
