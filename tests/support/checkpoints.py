"""Synthetic drafter checkpoints and tiny targets, written from `convert/tensors.toml`.

Nothing here uses the readers under test: a safetensors file is 8 bytes of length, JSON and bytes.
"""

from __future__ import annotations

import copy
import json
import math
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dflashcpp.drafter import Drafter
from dflashcpp.knowledge import table

WIDTH = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "I64": 8,
    "I32": 4,
    "U32": 4,
    "U8": 1,
    "BOOL": 1,
}
CHUNK = 1 << 22  # elements written at once

T1: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "block_size": 16,
    "dflash_config": {"mask_token_id": 500, "target_layer_ids": [1, 3]},
    "num_target_layers": 6,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "rope_scaling": None,
    "max_position_embeddings": 4096,
    "layer_types": ["full_attention"] * 2,
    "use_sliding_window": False,
    "sliding_window": None,
    "attention_bias": False,
    "tie_word_embeddings": False,
    "vocab_size": 512,
    "dtype": "bfloat16",
    "transformers_version": "4.57.1",
}

VERSION2 = {
    "architectures": ["DFlash2DraftModel"],
    "is_causal": False,
    "dflash_config": {
        "block_size": 8,
        "mask_token_id": 500,
        "target_layer_ids": [1, 3],
        "conv_kernel_size": 2,
        "conv_group_size": 16,
        "selector_rank": 64,
        "selector_top_k": 8,
    },
}

MUSE: dict[str, Any] = {
    "architectures": ["DFlash2DraftModel"],
    "model_type": "qwen3",
    "is_causal": False,
    "dflash_config": {
        "block_size": 16,
        "conv_kernel_size": 2,
        "conv_group_size": 16,
        "selector_rank": 256,
        "selector_top_k": 16,
        "mask_token_id": 201818,
        "target_layer_ids": [1, 13, 25, 37, 49],
        "output_multiplier": 0.19611613513818404,
        "final_logit_softcapping": 20.0,
    },
    "hidden_size": 6656,
    "intermediate_size": 19968,
    "num_hidden_layers": 5,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "layer_types": ["sliding_attention"] * 5,
    "sliding_window": 2048,
    "use_sliding_window": True,
    "rope_parameters": {"rope_theta": 500000.0, "rope_type": "default"},
    "rms_norm_eps": 1e-05,
    "max_position_embeddings": 131072,
    "num_target_layers": 52,
    "vocab_size": 202048,
    "attention_bias": False,
    "dtype": "bfloat16",
    "hidden_act": "silu",
}


def edited(config: Mapping[str, Any], **edits: Any) -> dict[str, Any]:
    """A deep copy of `config` with top-level `edits`; a value of `...` deletes the key.

    `dflash_config` is merged, not replaced.
    """
    result = copy.deepcopy(dict(config))
    for key, value in edits.items():
        if value is ...:
            result.pop(key, None)
        elif key == "dflash_config" and isinstance(value, Mapping):
            merged = {**result.get(key, {}), **value}
            result[key] = {name: item for name, item in merged.items() if item is not ...}
        else:
            result[key] = value
    return result


def t1(**edits: Any) -> dict[str, Any]:
    """The config of fixture T1: two layers, hidden 256, block 16, vocabulary 512, six target layers."""
    return edited(T1, **edits)


def t1_v2(**edits: Any) -> dict[str, Any]:
    """T1 as a DFlash-2 drafter."""
    return edited(edited(edited(T1, block_size=...), **VERSION2), **edits)


# Values of rope_scaling.
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "original_max_position_embeddings": 512,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}

WINDOW = 40
# Settings for t1() and t1_v2(): every layer sees WINDOW positions, in both directions inside the block.
SLIDING: dict[str, Any] = {
    "layer_types": ["sliding_attention"] * 2,
    "use_sliding_window": True,
    "sliding_window": WINDOW,
    "is_causal": False,
}


def sizes(config: Mapping[str, Any]) -> dict[str, int]:
    """The dimensions of `convert/tensors.toml` that a z-lab config stands for."""
    draft = config.get("dflash_config", {})
    dims = {
        "hidden": config["hidden_size"],
        "ffn": config["intermediate_size"],
        "layers": config["num_hidden_layers"],
        "heads": config["num_attention_heads"],
        "kv_heads": config["num_key_value_heads"],
        "head_dim": config["head_dim"],
        "taps": len(draft.get("target_layer_ids") or [1, 3]),
        "vocab": config.get("vocab_size", 512),
        "draft_vocab": config.get("draft_vocab_size") or config.get("vocab_size", 512),
    }
    if "selector_rank" in draft:
        dims["conv_kernel"] = draft["conv_kernel_size"]
        dims["conv_groups"] = config["hidden_size"] // draft["conv_group_size"]
        dims["selector_rank"] = draft["selector_rank"]
    return dims


def layout(config: Mapping[str, Any], *features: str) -> dict[str, tuple[int, ...]]:
    """Names (the first of each row's `source`) and torch shapes of a checkpoint with this config."""
    dims = sizes(config)
    wanted = {"always", *features} | ({"dflash2"} if "selector_rank" in dims else set())
    found: dict[str, tuple[int, ...]] = {}
    for row in table("convert/tensors.toml")["tensor"]:
        if row["when"] not in wanted or not row["source"]:
            continue
        source = row["source"][0]
        shape = tuple(math.prod(_size(dims, part) for part in entry.split("*")) for entry in row["shape"])
        for layer in range(dims["layers"]) if "{i}" in source else [0]:
            found[source.format(i=layer)] = shape
    return found


def _size(dims: Mapping[str, int], part: str) -> int:
    part = part.strip()
    return int(part) if part.isdigit() else dims[part]


@dataclass
class Entry:
    """One tensor to be written: `chunks` yields its bytes."""

    dtype: str
    shape: tuple[int, ...]
    chunks: Callable[[], Iterator[bytes]]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * WIDTH[self.dtype]


def to_bf16(values: np.ndarray) -> np.ndarray:
    """float32 to bf16 bits (uint16), rounded to nearest even; NaN stays NaN."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(values), 0x7FC0, rounded).astype(np.uint16)


def encode(values: np.ndarray, dtype: str) -> bytes:
    """`values` in the bytes of a safetensors dtype."""
    if dtype == "BF16":
        return to_bf16(values).tobytes()
    kinds = {
        "F64": "<f8",
        "F32": "<f4",
        "F16": "<f2",
        "I64": "<i8",
        "I32": "<i4",
        "BOOL": "?",
        "U8": "u1",
        "F8_E4M3": "u1",
    }
    return np.ascontiguousarray(values).astype(kinds.get(dtype, "<u4")).tobytes()


def array_entry(values: np.ndarray, dtype: str = "BF16") -> Entry:
    """An `Entry` of given values."""
    return Entry(dtype, tuple(values.shape), lambda: iter([encode(values, dtype)]))


def random_entry(name: str, shape: tuple[int, ...], dtype: str, seed: int) -> Entry:
    """Plausible weights: norms near 1, convolutions near identity, matrices of unit gain."""

    def chunks() -> Iterator[bytes]:
        generator = np.random.default_rng([seed, *name.encode()])
        rows, columns = math.prod(shape[:-1]), shape[-1]
        step = max(1, CHUNK // columns)
        for start in range(0, rows, step):
            count = min(step, rows - start)
            yield encode(_plausible(generator, name, shape, start, count), dtype)

    return Entry(dtype, shape, chunks)


def _plausible(
    generator: np.random.Generator, name: str, shape: tuple[int, ...], start: int, count: int
) -> np.ndarray:
    noise = generator.standard_normal((count, shape[-1]), dtype=np.float32)
    if len(shape) == 1:
        return 1 + np.float32(0.1) * noise
    if name.endswith("base_kernel"):
        first = np.arange(start, start + count) % shape[1] == 0
        return np.float32(0.1) * noise + first[:, None].astype(np.float32)
    return noise / np.float32(math.sqrt(shape[-1]))


def write_safetensors(path: Path, entries: Mapping[str, Entry]) -> Path:
    """Write a safetensors file, streaming."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name, entry in entries.items():
        offsets = [position, position + entry.nbytes]
        header[name] = {"dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": offsets}
        position += entry.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for entry in entries.values():
            for chunk in entry.chunks():
                file.write(chunk)
    return path


def random_entries(
    config: Mapping[str, Any], *features: str, dtype: str = "BF16", seed: int = 0
) -> dict[str, Entry]:
    """Random tensors for `config`, by the checkpoint's own names."""
    return {name: random_entry(name, shape, dtype, seed) for name, shape in layout(config, *features).items()}


def write_checkpoint(
    folder: Path,
    config: Mapping[str, Any] | None = None,
    *,
    entries: Mapping[str, Entry] | None = None,
    dtype: str = "BF16",
    seed: int = 0,
    shards: tuple[str, ...] = (),
) -> Path:
    """Write `config.json` and `model.safetensors` (or `shards` and an index) into `folder`; return it."""
    folder.mkdir(parents=True, exist_ok=True)
    config = t1() if config is None else config
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    found = dict(random_entries(config, dtype=dtype, seed=seed) if entries is None else entries)
    if not shards:
        write_safetensors(folder / "model.safetensors", found)
        return folder
    names, weight_map = list(found), {}
    for number, shard in enumerate(shards):
        part = names[number :: len(shards)]
        write_safetensors(folder / shard, {name: found[name] for name in part})
        weight_map.update(dict.fromkeys(part, shard))
    index = {
        "metadata": {"total_size": sum(entry.nbytes for entry in found.values())},
        "weight_map": weight_map,
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def _token_texts(count: int) -> list[str]:
    """A byte-level vocabulary: 256 byte tokens as GPT-2 spells them, then words, then reserved ones."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    spelled = {byte: chr(byte) for byte in visible}
    hidden = [byte for byte in range(256) if byte not in spelled]
    spelled.update({byte: chr(256 + number) for number, byte in enumerate(hidden)})
    texts = [spelled[byte] for byte in range(256)]
    return (texts + [f"<|extra_{number}|>" for number in range(count - 256)])[:count]


def write_target(
    path: Path,
    *,
    arch: str = "qwen3",
    hidden: int = 256,
    layers: int = 6,
    vocab: int = 512,
    tokens: int | None = None,
    ffn: int = 256,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 64,
    weights: bool = True,
    tensors: bool = True,
    seed: int = 1,
    extra: Callable[[Any], None] = lambda writer: None,
) -> Path:
    """A tiny target GGUF written by gguf-py, one that llama-server loads when arch is qwen3.

    `tokens` may differ from the `vocab` rows of the embedding. `weights=False` writes F16 zeros,
    `tensors=False` no tensor at all (the vocabulary then stands in a key). `extra(writer)` may add keys.
    """
    import gguf

    path.parent.mkdir(parents=True, exist_ok=True)
    writer = gguf.GGUFWriter(path, arch)
    writer.add_name("tiny target")
    writer.add_block_count(layers)
    writer.add_context_length(4096)
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(ffn)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1000000.0)
    add_tokenizer(writer, vocab if tokens is None else tokens)
    if not tensors:
        writer.add_vocab_size(vocab)
    extra(writer)
    generator = np.random.default_rng(seed)
    query, key = heads * head_dim, kv_heads * head_dim
    for name, shape in _target_layout(hidden, layers, vocab, ffn, query, key, head_dim) if tensors else ():
        writer.add_tensor(name, _target_values(generator, shape, weights))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _target_values(generator: np.random.Generator, shape: tuple[int, ...], weights: bool) -> np.ndarray:
    if len(shape) == 1:
        return np.ones(shape, dtype=np.float32)
    if not weights:
        return np.zeros(shape, dtype=np.float16)
    return (generator.standard_normal(shape, dtype=np.float32) / math.sqrt(shape[-1])).astype(np.float16)


def add_tokenizer(writer: Any, count: int) -> None:
    """The keys of a byte-level tokenizer of `count` tokens (at least 2)."""
    import gguf

    texts = _token_texts(count)
    kinds = [gguf.TokenType.NORMAL] * min(count, 256) + [gguf.TokenType.CONTROL] * max(0, count - 256)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(texts)
    writer.add_token_types([int(kind) for kind in kinds])
    first = min(65, count - 2)  # llama.cpp wants a merge, any merge
    writer.add_token_merges([f"{texts[first]} {texts[first + 1]}"])
    writer.add_bos_token_id(256)
    writer.add_eos_token_id(257)
    writer.add_add_bos_token(False)


def _target_layout(
    hidden: int, layers: int, vocab: int, ffn: int, query: int, key: int, head_dim: int
) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield "token_embd.weight", (vocab, hidden)
    for layer in range(layers):
        block = f"blk.{layer}."
        yield block + "attn_norm.weight", (hidden,)
        yield block + "attn_q.weight", (query, hidden)
        yield block + "attn_k.weight", (key, hidden)
        yield block + "attn_v.weight", (key, hidden)
        yield block + "attn_output.weight", (hidden, query)
        yield block + "attn_q_norm.weight", (head_dim,)
        yield block + "attn_k_norm.weight", (head_dim,)
        yield block + "ffn_norm.weight", (hidden,)
        yield block + "ffn_gate.weight", (ffn, hidden)
        yield block + "ffn_up.weight", (ffn, hidden)
        yield block + "ffn_down.weight", (hidden, ffn)
    yield "output_norm.weight", (hidden,)
    yield "output.weight", (vocab, hidden)


def tensor_count(drafter: Drafter) -> int:
    """How many tensors a GGUF of this drafter holds (3 + 11 L, or 6 + 15 L for DFlash-2, without extras)."""
    features = drafter.features()
    rows = [row for row in table("convert/tensors.toml")["tensor"] if row["when"] in features]
    return sum(drafter.layers if "{i}" in row["name"] else 1 for row in rows)
