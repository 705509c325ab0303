"""Synthetic drafters as GGUF: shapes as llama.cpp wants them, random or real weights."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from dflashcpp.gguf_file import GgufWriter, Kv, TensorInfo, TensorType, ValueType
from dflashcpp.quantize import encode


@dataclass(frozen=True)
class Shape:
    """Dimensions of a drafter; `rank` None is DFlash v1, `vocab` matters with rank, embedding or head."""

    hidden: int = 256
    ffn: int = 512
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    layers: int = 2
    taps: int = 2
    vocab: int = 512
    rank: int | None = None
    embedding: bool = False
    head: bool = False
    kernel: int = 2
    group: int = 16

    def but(self, **edits: int | bool | None) -> Shape:
        return replace(self, **edits)  # type: ignore[arg-type]


MUSE = Shape(6656, 19968, 32, 8, 128, 5, 5, 202048, 256)
QWEN38 = Shape(5120, 17408, 32, 8, 128, 5, 5, 248320, 256)


def tensors(shape: Shape, matrix: TensorType = TensorType.BF16) -> list[TensorInfo]:
    """Every tensor, matrices as `matrix`, the rest F32 (offsets and sizes are not filled in)."""
    found = [
        (name, ne, matrix if name in _MATRICES or _is_matrix(name) else TensorType.F32)
        for name, ne in _all(shape)
    ]
    return [TensorInfo(name, ne, kind, 0, 0) for name, ne, kind in found]


_MATRICES = {"fc.weight", "token_embd.weight", "output.weight"}


def _is_matrix(name: str) -> bool:
    return name.endswith(".weight") and "norm" not in name


def _all(s: Shape) -> list[tuple[str, tuple[int, ...]]]:
    h = s.hidden
    listed: list[tuple[str, tuple[int, ...]]] = [("fc.weight", (s.taps * h, h))]
    listed += [("enc.output_norm.weight", (h,)), ("output_norm.weight", (h,))]
    if s.embedding:
        listed.append(("token_embd.weight", (h, s.vocab)))
    if s.head:
        listed.append(("output.weight", (h, s.vocab)))
    for layer in range(s.layers):
        listed += [(f"blk.{layer}.{name}", ne) for name, ne in _layer(s)]
    if s.rank:
        listed += [(f"selector_{side}.weight", (s.rank, s.vocab)) for side in ("predecessor", "successor")]
        listed.append(("selector_hidden.weight", (h, s.rank)))
    return listed


def _layer(s: Shape) -> list[tuple[str, tuple[int, ...]]]:
    h, q, k = s.hidden, s.heads * s.head_dim, s.kv_heads * s.head_dim
    found: list[tuple[str, tuple[int, ...]]] = [
        ("attn_norm.weight", (h,)),
        ("ffn_norm.weight", (h,)),
        ("attn_q.weight", (h, q)),
        ("attn_k.weight", (h, k)),
        ("attn_v.weight", (h, k)),
        ("attn_output.weight", (q, h)),
        ("attn_q_norm.weight", (s.head_dim,)),
        ("attn_k_norm.weight", (s.head_dim,)),
        ("ffn_gate.weight", (h, s.ffn)),
        ("ffn_up.weight", (h, s.ffn)),
        ("ffn_down.weight", (s.ffn, h)),
    ]
    if s.rank:
        for part in ("attn", "ffn"):
            found.append((f"{part}_conv_base", (h, s.kernel, 2)))
            found.append((f"{part}_conv_proj.weight", (h, 2 * s.kernel * h // s.group)))
    return found


def metadata(s: Shape) -> dict[str, Kv]:
    """The keys llama.cpp's loader needs for this drafter."""
    keys = {
        "general.architecture": Kv.string("dflash"),
        "general.file_type": Kv.u32(32),
        "dflash.block_count": Kv.u32(s.layers),
        "dflash.context_length": Kv.u32(4096),
        "dflash.embedding_length": Kv.u32(s.hidden),
        "dflash.feed_forward_length": Kv.u32(s.ffn),
        "dflash.attention.head_count": Kv.u32(s.heads),
        "dflash.attention.head_count_kv": Kv.u32(s.kv_heads),
        "dflash.attention.key_length": Kv.u32(s.head_dim),
        "dflash.attention.value_length": Kv.u32(s.head_dim),
        "dflash.attention.layer_norm_rms_epsilon": Kv.f32(1e-6),
        "dflash.rope.freq_base": Kv.f32(1e6),
        "dflash.block_size": Kv.u32(8),
        "dflash.target_layers": Kv.array(ValueType.UINT32, [2 + i for i in range(s.taps)]),
    }
    if s.rank:
        keys["dflash.conv_kernel_size"] = Kv.u32(s.kernel)
        keys["dflash.conv_group_size"] = Kv.u32(s.group)
        keys["dflash.selector_rank"] = Kv.u32(s.rank)
        keys["dflash.selector_top_k"] = Kv.u32(4)
    return keys


def write_drafter(path: Path, shape: Shape, matrix: TensorType = TensorType.BF16, *, seed: int = 0) -> Path:
    """A drafter with random weights (some rows of zeros, some outliers), matrices as `matrix`."""
    random = np.random.default_rng(seed)
    with GgufWriter(path) as out:
        for key, value in metadata(shape).items():
            out.add(key, value)
        listed = tensors(shape, matrix)
        for info in listed:
            out.declare(info.name, info.ne, info.type)
        out.begin()
        for info in listed:
            rows = int(np.prod(info.ne[1:]))
            values = random.standard_normal((rows, info.ne[0]), dtype=np.float32) * 0.05
            values[rows // 2] = 0
            values[0, :3] = (3.0, -4.0, 1e-30)
            out.write(info.name, 0, encode(info.type, values))
        out.commit()
    return path


_REAL = Path(__file__).parents[2] / "models" / "smollm2-135m-dflash2" / "model.safetensors"
_REAL_SHAPE = Shape(576, 1536, 9, 3, 64, 2, 3, 49152, 64)
_RENAMED = {
    "enc.output_norm": "hidden_norm",
    "output_norm": "norm",
    "selector_predecessor": "candidate_selector.predecessor_codebook",
    "selector_successor": "candidate_selector.successor_codebook",
    "selector_hidden": "candidate_selector.hidden_projection",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_conv_base": "attention_conv.base_kernel",
    "ffn_conv_base": "mlp_conv.base_kernel",
    "attn_conv_proj": "attention_conv.kernel_projection",
    "ffn_conv_proj": "mlp_conv.kernel_projection",
}


def write_real_drafter(path: Path) -> Path:
    """The small trained drafter of models/ in BF16, renamed here and not by the converter."""
    data = _REAL.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    stored = {_source(name): entry for name, entry in json.loads(data[8:start]).items()}
    with GgufWriter(path) as out:
        for key, value in metadata(_REAL_SHAPE).items():
            out.add(key, value)
        listed = tensors(_REAL_SHAPE)
        for info in listed:
            out.declare(info.name, info.ne, info.type)
        out.begin()
        for info in listed:
            entry = stored[_wanted(info.name)]
            begin, end = entry["data_offsets"]
            bits = np.frombuffer(data[start + begin : start + end], np.uint16)
            assert tuple(entry["shape"][::-1]) == info.ne
            values = (bits.astype(np.uint32) << 16).view(np.float32).reshape(-1, info.ne[0])
            out.write(info.name, 0, encode(info.type, values))
        out.commit()
    return path


def _source(name: str) -> str:
    return name.removesuffix(".weight")


def _wanted(name: str) -> str:
    stem = _source(name)
    if stem.startswith("blk."):
        _, layer, part = stem.split(".")
        return f"layers.{layer}.{_RENAMED[part]}"
    return _RENAMED.get(stem, stem)


def tensor_data(path: Path, header_start: int, info: TensorInfo) -> bytes:
    """The bytes of one tensor, read without the code under test."""
    with path.open("rb") as file:
        file.seek(header_start + info.offset)
        return file.read(info.nbytes)
