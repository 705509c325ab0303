"""What a drafter takes from its target: the tokenizer, and facts that must fit.

A drafter checkpoint has no tokenizer, no embedding and no head; llama.cpp borrows the last two at run
time, the first travels in the drafter's GGUF.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dflashcpp.drafter import Drafter, Rope, real_number, whole_number
from dflashcpp.errors import DflashError
from dflashcpp.gguf_file import Header, Kv, ValueType, read_header
from dflashcpp.knowledge import table

_BESIDE_TOKENS = {
    "tokenizer.ggml.token_type": {ValueType.INT32, ValueType.UINT32},
    "tokenizer.ggml.scores": {ValueType.FLOAT32},
}
_UNUSED = 5  # token type of padding: gguf.TokenType.UNUSED


@dataclass(frozen=True)
class Target:
    """The target as far as a drafter cares. `vocab` is the rows of its embedding, when that is known."""

    source: str
    architecture: str  # as in GGUF files
    name: str | None
    layers: int
    hidden: int
    vocab: int | None
    tokens: int  # entries of the tokenizer
    tokenizer: Mapping[str, Kv] = field(repr=False)
    mrope: bool = False
    embedding_scale: float | None = None
    logit_scale: float | None = None
    softcap: float | None = None
    repo: str | None = None

    @classmethod
    def from_header(cls, header: Header) -> Target:
        """The target of a GGUF header. DflashError when it is a drafter or lacks a tokenizer."""
        arch = header.architecture
        if arch.startswith("dflash") or arch.endswith("dflash-draft"):
            raise DflashError(
                f"{header.source} is a drafter, not a target",
                hint="--target wants the GGUF of the large model",
            )
        tokenizer = {key: value for key, value in header.kv.items() if key.startswith("tokenizer.")}
        tokens = header.kv.get("tokenizer.ggml.tokens")
        if tokens is None:
            raise DflashError(
                f"{header.source} has no tokenizer.ggml.tokens", hint="take a complete GGUF of the target"
            )
        _check_tokenizer(header, tokens)
        if header.get("tokenizer.ggml.model", "none") in ("none", "no_vocab"):
            raise DflashError(
                f"{header.source}: tokenizer.ggml.model is missing or none; llama.cpp then has no mask",
                hint="take a complete GGUF of the target",
            )
        hidden, layers = (_size(header, f"{arch}.{key}") for key in ("embedding_length", "block_count"))
        return cls(
            source=header.source,
            architecture=arch,
            name=header.get("general.name", None),
            layers=layers - (whole_number(header, f"{arch}.nextn_predict_layers") or 0),
            hidden=hidden,
            vocab=_embedding_rows(header, arch),
            tokens=tokens.count,
            tokenizer=tokenizer,
            mrope=f"{arch}.rope.dimension_sections" in header.kv,
            embedding_scale=_embedding_scale(header, arch, hidden),
            logit_scale=real_number(header, f"{arch}.logit_scale"),
            softcap=real_number(header, f"{arch}.final_logit_softcapping"),
            repo=header.get("general.base_model.0.repo_url", None),
        )


def _size(header: Header, key: str) -> int:
    value = whole_number(header, key, least=1)
    return int(header.get(key)) if value is None else value


def _check_tokenizer(header: Header, tokens: Kv) -> None:
    """The lists that run beside the tokens must be lists and as long as they."""
    if tokens.element_type != ValueType.STRING:
        raise DflashError(
            f"{header.source}: tokenizer.ggml.tokens is {tokens.type_name}, not a list of texts"
        )
    for key, kinds in _BESIDE_TOKENS.items():
        found = header.kv.get(key)
        if found is not None and (found.element_type not in kinds or found.count != tokens.count):
            raise DflashError(
                f"{header.source}: {key} is {found.count} {found.type_name}, there are {tokens.count} tokens",
                hint="the file is damaged; take another GGUF of the target",
            )


def _embedding_rows(header: Header, arch: str) -> int | None:
    info = header.tensors.get("token_embd.weight")
    if info is not None and len(info.ne) > 1:
        return info.ne[1]
    return whole_number(header, f"{arch}.vocab_size") or None


def _embedding_scale(header: Header, arch: str, hidden: int) -> float | None:
    known = table("convert/targets.toml")
    if arch in known["raw_embedding"]:
        return None
    if arch in known["scaled_embedding"]:
        return math.sqrt(hidden)
    return real_number(header, f"{arch}.embedding_scale")


def read_target(path: str | Path, *, token: str | None = None) -> Target:
    """The target of a GGUF file, local or behind an http(s) URL (of which only the header is fetched)."""
    return Target.from_header(read_header(path, token=token))


def complete(drafter: Drafter, target: Target, wants: str) -> tuple[Drafter, list[str]]:
    """`drafter` with what only the target knows, and warnings.

    `wants` names the drafter in errors. Raises DflashError where the two do not belong together.
    """
    vocab = _vocabulary(drafter, target, wants)
    _check_sizes(drafter, target, wants)
    _check_taps(drafter, target, wants)
    filled = replace(
        drafter,
        vocab=vocab,
        target_layers=target.layers,
        embedding_scale=drafter.embedding_scale or target.embedding_scale,
        rope=_with_sections(drafter.rope, drafter.head_dim) if target.mrope else drafter.rope,
    )
    return filled, _warnings(drafter, target)


def _check_sizes(drafter: Drafter, target: Target, wants: str) -> None:
    if drafter.hidden != target.hidden:
        raise DflashError(
            f"{target.source} has hidden size {target.hidden}, {wants} needs a target of {drafter.hidden}",
            hint="give the target that this drafter was trained for",
        )
    if drafter.target_layers is not None and drafter.target_layers != target.layers:
        raise DflashError(
            f"{target.source} has {target.layers} layers, {wants} needs a target of {drafter.target_layers}",
            hint=f"give the right target; if this is the one: --set num_target_layers={target.layers}",
        )


def _check_taps(drafter: Drafter, target: Target, wants: str) -> None:
    highest = max(drafter.taps)
    ids = [tap - 1 for tap in drafter.taps]
    if highest > target.layers:
        raise DflashError(
            f"{wants} reads the layers {ids} of its target, {target.source} has only {target.layers}",
            hint="give the target that this drafter was trained for",
        )
    if highest == target.layers and target.architecture not in table("convert/targets.toml")["last_layer"]:
        raise DflashError(
            f"{wants} reads the last layer ({highest - 1}) of its target, which llama.cpp does not give away "
            f"for the architecture {target.architecture}",
            hint="no llama.cpp that dflashcpp builds can run this drafter",
        )


def _vocabulary(drafter: Drafter, target: Target, wants: str) -> int:
    """The drafter's vocabulary, which the token list in its file must have exactly."""
    rows = target.vocab or target.tokens
    vocab = drafter.vocab or rows
    if _differs_in_padding(drafter, target, rows, vocab):
        vocab = rows
    if rows != vocab:
        raise DflashError(
            f"{target.source} has a vocabulary of {rows}, {wants} needs a target of {vocab}",
            hint="give the target of this drafter (some GGUF files have a trimmed vocabulary)",
        )
    if target.tokens > vocab:
        raise DflashError(
            f"{target.source} has {target.tokens} tokens for an embedding of {vocab} rows",
            hint="the target's GGUF is damaged or of another model",
        )
    if drafter.mask_token_id >= rows:
        raise DflashError(
            f"{wants} uses token {drafter.mask_token_id} as its mask, {target.source} has 0 to {rows - 1}",
            hint="give the target that this drafter was trained for",
        )
    return vocab


def _differs_in_padding(drafter: Drafter, target: Target, rows: int, vocab: int) -> bool:
    """A config that counts fewer of the target's padding rows: no tensor of such a drafter has them."""
    bare = drafter.version == 1 and not (drafter.own_embedding or drafter.own_head)
    return bare and target.tokens <= vocab < rows


def _with_sections(rope: Rope, head_dim: int) -> Rope:
    """An M-RoPE target: the drafter turns by the first (time) dimension only."""
    return replace(rope, sections=((rope.dims or head_dim) // 2, 0, 0, 0))


def _warnings(drafter: Drafter, target: Target) -> list[str]:
    found = []
    if drafter.vocab is not None and target.vocab is not None and drafter.vocab < target.vocab:
        found.append(
            f"the drafter's config counts {drafter.vocab} tokens, the target's embedding has {target.vocab} "
            f"rows for {target.tokens} tokens; the file gets {target.vocab}"
        )
    if target.architecture not in table("convert/targets.toml")["taps"]:
        found.append(
            f"llama.cpp 0c1e570 does not give away the layers of architecture {target.architecture}: "
            "this pair needs another llama.cpp"
        )
    lacks = [
        name
        for name, ours, theirs in (
            ("output_multiplier", drafter.logit_scale, target.logit_scale),
            ("final_logit_softcapping", drafter.softcap, target.softcap),
        )
        if ours is None and theirs
    ]
    if drafter.version == 2 and lacks:
        found.append(
            f"the target transforms its logits, but the drafter's config has no {' and no '.join(lacks)}: "
            "the selector would weigh candidates wrongly if it was trained with them"
        )
    return found + _mask_warnings(drafter, target)


def _mask_warnings(drafter: Drafter, target: Target) -> list[str]:
    """A mask that is an ordinary token is unusual; beyond the tokenizer but inside the embedding is fine."""
    kinds = target.tokenizer.get("tokenizer.ggml.token_type")
    if kinds is None or drafter.mask_token_id >= kinds.count or kinds.value[drafter.mask_token_id] != 1:
        return []
    text = target.tokenizer["tokenizer.ggml.tokens"].value[drafter.mask_token_id]
    return [f"the mask token {drafter.mask_token_id} is the ordinary token {text!r} of the target"]


def token_number(target: Target, text: str) -> int:
    """The number of the token `text`. DflashError when the target has none, or several."""
    tokens = target.tokenizer["tokenizer.ggml.tokens"].value
    found = [number for number, token in enumerate(tokens) if token == text]
    if len(found) != 1:
        raise DflashError(
            f"the tokenizer of {target.source} has {len(found) or 'no'} tokens {text[:60]!r}, which the "
            "drafter's config names as its mask token",
            hint="give the target that this drafter was trained for, or pass --set mask_token_id=NUMBER",
        )
    return found[0]


def tokenizer_for(target: Target, vocab: int) -> dict[str, Kv]:
    """The target's `tokenizer.*` keys, byte for byte, its token list padded to exactly `vocab` entries.

    llama.cpp takes the number of tokens for the number of rows of the selector's codebooks. Padding
    is what its converter writes: `[PADn]`, type UNUSED, score 0.
    """
    missing = vocab - target.tokens
    if missing <= 0:
        return dict(target.tokenizer)
    padding: dict[str, list[Any]] = {
        "tokenizer.ggml.tokens": [f"[PAD{target.tokens + number}]" for number in range(missing)],
        "tokenizer.ggml.token_type": [_UNUSED] * missing,
        "tokenizer.ggml.scores": [-1000.0] * missing,
    }
    return {
        key: _longer(value, padding[key]) if key in padding else value
        for key, value in target.tokenizer.items()
    }


def _longer(value: Kv, more: list[Any]) -> Kv:
    assert value.element_type is not None
    extra = Kv.array(ValueType(value.element_type), more)
    return Kv(value.type, value.element_type, value.count + extra.count, bytes(value.raw) + extra.raw)
