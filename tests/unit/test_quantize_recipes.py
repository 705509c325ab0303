"""Which tensor gets which type, from shapes alone; sizes of the published drafters to the byte."""

from __future__ import annotations

import pytest

from dflashcpp.errors import DflashError, UsageError
from dflashcpp.gguf_file import TensorInfo, TensorType
from dflashcpp.quantize import (
    check_name,
    choose_types,
    mix_of,
    needs_libggml,
    parse_overrides,
    recipe,
    recipe_names,
)
from tests.support.gguf_drafters import MUSE, QWEN38, Shape, tensors

NAMES = [
    "F32",
    "F16",
    "BF16",
    "Q8_0",
    "Q6_K",
    "Q5_K_M",
    "Q5_K_S",
    "Q4_K_M",
    "Q4_K_S",
    "Q3_K_M",
    "Q2_K",
    "IQ4_XS",
    "IQ4_NL",
    "Q4_0",
    "Q5_0",
]


def types(kind: str, shape: Shape, **options: object) -> dict[str, str]:
    choices = choose_types(kind, tensors(shape), **options)  # type: ignore[arg-type]
    return {name: choice.type.name for name, choice in choices.items()}


@pytest.mark.parametrize(
    ("shape", "kind", "mib", "counts"),
    [
        (MUSE, "Q4_K_M", 1556.948, {"Q4_K": 45, "Q6_K": 4, "F32": 32}),
        (MUSE.but(rank=None), "Q4_K_M", 1440.110, {"Q4_K": 32, "Q6_K": 4, "F32": 22}),
        (MUSE.but(rank=None), "META_KQUANT", 1543.171, {"Q4_K": 26, "Q6_K": 10, "F32": 22}),
        (QWEN38, "Q4_K_M", 1079.614, {"Q4_K": 45, "Q6_K": 4, "F32": 32}),
    ],
)
def test_the_published_drafters_get_their_published_sizes(
    shape: Shape, kind: str, mib: float, counts: dict
) -> None:
    mix = mix_of(recipe(kind), choose_types(kind, tensors(shape)).values())
    assert round(mix.mib, 3) == mib
    assert mix.counts == counts
    assert mix.covered == 1
    assert check_name(recipe(kind), mix) == []


def test_bf16_of_the_published_drafters_has_the_published_bytes() -> None:
    for shape, size in ((MUSE, 5_544_319_488), (QWEN38, 3_848_808_960), (MUSE.but(rank=None), 5_111_970_304)):
        as_published = [TensorInfo(t.name, t.ne, TensorType.BF16, 0, 0) for t in tensors(shape)]
        mix = mix_of(recipe("BF16"), choose_types("BF16", as_published).values())
        assert mix.bytes == size


@pytest.mark.parametrize("name", [*NAMES, "q4_k_m", "Iq4_Nl", "bf16", "kquant", "meta-kquant"])
def test_every_name_works_in_any_case(name: str) -> None:
    assert recipe(name).name in recipe_names()


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(DflashError, match="unknown type 'Q9_K'") as caught:
        recipe("Q9_K")
    assert "Q4_K_M" in (caught.value.hint or "")


@pytest.mark.parametrize(
    ("layers", "more"),
    [(1, {0}), (5, {2, 4}), (6, {2, 5}), (8, {0, 3, 6, 7}), (16, {0, 1, 4, 7, 10, 13, 14, 15})],
)
def test_q4_k_m_gives_more_bits_to_the_layers_llama_quantize_does(layers: int, more: set[int]) -> None:
    chosen = types("Q4_K_M", Shape(layers=layers))
    for part in ("attn_v", "ffn_down"):
        assert {i for i in range(layers) if chosen[f"blk.{i}.{part}.weight"] == "Q6_K"} == more


def test_norms_convolution_bases_and_integers_keep_their_type_under_every_recipe() -> None:
    listed = [*tensors(MUSE), TensorInfo("d2t", (128,), TensorType.I64, 0, 0)]
    for name in recipe_names():
        for choice in choose_types(name, listed).values():
            if "norm" in choice.name or "conv_base" in choice.name or choice.name == "d2t":
                assert not choice.quantisable
                assert choice.type in (TensorType.F32, TensorType.I64)


@pytest.mark.parametrize(
    ("kind", "row", "expected"),
    [
        ("Q4_K_M", 288, "Q5_0"),
        ("Q6_K", 288, "Q8_0"),
        ("Q5_K_S", 288, "Q5_1"),
        ("Q2_K", 288, "Q4_0"),
        ("IQ4_XS", 288, "IQ4_NL"),
        ("Q8_0", 272, "F16"),
        ("Q4_K_M", 272, "F16"),
        ("Q4_0", 272, "F16"),
    ],
)
def test_rows_that_do_not_fit_fall_back_with_the_reason(kind: str, row: int, expected: str) -> None:
    chosen = choose_types(kind, tensors(Shape(hidden=row, taps=1)))["fc.weight"]
    assert chosen.type.name == expected
    assert chosen.fallback == f"rows of {row} are no multiple of {32 if kind[-1] == '0' else 256}"


def test_an_own_embedding_is_the_head_only_when_there_is_no_head() -> None:
    assert types("Q4_K_M", Shape(embedding=True))["token_embd.weight"] == "Q6_K"
    both = types("Q4_K_M", Shape(embedding=True, head=True))
    assert (both["token_embd.weight"], both["output.weight"]) == ("Q4_K", "Q6_K")


def test_grouped_heads_decide_attn_v_of_q2_k_and_are_read_off_the_shapes() -> None:
    assert types("Q2_K", Shape(heads=8, kv_heads=2))["blk.0.attn_v.weight"] == "Q4_K"
    assert types("Q2_K", Shape(heads=4, kv_heads=2))["blk.0.attn_v.weight"] == "Q3_K"
    assert types("Q2_K", Shape(heads=4, kv_heads=2), gqa=4)["blk.0.attn_v.weight"] == "Q4_K"


def test_an_override_is_not_counted_among_the_layers() -> None:
    shape = Shape(layers=8)
    shifted = types("Q4_K_M", shape, overrides=parse_overrides([r"blk\.0\.attn_v=Q8_0"]))
    more = {i for i in range(8) if shifted[f"blk.{i}.attn_v.weight"] == "Q6_K"}
    assert more == {1, 4, 7}  # layer 1 is now counted as 0, and so on, as in llama-quantize


def test_keep_selector_touches_the_selector_only_and_tensor_type_comes_first() -> None:
    shape = Shape(rank=256)
    plain = types("Q4_K_M", shape)
    kept = types("Q4_K_M", shape, overrides=parse_overrides([], keep_selector="bf16"))
    assert {n for n in plain if plain[n] != kept[n]} == {n for n in plain if n.startswith("selector_")}
    both = parse_overrides(["selector_hidden=Q8_0"], keep_selector="F16")
    assert types("Q4_K_M", shape, overrides=both)["selector_hidden.weight"] == "Q8_0"
    assert types("Q4_K_M", shape, overrides=both)["selector_successor.weight"] == "F16"


def test_overrides_work_on_a_float_recipe_too() -> None:
    chosen = types("BF16", Shape(), overrides=parse_overrides(["ffn=Q8_0"]))
    assert chosen["blk.0.ffn_up.weight"] == "Q8_0"
    assert chosen["fc.weight"] == "BF16"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("ffn", "expected NAME=TYPE"),
        ("=Q8_0", "expected NAME=TYPE"),
        ("ffn=", "expected NAME=TYPE"),
        ("ffn=Q4_K_M", "no tensor type 'Q4_K_M'"),
        ("ffn=I32", "no tensor type 'I32'"),
        ("ffn=Q8_K", "no tensor type 'Q8_K'"),
        ("ffn(=Q8_0", "no regular expression"),
        ("(?<!a)b=Q8_0", "not supported"),
        ("(?i)ffn=Q8_0", "not supported"),
    ],
)
def test_a_wrong_override_is_a_usage_error(text: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        parse_overrides([text])


def test_an_override_that_matches_nothing_or_only_norms_is_refused() -> None:
    for text in ("token_embd=Q8_0", "attn_norm=Q8_0"):
        with pytest.raises(DflashError, match="no tensor that can be quantised"):
            types("Q4_K_M", Shape(), overrides=parse_overrides([text]))


@pytest.mark.parametrize("name", ["IQ1_S", "iq2_xxs", "IQ3_XS", "Q2_K_S"])
def test_types_that_need_an_importance_matrix_are_refused_by_name(name: str) -> None:
    with pytest.raises(DflashError, match=f"{name.upper()} needs an importance matrix"):
        recipe(name)


def test_an_override_to_such_a_type_is_refused_with_the_tensor() -> None:
    with pytest.raises(
        DflashError, match=r"fc\.weight cannot be IQ2_XS: that type needs an importance matrix"
    ):
        types("Q4_K_M", Shape(), overrides=parse_overrides(["^fc=IQ2_XS"]))


def test_a_type_without_fallback_is_refused_with_the_tensor() -> None:
    with pytest.raises(DflashError, match=r"fc\.weight cannot be Q1_0: rows of 320 are no multiple of 128"):
        choose_types("Q1_0", tensors(Shape(hidden=320, taps=1)))


def test_a_name_that_covers_little_is_warned_about_and_one_that_covers_nothing_refused() -> None:
    little = Shape(hidden=320, ffn=256, heads=5, taps=1)
    mix = mix_of(recipe("Q4_K_M"), choose_types("Q4_K_M", tensors(little)).values())
    assert 0 < mix.covered < 0.5
    (warning,) = check_name(recipe("Q4_K_M"), mix)
    assert warning.startswith(f"only {100 * mix.covered:.0f} % of the weights are Q4_K_M")
    nothing = Shape(hidden=192, ffn=320, heads=3, kv_heads=1)
    mix = mix_of(recipe("Q4_K_M"), choose_types("Q4_K_M", tensors(nothing)).values())
    with pytest.raises(DflashError, match="no tensor can be Q4_K_M: rows of 384 are no multiple of 256"):
        check_name(recipe("Q4_K_M"), mix)
    for kind in ("Q8_0", "Q4_0", "BF16", "F32"):
        fits = mix_of(recipe(kind), choose_types(kind, tensors(nothing)).values())
        assert check_name(recipe(kind), fits) == []


def test_only_quantised_types_need_libggml() -> None:
    assert not needs_libggml(choose_types("BF16", tensors(Shape())).values())
    assert needs_libggml(choose_types("Q8_0", tensors(Shape())).values())
