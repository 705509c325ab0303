"""`Drafter`: what it derives, and reading it from GGUF headers that say anything."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dflashcpp.conversion import convert
from dflashcpp.drafter import Drafter, Rope
from dflashcpp.errors import DflashError
from dflashcpp.gguf_file import Header, Kv, ValueType, read_header
from dflashcpp.inspection import inspect_gguf
from dflashcpp.target import Target, tokenizer_for
from tests.support.checkpoints import t1_v2, tensor_count, write_checkpoint, write_target

ODD = [
    Kv.string("x"),
    Kv.string(""),
    Kv.u32(0),
    Kv.u32(2**32 - 1),
    Kv.f32(-1.0),
    Kv.f32(float("nan")),
    Kv.bool(True),
    Kv.array(ValueType.STRING, ["a", "b"]),
    Kv.array(ValueType.INT32, []),
    Kv.array(ValueType.INT32, [-5, 2]),
    Kv.array(ValueType.UINT64, [2**60]),
    Kv.scalar(ValueType.INT64, -1),
    Kv.scalar(ValueType.UINT64, 2**63),
]


@pytest.fixture(scope="module")
def headers(tmp_path_factory: pytest.TempPathFactory) -> tuple[Header, Header]:
    """A drafter's and its target's."""
    folder = tmp_path_factory.mktemp("h")
    target = write_target(folder / "t.gguf", weights=False)
    config = t1_v2(layer_types=["sliding_attention", "full_attention"], sliding_window=8, is_causal=...)
    source = write_checkpoint(folder / "d", config)
    return read_header(
        convert(source, target=target, type="BF16", output=folder / "x.gguf").file
    ), read_header(target)


def changed(header: Header, data: Any) -> Header:
    """`header` with some keys missing or of another kind, and perhaps a tensor of another shape."""
    keys, tensors = dict(header.kv), dict(header.tensors)
    for key in data.draw(st.lists(st.sampled_from(sorted(keys)), min_size=1, max_size=3, unique=True)):
        value = data.draw(st.sampled_from([None, *ODD]))
        if value is None:
            del keys[key]
        else:
            keys[key] = value
    name = data.draw(st.sampled_from([None, *sorted(tensors)]))
    if name is not None:
        tensors[name] = replace(tensors[name], ne=data.draw(st.sampled_from([(1,), (2, 2, 2, 2), (0, 5)])))
    return replace(header, kv=keys, tensors=tensors)


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_header_of_a_drafter_is_described_or_refused(headers: tuple[Header, Header], data: Any) -> None:
    try:
        inspect_gguf(changed(headers[0], data))
    except DflashError as error:
        assert "\n" not in error.message


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_header_of_a_target_is_taken_or_refused(headers: tuple[Header, Header], data: Any) -> None:
    try:
        target = Target.from_header(changed(headers[1], data))
        assert tokenizer_for(target, target.tokens + 3)["tokenizer.ggml.tokens"].count == target.tokens + 3
    except DflashError as error:
        assert "\n" not in error.message


def test_a_missing_key_is_named_with_the_file(headers: tuple[Header, Header]) -> None:
    header = replace(headers[0], kv={k: v for k, v in headers[0].kv.items() if k != "dflash.rope.freq_base"})
    with pytest.raises(DflashError, match=r"x\.gguf.*dflash\.rope\.freq_base"):
        Drafter.from_gguf(header)


def test_a_mixed_drafter_keeps_both_patterns(headers: tuple[Header, Header]) -> None:
    drafter = Drafter.from_gguf(headers[0])
    assert (drafter.sliding, drafter.causal, drafter.window) == ((True, False), (True, False), 8)
    assert (drafter.max_draft, drafter.target_layer_ids, drafter.conv_groups) == (7, [1, 3], 16)
    assert tensor_count(drafter) == len(headers[0].tensors) == 6 + 15 * 2


def test_only_yarn_stretches_the_attention() -> None:
    assert Rope(theta=1e4).attention_factor == 1
    assert Rope(theta=1e4, type="yarn", factor=8.0).attention_factor == pytest.approx(1 + 0.1 * math.log(8))
    assert Rope(theta=1e4, type="yarn", factor=8.0, attn_factor=1.5).attention_factor == 1.5


def test_without_llama3_there_are_no_divisors() -> None:
    assert Rope(theta=1e4, type="yarn", factor=8.0).frequency_divisors(64) is None
