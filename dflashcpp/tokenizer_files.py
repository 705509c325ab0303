"""`tokenizer.ggml.*` keys out of a Hugging Face folder: tokenizer.json (byte-level BPE) or tokenizer.model.

Follows llama.cpp `conversion/base.py` (`get_vocab_base`, `_create_vocab_sentencepiece`) and gguf-py
`SpecialVocab`. The name of the pre-tokenizer decides how llama.cpp splits text; it comes from the
table `[[pre]]` of `convert/targets.toml` and is never guessed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dflashcpp.checkpoint.json_file import read_object
from dflashcpp.errors import DflashError
from dflashcpp.gguf_file import Kv, ValueType
from dflashcpp.knowledge import table
from dflashcpp.sentencepiece import Piece, read_pieces

_NORMAL, _CONTROL, _USER, _UNUSED = 1, 3, 4, 5
_LOOKED_FOR = ("tokenizer.json", "tokenizer.model")
_SPECIAL = {
    "bos": "bos",
    "eos": "eos",
    "unk": "unknown",
    "sep": "seperator",
    "pad": "padding",
    "mask": "mask",
}
_ASK = (
    "give the target's GGUF instead: --target FILE.gguf or --target org/repo:QUANT (only its header is read)"
)


def read_tokenizer(folder: Path, config: Mapping[str, Any], vocab: int) -> dict[str, Kv]:
    """The tokenizer of `folder` with a token list of exactly `vocab` entries.

    Raises DflashError: no tokenizer, an unknown kind, more tokens than rows.
    """
    model, json_file = folder / "tokenizer.model", folder / "tokenizer.json"
    pieces = read_pieces(model) if model.is_file() else None
    if pieces is None and model.is_file() and not json_file.is_file():
        raise DflashError(f"{model} is no SentencePiece model, and there is no tokenizer.json", hint=_ASK)
    if pieces is None and not json_file.is_file():
        there = sorted(path.name for path in folder.iterdir())
        raise DflashError(
            f"{folder} has no {' and no '.join(_LOOKED_FOR)}; there is {', '.join(there[:12])}",
            hint=_ASK,
        )
    described = read_object(json_file) if json_file.is_file() else {}
    keys = _sentencepiece(pieces, described, vocab, folder) if pieces else _bpe(described, vocab, json_file)
    settings = _optional(folder / "tokenizer_config.json")
    return {**keys, **_special(keys, settings, config), **_template(folder, settings)}


def _optional(path: Path) -> dict[str, Any]:
    return read_object(path) if path.is_file() else {}


# -- tokenizer.json -------------------------------------------------------------------------------


def _bpe(described: Mapping[str, Any], vocab: int, path: Path) -> dict[str, Kv]:
    model = described.get("model")
    if (
        not isinstance(model, Mapping)
        or model.get("type") != "BPE"
        or not isinstance(model.get("vocab"), Mapping)
    ):
        kind = model.get("type") if isinstance(model, Mapping) else None
        raise DflashError(f"{path} is a tokenizer of type {kind}; only byte-level BPE is read", hint=_ASK)
    pre = _pre_tokenizer(described, path)
    tokens, kinds = _blank(vocab)
    for text, number in model["vocab"].items():
        _put(tokens, kinds, number, text, _NORMAL, path)
    _put_added(tokens, kinds, described, path)
    return {
        "tokenizer.ggml.model": Kv.string("gpt2"),
        "tokenizer.ggml.pre": Kv.string(pre),
        "tokenizer.ggml.tokens": Kv.array(ValueType.STRING, tokens),
        "tokenizer.ggml.token_type": Kv.array(ValueType.INT32, kinds),
        "tokenizer.ggml.merges": Kv.array(ValueType.STRING, _merges(model, path)),
    }


def _blank(vocab: int) -> tuple[list[str], list[int]]:
    return [f"[PAD{number}]" for number in range(vocab)], [_UNUSED] * vocab


def _put(tokens: list[str], kinds: list[int], number: Any, text: Any, kind: int, path: Path) -> None:
    if type(number) is not int or not isinstance(text, str) or not _is_text(text):
        raise DflashError(f"{path}: the token {str(text)[:40]!r} has the number {str(number)[:40]!r}")
    if not 0 <= number < len(tokens):
        raise DflashError(
            f"{path} has the token {text[:40]!r} with number {number}, config.json says {len(tokens)} tokens",
            hint="config and tokenizer belong to different models",
        )
    tokens[number], kinds[number] = text, kind


def _is_text(text: str) -> bool:
    """JSON may hold halves of surrogate pairs, which are no text that a GGUF can store."""
    return not any("\ud800" <= letter <= "\udfff" for letter in text)


def _put_added(tokens: list[str], kinds: list[int], described: Mapping[str, Any], path: Path) -> None:
    for entry in _added(described):
        text = entry["content"]
        special = entry.get("special") or (isinstance(text, str) and _looks_special(text))
        _put(tokens, kinds, entry["id"], text, _CONTROL if special else _USER, path)


def _added(described: Mapping[str, Any]) -> list[dict[str, Any]]:
    found = described.get("added_tokens")
    if not isinstance(found, list):
        return []
    return [entry for entry in found if isinstance(entry, dict) and "id" in entry and "content" in entry]


def _looks_special(text: str) -> bool:
    """llama.cpp `does_token_look_special`: marks of control tokens that files forget to mark as special."""
    known = {"<pad>", "<mask>", "<2mass>", "[@BOS@]"}
    return text in known or bool(re.fullmatch(r"<\|.*\|>|<｜.*｜>|<unused\d+>", text))


def _merges(model: Mapping[str, Any], path: Path) -> list[str]:
    found = model.get("merges") or []
    if not isinstance(found, list):
        raise DflashError(f"{path}: merges must be a list, it is {str(found)[:60]!r}", hint=_ASK)
    return [_merge(pair, path) for pair in found]


def _merge(pair: Any, path: Path) -> str:
    """One merge rule as `left right`; a space inside a part is spelled as GPT-2 spells it."""
    if isinstance(pair, str) and _is_text(pair):
        return pair
    whole = isinstance(pair, list) and len(pair) == 2
    if whole and all(isinstance(part, str) and _is_text(part) for part in pair):
        return " ".join(part.replace(" ", chr(ord(" ") + 256)) for part in pair)
    raise DflashError(f"{path}: {str(pair)[:60]!r} is no merge rule")


def _pre_tokenizer(described: Mapping[str, Any], path: Path) -> str:
    steps = _steps(described.get("pre_tokenizer"))
    for row in table("convert/targets.toml")["pre"]:
        if row["steps"] == steps:
            return str(row["name"])
    raise DflashError(f"{path} splits text in a way that has no known name in llama.cpp", hint=_ASK)


def _steps(part: Any, depth: int = 0) -> list[str]:
    """The pre-tokenizer's parts in the words of the table."""
    if not isinstance(part, Mapping) or depth > 8:
        return ["none"]
    kind = part.get("type")
    if kind == "Sequence":
        inside = part.get("pretokenizers")
        return (
            [step for inner in inside[:16] for step in _steps(inner, depth + 1)]
            if isinstance(inside, list)
            else ["none"]
        )
    if kind == "Split" and isinstance(part.get("pattern"), Mapping):
        return [f"split:{part['pattern'].get('Regex')}"]
    if kind == "Digits":
        return ["digits" if part.get("individual_digits") else "digits-together"]
    if kind == "ByteLevel":
        return ["bytelevel-plain" if part.get("use_regex") is False else "bytelevel"]
    return [str(kind)]


# -- tokenizer.model ------------------------------------------------------------------------------


def _sentencepiece(
    pieces: list[Piece], described: Mapping[str, Any], vocab: int, folder: Path
) -> dict[str, Kv]:
    tokens, kinds = _blank(vocab)
    scores = [-1000.0] * vocab
    for number, piece in enumerate(pieces):
        _put(tokens, kinds, number, piece.text, piece.kind, folder / "tokenizer.model")
        scores[number] = piece.score
    _put_added(tokens, kinds, described, folder / "tokenizer.json")
    return {
        "tokenizer.ggml.model": Kv.string("llama"),
        "tokenizer.ggml.pre": Kv.string("default"),
        "tokenizer.ggml.tokens": Kv.array(ValueType.STRING, tokens),
        "tokenizer.ggml.scores": Kv.array(ValueType.FLOAT32, scores),
        "tokenizer.ggml.token_type": Kv.array(ValueType.INT32, kinds),
    }


# -- special tokens -------------------------------------------------------------------------------


def _special(keys: Mapping[str, Kv], settings: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Kv]:
    """Numbers of bos, eos ...: by their text in tokenizer_config.json, else by number in config.json."""
    tokens = keys["tokenizer.ggml.tokens"].value
    numbers = {text: number for number, text in enumerate(tokens)}
    found = {}
    for short, name in _SPECIAL.items():
        if short == "mask":
            continue  # the drafter says which
        number = _special_number(short, settings, config, numbers)
        if number is not None and 0 <= number < len(tokens):
            found[f"tokenizer.ggml.{name}_token_id"] = Kv.u32(number)
    for short in ("bos", "eos"):
        said = settings.get(f"add_{short}_token")
        if isinstance(said, bool):
            found[f"tokenizer.ggml.add_{short}_token"] = Kv.bool(said)
    return found


def _special_number(
    short: str, settings: Mapping[str, Any], config: Mapping[str, Any], numbers: Mapping[str, int]
) -> int | None:
    said = settings.get(f"{short}_token")
    text = said.get("content") if isinstance(said, Mapping) else said
    if isinstance(text, str) and text in numbers:
        return numbers[text]
    number = config.get(f"{short}_token_id")
    number = number[0] if isinstance(number, list) and number else number
    return number if type(number) is int else None


def _template(folder: Path, settings: Mapping[str, Any]) -> dict[str, Kv]:
    said = settings.get("chat_template")
    path = folder / "chat_template.jinja"
    if path.is_file() and path.stat().st_size < 1 << 22:
        said = path.read_text(encoding="utf-8", errors="replace")
    return {"tokenizer.chat_template": Kv.string(said)} if isinstance(said, str) and _is_text(said) else {}
