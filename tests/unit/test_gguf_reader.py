"""GGUF headers: what is in them, and what is said of files that are not what they should be."""

from __future__ import annotations

import struct
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dflashcpp.errors import DflashError
from dflashcpp.gguf_file import GgufWriter, Kv, TensorType, ValueType, read_header


def string(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def pair(key: bytes, kind: int, value: bytes) -> bytes:
    return string(key) + struct.pack("<I", kind) + value


def tensor(name: bytes, ne: list[int], kind: int, offset: int) -> bytes:
    return string(name) + struct.pack(f"<I{len(ne)}QIQ", len(ne), *ne, kind, offset)


def gguf(pairs: list[bytes], tensors: list[bytes], data: int = 0, version: int = 3) -> bytes:
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(pairs)) + b"".join(pairs + tensors)
    return head.ljust(-(-len(head) // 32) * 32, b"\0") + bytes(data)


ARCH = pair(b"general.architecture", 8, string(b"dflash"))
GOOD = gguf([ARCH], [tensor(b"a.weight", [4, 2], 0, 0), tensor(b"b.weight", [64], 8, 32)], 32 + 68)


def refused(tmp_path: Path, data: bytes) -> str:
    path = tmp_path / "bad file.gguf"
    path.write_bytes(data)
    with pytest.raises(DflashError) as caught:
        read_header(path)
    assert str(path) in caught.value.message
    return caught.value.message.removeprefix(str(path))


def test_a_header_written_by_hand_is_read_completely(tmp_path: Path) -> None:
    every = {
        0: (struct.pack("<B", 200), 200),
        1: (struct.pack("<b", -3), -3),
        2: (struct.pack("<H", 60000), 60000),
        3: (struct.pack("<h", -300), -300),
        4: (struct.pack("<I", 2**32 - 1), 2**32 - 1),
        5: (struct.pack("<i", -(2**31)), -(2**31)),
        6: (struct.pack("<f", 0.5), 0.5),
        7: (b"\1", True),
        8: (string("naïve".encode()), "naïve"),
        10: (struct.pack("<Q", 2**63), 2**63),
        11: (struct.pack("<q", -1), -1),
        12: (struct.pack("<d", 0.1), 0.1),
    }
    pairs = [pair(b"k%d" % kind, kind, raw) for kind, (raw, _) in every.items()]
    texts = struct.pack("<IQ", 8, 3) + string(b"a") + string(b"") + string(b"\xff")
    pairs.append(pair(b"texts", 9, texts))
    pairs.append(pair(b"flags", 9, struct.pack("<IQ3B", 7, 3, 1, 0, 1)))
    path = tmp_path / "all.gguf"
    path.write_bytes(gguf(pairs, [tensor(b"a.weight", [4, 2], 0, 0)], 32))
    header = read_header(path)
    assert {kind: header.get(f"k{kind}") for kind in every} == {k: value for k, (_, value) in every.items()}
    assert header.get("texts") == ["a", "", "�"]
    assert header.kv["texts"].raw == texts[12:]
    assert header.get("flags") == [True, False, True]
    info = header.tensors["a.weight"]
    assert (info.ne, info.type, info.offset, info.nbytes) == ((4, 2), TensorType.F32, 0, 32)
    assert header.data_start % 32 == 0
    assert header.size == path.stat().st_size


def test_a_missing_key_names_file_and_key_unless_there_is_a_default(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(GOOD)
    header = read_header(path)
    assert header.get("dflash.block_size", None) is None
    with pytest.raises(DflashError, match=r"x\.gguf: the metadata key dflash\.block_size is missing"):
        header.get("dflash.block_size")


def test_a_file_that_is_not_there_a_folder_and_an_empty_file_are_told_apart(tmp_path: Path) -> None:
    with pytest.raises(DflashError, match=r"nowhere\.gguf does not exist"):
        read_header(tmp_path / "nowhere.gguf")
    with pytest.raises(DflashError, match="is a folder"):
        read_header(tmp_path)
    assert "the file is empty" in refused(tmp_path, b"")


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 3\n", "Git LFS pointer"),
        (b"<!DOCTYPE html><html>", "web page"),
        (b"PK\x03\x04aaaaaaaa", "zip archive"),
        (struct.pack("<Q", 20) + b'{"a":{}}            ', "safetensors"),
        (b"NOPE", "begins with b'NOPE'"),
        (b"GG", "begins with b'GG'"),
        (b"GGUF", "cut off"),
        (gguf([ARCH], [], version=1), "version 1"),
        (gguf([ARCH], [], version=9), "version 9"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
    ],
)
def test_what_is_no_readable_gguf_is_said_in_words(tmp_path: Path, data: bytes, words: str) -> None:
    assert words in refused(tmp_path, data)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (gguf([ARCH, ARCH], []), "general.architecture stands in it twice"),
        (gguf([pair(b"", 4, bytes(4))], []), "metadata key 0 is empty"),
        (gguf([pair(b"\xff\xfe", 4, bytes(4))], []), "is not UTF-8"),
        (gguf([pair(b"k", 77, bytes(4))], []), "type number 77"),
        (gguf([pair(b"k", 9, struct.pack("<IQ", 9, 1))], []), "type number 9"),
        (gguf([pair(b"k", 9, struct.pack("<IQ", 0, 2**63))], []), "cut off"),
        (gguf([pair(b"k", 9, struct.pack("<IQ", 8, 2**60))], []), "cut off"),
        (gguf([pair(b"k", 8, struct.pack("<Q", 2**64 - 1))], []), "cut off"),
        (gguf([pair(b"general.alignment", 4, struct.pack("<I", 24))], []), "power of two"),
        (gguf([pair(b"general.alignment", 4, bytes(4))], []), "power of two"),
        (gguf([pair(b"general.alignment", 10, bytes(8))], []), "must be UINT32"),
        (gguf([], [tensor(b"a", [32], 8, 0)] * 2, 100), "tensor a stands in it twice"),
        (gguf([], [tensor(b"a", [32], 4, 0)], 100), "Q4_2, which llama.cpp has removed"),
        (gguf([], [tensor(b"a", [32], 139, 0)], 100), "type number 139"),
        (gguf([], [tensor(b"a", [33], 8, 0)], 100), "rows of 33"),
        (gguf([], [tensor(b"a", [32], 0, 8)], 200), "not aligned"),
        (gguf([], [tensor(b"a", [32], 0, 32)], 200), "starts at offset 32 instead of 0"),
        (gguf([], [tensor(b"a", [], 0, 0)], 100), "0 dimensions"),
        (gguf([], [tensor(b"a", [1] * 5, 0, 0)], 100), "5 dimensions"),
        (gguf([], [tensor(b"a", [2**62, 2**62], 0, 0)], 100), "impossible shape"),
        (gguf([], [tensor(b"a" * 64, [32], 0, 0)], 200), "64 bytes or more"),
        (b"GGUF" + struct.pack("<IQQ", 3, 2**60, 0) + bytes(100), "tensors and 0 metadata keys"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**63) + bytes(100), "metadata keys, more than"),
    ],
)
def test_each_broken_length_type_and_offset_is_named(tmp_path: Path, data: bytes, words: str) -> None:
    assert words in refused(tmp_path, data)


def test_cut_off_at_every_single_byte_it_is_refused_and_says_so(tmp_path: Path) -> None:
    for length in range(len(GOOD)):
        assert refused(tmp_path, GOOD[:length])
    assert "tensor b.weight ends at byte" in refused(tmp_path, GOOD[:-1])


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    flips=st.lists(st.tuples(st.integers(4, len(GOOD) - 1), st.integers(0, 255)), max_size=6),
    tail=st.binary(),
)
def test_any_damage_gives_a_header_or_one_sentence(tmp_path: Path, flips: list, tail: bytes) -> None:
    data = bytearray(GOOD)
    for at, value in flips:
        data[at] = value
    path = tmp_path / "x.gguf"
    path.write_bytes(bytes(data) + tail)
    try:
        header = read_header(path)
        [kv.value for kv in header.kv.values()]
    except DflashError as error:
        assert str(path) in error.message


def test_a_vocabulary_of_250_thousand_tokens_and_merges_is_read_in_a_moment(tmp_path: Path) -> None:
    path = tmp_path / "large.gguf"
    with GgufWriter(path) as out:
        out.add("tokenizer.ggml.tokens", Kv.array(ValueType.STRING, [f"token{i}" for i in range(250_000)]))
        out.add("tokenizer.ggml.merges", Kv.array(ValueType.STRING, [f"a b{i}" for i in range(250_000)]))
        out.add("tokenizer.ggml.scores", Kv.array(ValueType.FLOAT32, [0.5] * 250_000))
        out.declare("a", (4,), TensorType.F32)
        out.begin()
        out.write("a", 0, bytes(16))
        out.commit()
    began = time.process_time()
    header = read_header(path)
    assert time.process_time() - began < 3  # far above what it takes; a quadratic reader needs minutes
    assert header.kv["tokenizer.ggml.tokens"].count == 250_000
    assert header.get("tokenizer.ggml.tokens")[249_999] == "token249999"
