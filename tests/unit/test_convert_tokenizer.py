"""Targets given as Hugging Face folders: tokenizer.json, tokenizer.model, neither."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from dflashcpp.conversion import convert
from dflashcpp.errors import DflashError
from dflashcpp.gguf_file import read_header
from dflashcpp.knowledge import table
from dflashcpp.sentencepiece import read_pieces
from tests.support.checkpoints import t1, write_checkpoint

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 256,
    "num_hidden_layers": 6,
    "vocab_size": 512,
    "bos_token_id": None,
    "eos_token_id": [301, 302],
}
QWEN2 = next(row for row in table("convert/targets.toml")["pre"] if row["name"] == "qwen2")["steps"][0]


def tokenizer_json(**edits: Any) -> dict[str, Any]:
    """A byte-level BPE tokenizer as Qwen's are: 300 words, merges, added tokens."""
    vocab = {f"w{number}": number for number in range(300)}
    split = {"type": "Split", "pattern": {"Regex": QWEN2.removeprefix("split:")}, "behavior": "Isolated"}
    plain = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    return {
        "model": {"type": "BPE", "vocab": vocab, "merges": [["w 1", "w2"], ["a", "b"]]},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, plain]},
        "added_tokens": [
            {"id": 300, "content": "<tool>", "special": False},
            {"id": 301, "content": "<|im_end|>", "special": True},
            {"id": 302, "content": "<|endoftext|>", "special": False},
        ],
        **edits,
    }


def folder_of(path: Path, tokenizer: dict[str, Any] | None, config: dict[str, Any] | None = None) -> Path:
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(config or CONFIG))
    settings = {"eos_token": "<|im_end|>", "pad_token": {"content": "<|endoftext|>"}, "add_bos_token": False}
    (path / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": "{{ x }}"}))
    if tokenizer is not None:
        (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    return path


def made(tmp_path: Path, target: Path) -> Any:
    source = write_checkpoint(tmp_path / "drafter", t1())
    return convert(source, target=target, type="BF16", output=tmp_path / "out.gguf")


def test_a_byte_level_tokenizer_becomes_the_keys_of_llama_cpp(tmp_path: Path) -> None:
    header = read_header(made(tmp_path, folder_of(tmp_path / "t", tokenizer_json())).file)
    tokens, kinds = header.get("tokenizer.ggml.tokens"), header.get("tokenizer.ggml.token_type")
    assert (len(tokens), len(kinds)) == (512, 512)
    assert tokens[7] == "w7" and tokens[300:304] == ["<tool>", "<|im_end|>", "<|endoftext|>", "[PAD303]"]
    assert [kinds[number] for number in (7, 300, 301, 302, 303)] == [1, 4, 3, 3, 5]
    assert header.get("tokenizer.ggml.merges") == ["wĠ1 w2", "a b"]
    expected = {
        "model": "gpt2",
        "pre": "qwen2",
        "eos_token_id": 301,
        "padding_token_id": 302,
        "add_bos_token": False,
        "mask_token_id": 500,
    }
    assert {key: header.get(f"tokenizer.ggml.{key}") for key in expected} == expected
    assert header.get("tokenizer.chat_template") == "{{ x }}"


def test_without_a_name_the_end_token_comes_from_the_config(tmp_path: Path) -> None:
    target = folder_of(tmp_path / "t", tokenizer_json())
    (target / "tokenizer_config.json").unlink()
    assert read_header(made(tmp_path, target).file).get("tokenizer.ggml.eos_token_id") == 301


def test_an_unknown_way_of_splitting_asks_for_a_gguf(tmp_path: Path) -> None:
    target = folder_of(tmp_path / "t", tokenizer_json(pre_tokenizer={"type": "Whitespace"}))
    with pytest.raises(DflashError, match="no known name") as caught:
        made(tmp_path, target)
    assert caught.value.hint and ".gguf" in caught.value.hint


def test_a_folder_without_a_tokenizer_says_what_was_looked_for(tmp_path: Path) -> None:
    with pytest.raises(DflashError, match=r"tokenizer\.json.*tokenizer\.model.*config\.json"):
        made(tmp_path, folder_of(tmp_path / "t", None))


@pytest.mark.parametrize(
    ("edits", "words"),
    [
        ({"added_tokens": [{"id": 512, "content": "x"}]}, "512"),
        ({"added_tokens": [{"id": "5", "content": "x"}]}, "number"),
        ({"model": {"type": "Unigram", "vocab": []}}, "Unigram"),
        ({"model": {"type": "BPE", "vocab": {"a": 0}, "merges": [["a"]]}}, "merge"),
    ],
)
def test_a_tokenizer_that_does_not_fit_is_refused(tmp_path: Path, edits: dict[str, Any], words: str) -> None:
    with pytest.raises(DflashError, match=words):
        made(tmp_path, folder_of(tmp_path / "t", tokenizer_json(**edits)))


@pytest.mark.parametrize(
    ("key", "value"), [("hidden_size", 128), ("num_hidden_layers", 5), ("vocab_size", 600)]
)
def test_a_folder_of_another_model_is_refused(tmp_path: Path, key: str, value: int) -> None:
    with pytest.raises(DflashError, match=str(value)):
        made(tmp_path, folder_of(tmp_path / "t", tokenizer_json(), {**CONFIG, key: value}))


def test_a_text_config_inside_is_the_targets(tmp_path: Path) -> None:
    inner = {**CONFIG, "model_type": "qwen3_5_text", "rope_parameters": {"mrope_section": [11, 11, 10]}}
    outer = {"model_type": "qwen3_5", "text_config": inner}
    result = made(tmp_path, folder_of(tmp_path / "t", tokenizer_json(), outer))
    header = read_header(result.file)
    assert header.get("dflashcpp.target.architecture") == "qwen35"
    assert header.get("dflash.rope.dimension_sections") == [32, 0, 0, 0]


# -- sentencepiece --------------------------------------------------------------------------------


def message(number: int, data: bytes) -> bytes:
    assert len(data) < 128
    return bytes([number << 3 | 2, len(data)]) + data


def piece(text: str, score: float, kind: int) -> bytes:
    inside = (
        message(1, text.encode()) + bytes([2 << 3 | 5]) + struct.pack("<f", score) + bytes([3 << 3, kind])
    )
    return message(1, inside)


def test_a_sentencepiece_model_is_read_without_its_library(tmp_path: Path) -> None:
    target = folder_of(tmp_path / "t", None, {**CONFIG, "model_type": "gemma3"})
    pieces = [("<unk>", 0.0, 2), ("<s>", 0.0, 3), ("<0x0A>", -1.5, 6), ("▁hello", -2.25, 1)]
    trainer = message(2, bytes([3 << 3, 2]))
    (target / "tokenizer.model").write_bytes(b"".join(piece(*entry) for entry in pieces) + trainer)
    header = read_header(made(tmp_path, target).file)
    assert header.get("tokenizer.ggml.tokens")[:5] == ["<unk>", "<s>", "<0x0A>", "▁hello", "[PAD4]"]
    assert header.get("tokenizer.ggml.scores")[:4] == [0.0, 0.0, -1.5, -2.25]
    assert header.get("tokenizer.ggml.token_type")[:5] == [2, 3, 6, 1, 5]
    assert header.get("tokenizer.ggml.model") == "llama"
    assert header.get("dflash.embedding_scale") == 16.0


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"IQ== 0\nIg== 1\n",
        b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\xff\x7f",
        b"\x0a\x7fshort",
        b"\x00\x00",
        b"\x0b" * 50,
    ],
)
def test_what_is_no_sentencepiece_model_is_told(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "tokenizer.model"
    path.write_bytes(data)
    assert read_pieces(path) is None


@pytest.mark.parametrize(
    ("edit", "word"),
    [
        ({"added_tokens": [{"id": 300, "content": 7}]}, "7"),
        ({"added_tokens": [{"id": 300, "content": "\ud800"}]}, "ud800"),
        ({"added_tokens": [{"id": "300", "content": "x"}]}, "300"),
        ({"model": {**tokenizer_json()["model"], "merges": 5}}, "merges"),
        ({"model": {**tokenizer_json()["model"], "merges": "ab"}}, "merges"),
        ({"model": {**tokenizer_json()["model"], "merges": [["\udfff", "b"]]}}, "merge"),
    ],
)
def test_a_tokenizer_of_odd_content_is_refused_in_a_sentence(
    tmp_path: Path, edit: dict[str, Any], word: str
) -> None:
    with pytest.raises(DflashError, match=word) as caught:
        made(tmp_path, folder_of(tmp_path / "t", tokenizer_json(**edit)))
    assert "tokenizer.json" in caught.value.message


def test_a_pre_tokenizer_nested_without_end_is_unknown(tmp_path: Path) -> None:
    nested: dict[str, Any] = {"type": "ByteLevel"}
    for _ in range(300):
        nested = {"type": "Sequence", "pretokenizers": [nested]}
    with pytest.raises(DflashError, match="no known name"):
        made(tmp_path, folder_of(tmp_path / "t", tokenizer_json(pre_tokenizer=nested)))


def test_a_tokenizer_model_that_is_none_is_not_said_to_be_missing(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "t", None)
    (folder / "tokenizer.model").write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(DflashError, match=r"tokenizer\.model is no SentencePiece model"):
        made(tmp_path, folder)
