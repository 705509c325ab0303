"""GGUF files of real shapes that cost no disk: header, metadata and a tokenizer, the weights a hole.

Good for what the engine decides before it computes anything (buffer sizes, shape checks, messages).
Every weight reads as zero, so the text such a model makes means nothing. Layout: llama.cpp
src/models/dflash.cpp and src/models/llama.cpp, tensor shapes in ggml order (row length first).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import gguf
from gguf import GGMLQuantizationType as Type
from gguf import GGUFValueType as Kind

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Shape:
    """A target and the drafter that goes with it; sizes in elements, `window` in tokens (None: full)."""

    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    layers: int = 5
    taps: int = 5
    block: int = 16
    window: int | None = None
    context: int = 131072
    rank: int = 256
    top_k: int = 16
    conv_kernel: int = 2
    conv_group: int = 16
    target_layers: int = 6
    target_kv_heads: int = 2

    def with_vocab(self, vocab: int) -> Shape:
        """The same shape with another vocabulary."""
        return replace(self, vocab=vocab)


MUSE = Shape(hidden=6656, ffn=19968, heads=32, kv_heads=8, head_dim=128, vocab=202048, window=2048)
TINY = Shape(
    hidden=512,
    ffn=1024,
    heads=8,
    kv_heads=2,
    head_dim=64,
    vocab=49152,
    layers=2,
    taps=3,
    block=8,
    context=8192,
)


def write_target(path: Path, shape: Shape, weights: Type = Type.Q4_K) -> Path:
    """A llama target of `shape.target_layers` layers for the drafter of the same shape."""
    writer = _writer(path, "llama", shape, layers=shape.target_layers, kv_heads=shape.target_kv_heads)
    writer.add_uint32("llama.rope.dimension_count", shape.head_dim)
    tensors: Shapes = {
        "token_embd.weight": (shape.hidden, shape.vocab),
        "output.weight": (shape.hidden, shape.vocab),
        "output_norm.weight": (shape.hidden,),
    }
    for index in range(shape.target_layers):
        tensors |= _layer(index, shape, shape.target_kv_heads)
    return _write(path, writer, tensors, weights)


def write_drafter(path: Path, shape: Shape, version: int, weights: Type = Type.Q4_K) -> Path:
    """A DFlash (`version` 1) or DFlash-2 drafter that borrows the target's embeddings and head."""
    writer = _writer(path, "dflash", shape, layers=shape.layers, kv_heads=shape.kv_heads)
    writer.add_uint32("tokenizer.ggml.mask_token_id", 16)
    writer.add_bool("dflash.attention.causal", False)
    writer.add_uint32("dflash.block_size", shape.block)
    taps = [1 + index * (shape.target_layers - 1) // shape.taps for index in range(shape.taps)]
    _array(writer, "dflash.target_layers", taps, Kind.INT32)
    if shape.window is not None:
        writer.add_uint32("dflash.attention.sliding_window", shape.window)
        _array(writer, "dflash.attention.sliding_window_pattern", [True] * shape.layers, Kind.BOOL)
    tensors: Shapes = {
        "fc.weight": (shape.taps * shape.hidden, shape.hidden),
        "enc.output_norm.weight": (shape.hidden,),
        "output_norm.weight": (shape.hidden,),
    }
    for index in range(shape.layers):
        tensors |= _layer(index, shape, shape.kv_heads) | _head_norms(index, shape)
    if version == 2:
        tensors |= _second_version(writer, shape)
    return _write(path, writer, tensors, weights)


def _second_version(writer: gguf.GGUFWriter, shape: Shape) -> Shapes:
    writer.add_uint32("dflash.conv_kernel_size", shape.conv_kernel)
    writer.add_uint32("dflash.conv_group_size", shape.conv_group)
    writer.add_uint32("dflash.selector_rank", shape.rank)
    writer.add_uint32("dflash.selector_top_k", shape.top_k)
    coefficients = 2 * shape.conv_kernel * shape.hidden // shape.conv_group
    tensors: Shapes = {
        "selector_predecessor.weight": (shape.rank, shape.vocab),
        "selector_successor.weight": (shape.rank, shape.vocab),
        "selector_hidden.weight": (shape.hidden, shape.rank),
    }
    for index in range(shape.layers):
        for part in ("attn", "ffn"):
            tensors[f"blk.{index}.{part}_conv_base"] = (shape.hidden, shape.conv_kernel, 2)
            tensors[f"blk.{index}.{part}_conv_proj.weight"] = (shape.hidden, coefficients)
    return tensors


def _layer(index: int, shape: Shape, kv_heads: int) -> Shapes:
    hidden, ffn, queries, keys = (
        shape.hidden,
        shape.ffn,
        shape.heads * shape.head_dim,
        kv_heads * shape.head_dim,
    )
    rows: Shapes = {
        "attn_norm": (hidden,),
        "ffn_norm": (hidden,),
        "attn_q": (hidden, queries),
        "attn_k": (hidden, keys),
        "attn_v": (hidden, keys),
        "attn_output": (queries, hidden),
        "ffn_gate": (hidden, ffn),
        "ffn_up": (hidden, ffn),
        "ffn_down": (ffn, hidden),
    }
    return {f"blk.{index}.{name}.weight": size for name, size in rows.items()}


def _head_norms(index: int, shape: Shape) -> Shapes:
    return {f"blk.{index}.attn_{name}_norm.weight": (shape.head_dim,) for name in ("q", "k")}


def _writer(path: Path, arch: str, shape: Shape, *, layers: int, kv_heads: int) -> gguf.GGUFWriter:
    writer = gguf.GGUFWriter(path, arch)
    numbers = {
        "block_count": layers,
        "context_length": shape.context,
        "embedding_length": shape.hidden,
        "feed_forward_length": shape.ffn,
        "attention.head_count": shape.heads,
        "attention.head_count_kv": kv_heads,
        "attention.key_length": shape.head_dim,
        "attention.value_length": shape.head_dim,
    }
    for key, value in numbers.items():
        writer.add_uint32(f"{arch}.{key}", value)
    writer.add_float32(f"{arch}.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_float32(f"{arch}.rope.freq_base", 500000.0)
    _tokenizer(writer, shape.vocab)
    return writer


def _tokenizer(writer: gguf.GGUFWriter, vocab: int) -> None:
    """A byte-level vocabulary: 256 byte tokens first, then fillers up to `vocab` entries."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [byte for byte in range(256) if byte not in printable]
    letters = [chr(byte) for byte in printable] + [chr(256 + index) for index in range(len(rest))]
    tokens = letters + [f"<filler_{index}>" for index in range(vocab - len(letters))]
    writer.add_string("tokenizer.ggml.model", "gpt2")
    writer.add_string("tokenizer.ggml.pre", "default")
    _array(writer, "tokenizer.ggml.tokens", tokens, Kind.STRING)
    _array(writer, "tokenizer.ggml.token_type", [1] * len(letters) + [5] * (vocab - len(letters)), Kind.INT32)
    _array(writer, "tokenizer.ggml.merges", [f"{letters[0]} {letters[1]}"], Kind.STRING)
    writer.add_uint32("tokenizer.ggml.bos_token_id", vocab - 2)
    writer.add_uint32("tokenizer.ggml.eos_token_id", vocab - 1)


def _array(writer: gguf.GGUFWriter, key: str, values: list[Any], kind: Kind) -> None:
    writer.add_key_value(key, values, Kind.ARRAY, sub_type=kind)


def _write(path: Path, writer: gguf.GGUFWriter, tensors: Shapes, weights: Type) -> Path:
    alignment = gguf.GGUF_DEFAULT_ALIGNMENT
    size = 0
    for name, shape in tensors.items():
        kept = len(shape) == 1 or not name.endswith(".weight")
        kind = Type.F32 if kept else weights
        block, width = gguf.GGML_QUANT_SIZES[kind]
        count = 1
        for extent in shape:
            count *= extent
        nbytes = count // block * width
        row = (
            (*reversed(shape[1:]), shape[0] // block * width) if kind != Type.F32 else tuple(reversed(shape))
        )
        dtype = "uint8" if kind != Type.F32 else "float32"
        writer.add_tensor_info(name, row, gguf.np.dtype(dtype), nbytes, raw_dtype=kind)
        size += (nbytes + alignment - 1) // alignment * alignment
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    start = (path.stat().st_size + alignment - 1) // alignment * alignment
    with path.open("r+b") as file:
        file.truncate(start + size)
    return path
