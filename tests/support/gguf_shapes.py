"""Targets of real widths in sparse GGUF files: every architecture the memory planner knows.

Header, metadata and a vocabulary are real, the weights a hole (they read as zeros), the layers few:
buffer sizes depend on widths. llama.cpp loads these files. Drafters: `sparse_models.write_drafter`.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dflashcpp.gguf_file import Kv, TensorType, ValueType, tensor_bytes

Shapes = dict[str, tuple[int, ...]]
ALIGNMENT = 32


@dataclass(frozen=True)
class Target:
    """A target's widths as its config publishes them; `keys` are metadata beside the common ones."""

    arch: str
    embd: int
    ffn: int
    heads: int
    kv_heads: int
    head: int
    vocab: int
    layers: int = 4
    tied: bool = False
    context: int = 131072
    keys: Mapping[str, Any] = field(default_factory=dict)
    block: Callable[[Target, int], Shapes] | None = None
    extra: Shapes = field(default_factory=dict)
    weights: TensorType = TensorType.Q4_K


def attention(target: Target, *, gate: int = 1, head_norms: bool = False, bias: bool = False) -> Shapes:
    """Query, key, value and output projections; `gate` 2 where the query holds a gate as well."""
    queries, keys = target.heads * target.head, target.kv_heads * target.head
    parts: Shapes = {
        "attn_norm.weight": (target.embd,),
        "attn_q.weight": (target.embd, gate * queries),
        "attn_k.weight": (target.embd, keys),
        "attn_v.weight": (target.embd, keys),
        "attn_output.weight": (queries, target.embd),
    }
    if head_norms:
        parts |= {"attn_q_norm.weight": (target.head,), "attn_k_norm.weight": (target.head,)}
    if bias:
        parts |= {"attn_q.bias": (queries,), "attn_k.bias": (keys,), "attn_v.bias": (keys,)}
        parts |= {"attn_output.bias": (target.embd,)}
    return parts


def gated(target: Target, width: int | None = None, suffix: str = "") -> Shapes:
    size = width or target.ffn
    return {
        f"ffn_gate{suffix}.weight": (target.embd, size),
        f"ffn_up{suffix}.weight": (target.embd, size),
        f"ffn_down{suffix}.weight": (size, target.embd),
    }


def experts(target: Target, count: int, width: int, *, gate: bool = True, inner: int = 0) -> Shapes:
    size = inner or target.embd
    parts: Shapes = {
        "ffn_gate_inp.weight": (target.embd, count),
        "ffn_up_exps.weight": (size, width, count),
        "ffn_down_exps.weight": (width, size, count),
    }
    return parts | ({"ffn_gate_exps.weight": (size, width, count)} if gate else {})


def plain_block(target: Target, _: int) -> Shapes:
    return attention(target) | {"ffn_norm.weight": (target.embd,)} | gated(target)


def qwen3_block(target: Target, _: int) -> Shapes:
    return attention(target, head_norms=True) | {"ffn_norm.weight": (target.embd,)} | gated(target)


def qwen3moe_block(target: Target, _: int) -> Shapes:
    parts = attention(target, head_norms=True) | {"ffn_norm.weight": (target.embd,)}
    return parts | experts(target, target.keys["expert_count"], target.keys["expert_feed_forward_length"])


def muse_block(target: Target, index: int) -> Shapes:
    parts = qwen3_block(target, index)
    parts["attn_gate.weight"] = (target.embd, target.heads * target.head)
    return parts | {"post_attention_norm.weight": (target.embd,), "post_ffw_norm.weight": (target.embd,)}


def gemma3_block(target: Target, index: int) -> Shapes:
    parts = qwen3_block(target, index)
    return parts | {"post_attention_norm.weight": (target.embd,), "post_ffw_norm.weight": (target.embd,)}


def gemma4_block(target: Target, index: int) -> Shapes:
    """Full layers have heads of their own width and no V: the keys serve as values."""
    full = not target.keys["attention.sliding_window_pattern"][index]
    head = target.keys["attention.key_length"] if full else target.head
    count = target.keys["attention.head_count_kv"][index]
    parts = gemma3_block(target, index)
    parts |= {
        "attn_q.weight": (target.embd, target.heads * head),
        "attn_k.weight": (target.embd, count * head),
        "attn_v.weight": (target.embd, count * head),
        "attn_output.weight": (target.heads * head, target.embd),
        "attn_q_norm.weight": (head,),
        "attn_k_norm.weight": (head,),
        "layer_output_scale.weight": (1,),
    }
    if full:
        del parts["attn_v.weight"]
    return parts


def gemma4_moe_block(target: Target, index: int) -> Shapes:
    parts = gemma4_block(target, index)
    parts |= experts(target, target.keys["expert_count"], target.keys["expert_feed_forward_length"])
    parts["ffn_gate_inp.scale"] = (target.embd,)
    for name in ("pre_ffw_norm_2", "post_ffw_norm_1", "post_ffw_norm_2"):
        parts[f"{name}.weight"] = (target.embd,)
    return parts


def oss_block(target: Target, _: int) -> Shapes:
    count, width = target.keys["expert_count"], target.keys["expert_feed_forward_length"]
    parts = attention(target, bias=True) | experts(target, count, width)
    parts |= {"post_attention_norm.weight": (target.embd,), "attn_sinks.weight": (target.heads,)}
    return parts | {
        "ffn_gate_inp.bias": (count,),
        "ffn_gate_exps.bias": (width, count),
        "ffn_up_exps.bias": (width, count),
        "ffn_down_exps.bias": (target.embd, count),
    }


def delta_block(target: Target) -> Shapes:
    """The linear-attention half of a Qwen3.5 block."""
    inner, state = target.keys["ssm.inner_size"], target.keys["ssm.state_size"]
    heads, groups = target.keys["ssm.time_step_rank"], target.keys["ssm.group_count"]
    channels = inner + 2 * groups * state
    return {
        "attn_norm.weight": (target.embd,),
        "attn_qkv.weight": (target.embd, channels),
        "attn_gate.weight": (target.embd, inner),
        "ssm_conv1d.weight": (target.keys["ssm.conv_kernel"], channels),
        "ssm_dt.bias": (heads,),
        "ssm_a": (heads,),
        "ssm_beta.weight": (target.embd, heads),
        "ssm_alpha.weight": (target.embd, heads),
        "ssm_norm.weight": (inner // heads,),
        "ssm_out.weight": (inner, target.embd),
    }


def qwen35_block(target: Target, index: int) -> Shapes:
    recurrent = (index + 1) % target.keys["full_attention_interval"] != 0
    parts = delta_block(target) if recurrent else attention(target, gate=2, head_norms=True)
    return parts | {"post_attention_norm.weight": (target.embd,)} | gated(target)


def qwen35moe_block(target: Target, index: int) -> Shapes:
    width = target.keys["expert_feed_forward_length"]
    parts = {name: ne for name, ne in qwen35_block(target, index).items() if not name.startswith("ffn_")}
    parts |= experts(target, target.keys["expert_count"], width)
    parts |= gated(target, target.keys["expert_shared_feed_forward_length"], "_shexp")
    return parts | {"ffn_gate_inp_shexp.weight": (target.embd,)}


def nemotron_block(target: Target, index: int) -> Shapes:
    """Blocks of one kind each: recurrent, feed-forward, attention, by the per-layer counts."""
    norm: Shapes = {"attn_norm.weight": (target.embd,)}
    kv, ffn = target.keys["attention.head_count_kv"][index], target.keys["feed_forward_length"][index]
    if kv:
        return attention(target)
    if not ffn:
        return norm | mamba2_block(target)
    if "expert_count" not in target.keys:
        return norm | {"ffn_up.weight": (target.embd, ffn), "ffn_down.weight": (ffn, target.embd)}
    shared = target.keys["expert_shared_feed_forward_length"]
    parts = experts(
        target, target.keys["expert_count"], target.keys["expert_feed_forward_length"], gate=False
    )
    parts |= {"ffn_up_shexp.weight": (target.embd, shared), "ffn_down_shexp.weight": (shared, target.embd)}
    return norm | parts | {"exp_probs_b.bias": (target.keys["expert_count"],)}


def mamba2_block(target: Target) -> Shapes:
    inner, state = target.keys["ssm.inner_size"], target.keys["ssm.state_size"]
    heads, groups = target.keys["ssm.time_step_rank"], target.keys["ssm.group_count"]
    channels = inner + 2 * groups * state
    return {
        "ssm_in.weight": (target.embd, inner + channels + heads),
        "ssm_conv1d.weight": (target.keys["ssm.conv_kernel"], channels),
        "ssm_conv1d.bias": (channels,),
        "ssm_dt.bias": (heads,),
        "ssm_a": (1, heads),
        "ssm_d": (1, heads),
        "ssm_norm.weight": (inner // groups, groups),
        "ssm_out.weight": (inner, target.embd),
    }


def _delta_keys(inner: int, heads: int, groups: int) -> dict[str, Any]:
    return {
        "ssm.conv_kernel": 4,
        "ssm.inner_size": inner,
        "ssm.state_size": 128,
        "ssm.time_step_rank": heads,
        "ssm.group_count": groups,
        "full_attention_interval": 4,
        "rope.dimension_sections": [11, 11, 10, 0],
        "rope.dimension_count": 64,
    }


def _gemma4_keys(kv_full: int) -> dict[str, Any]:
    return {
        "attention.sliding_window": 1024,
        "attention.sliding_window_pattern": [True, True, True, True, True, False],
        "attention.key_length": 512,
        "attention.value_length": 512,
        "attention.key_length_swa": 256,
        "attention.value_length_swa": 256,
        "embedding_length_per_layer_input": 0,
        "final_logit_softcapping": 30.0,
        "attention.head_count_kv": [kv_full * 4] * 5 + [kv_full],
    }


def _moe_keys(count: int, used: int, width: int) -> dict[str, Any]:
    return {"expert_count": count, "expert_used_count": used, "expert_feed_forward_length": width}


_NEMOTRON_SSM = {
    "ssm.conv_kernel": 4,
    "ssm.state_size": 128,
    "ssm.group_count": 8,
    "attention.layer_norm_epsilon": 1e-5,
}

TARGETS: dict[str, Target] = {
    "llama-3.1-8b": Target("llama", 4096, 14336, 32, 8, 128, 128256, block=plain_block),
    "mistral-small-24b": Target("llama", 5120, 32768, 32, 8, 128, 131072, block=plain_block),
    "ministral-8b": Target("mistral3", 4096, 14336, 32, 8, 128, 131072, block=plain_block),
    "qwen3-8b": Target("qwen3", 4096, 12288, 32, 8, 128, 151936, block=qwen3_block),
    "qwen3-4b": Target("qwen3", 2560, 9728, 32, 8, 128, 151936, tied=True, block=qwen3_block),
    "qwen3-30b-a3b": Target(
        "qwen3moe", 2048, 6144, 32, 4, 128, 151936, keys=_moe_keys(128, 8, 768), block=qwen3moe_block
    ),
    "qwen3.5-27b": Target(
        "qwen35", 5120, 17408, 24, 4, 256, 248320, keys=_delta_keys(6144, 48, 16), block=qwen35_block
    ),
    "qwen3.5-35b-a3b": Target(
        "qwen35moe", 2048, 512, 16, 2, 256, 248320,
        keys=_delta_keys(4096, 32, 16) | _moe_keys(256, 8, 512) | {"expert_shared_feed_forward_length": 512},
        block=qwen35moe_block,
    ),
    "gemma-3-12b": Target(
        "gemma3", 3840, 15360, 16, 8, 256, 262144, layers=6, tied=True,
        keys={"attention.sliding_window": 1024}, block=gemma3_block,
    ),
    "gemma-4-31b": Target(
        "gemma4", 5376, 21504, 32, 16, 256, 262144, layers=6, tied=True,
        keys=_gemma4_keys(4), block=gemma4_block, extra={"rope_freqs.weight": (256,)},
    ),
    "gemma-4-26b-a4b": Target(
        "gemma4", 2816, 2112, 16, 8, 256, 262144, layers=6, tied=True,
        keys=_gemma4_keys(2) | _moe_keys(128, 8, 704), block=gemma4_moe_block,
        extra={"rope_freqs.weight": (256,)}, weights=TensorType.Q4_0,
    ),
    "muse-glimmer-30b": Target(
        "muse-glimmer", 6656, 19968, 32, 2, 128, 202048,
        keys={"attention.sliding_window": 2048, "logit_scale": 0.196, "final_logit_softcapping": 20.0},
        block=muse_block,
    ),
    "gpt-oss-20b": Target(
        "gpt-oss", 2880, 2880, 64, 8, 64, 201088,
        keys=_moe_keys(32, 4, 2880) | {"attention.sliding_window": 128}, block=oss_block,
        weights=TensorType.Q4_0,
    ),
    "nemotron-nano-9b": Target(
        "nemotron_h", 4480, 15680, 40, 8, 128, 131072,
        keys=_NEMOTRON_SSM | {
            "ssm.inner_size": 10240,
            "ssm.time_step_rank": 128,
            "attention.head_count_kv": [0, 0, 8, 0],
            "feed_forward_length": [0, 15680, 0, 15680],
        },
        block=nemotron_block, weights=TensorType.Q4_0,
    ),
    "nemotron-3-30b-a3b": Target(
        "nemotron_h_moe", 2688, 1856, 32, 2, 128, 131072,
        keys=_NEMOTRON_SSM | _moe_keys(128, 6, 1856) | {
            "ssm.inner_size": 4096,
            "ssm.time_step_rank": 64,
            "attention.head_count_kv": [0, 0, 2, 0],
            "feed_forward_length": [0, 1856, 0, 1856],
            "expert_shared_feed_forward_length": 3712,
        },
        block=nemotron_block, weights=TensorType.Q4_0,
    ),
}  # fmt: skip


def write_target(path: Path, target: Target) -> Path:
    """Write the sparse file of `target`; a few MiB of header, the rest a hole."""
    assert target.block is not None
    tensors: Shapes = {
        "token_embd.weight": (target.embd, target.vocab),
        "output_norm.weight": (target.embd,),
        **target.extra,
    }
    if not target.tied:
        tensors["output.weight"] = (target.embd, target.vocab)
    for index in range(target.layers):
        tensors |= {f"blk.{index}.{name}": ne for name, ne in target.block(target, index).items()}
    return write_sparse(path, _metadata(target), tensors, target.weights)


def _metadata(target: Target) -> dict[str, Kv]:
    common: dict[str, Any] = {
        "block_count": target.layers,
        "context_length": target.context,
        "embedding_length": target.embd,
        "feed_forward_length": target.ffn,
        "attention.head_count": target.heads,
        "attention.head_count_kv": target.kv_heads,
        "attention.key_length": target.head,
        "attention.value_length": target.head,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 500000.0,
        "rope.dimension_count": target.head,
    }
    values = {f"{target.arch}.{key}": _kv(value) for key, value in (common | dict(target.keys)).items()}
    return {"general.architecture": Kv.string(target.arch)} | values | _vocabulary(target.vocab)


def _kv(value: Any) -> Kv:
    if isinstance(value, list):
        kind = ValueType.BOOL if isinstance(value[0], bool) else ValueType.INT32
        return Kv.array(kind, value)
    return Kv.f32(value) if isinstance(value, float) else Kv.u32(value)


def _vocabulary(count: int) -> dict[str, Kv]:
    """A byte-level vocabulary: every byte has a token, the rest are fillers."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [byte for byte in range(256) if byte not in printable]
    letters = [chr(byte) for byte in printable] + [chr(256 + index) for index in range(len(rest))]
    tokens = letters + [f"<filler_{index}>" for index in range(count - len(letters))]
    return {
        "tokenizer.ggml.model": Kv.string("gpt2"),
        "tokenizer.ggml.pre": Kv.string("default"),
        "tokenizer.ggml.tokens": Kv.array(ValueType.STRING, tokens),
        "tokenizer.ggml.token_type": Kv.array(
            ValueType.INT32, [1] * len(letters) + [5] * (count - len(letters))
        ),
        "tokenizer.ggml.merges": Kv.array(ValueType.STRING, [f"{letters[0]} {letters[1]}"]),
        "tokenizer.ggml.bos_token_id": Kv.u32(count - 2),
        "tokenizer.ggml.eos_token_id": Kv.u32(count - 1),
    }


def write_sparse(path: Path, metadata: Mapping[str, Kv], tensors: Shapes, weights: TensorType) -> Path:
    """A GGUF file whose tensor data is a hole of the right length."""
    parts = [struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), len(metadata))]
    parts += [_text(key) + kv.encoded() for key, kv in metadata.items()]
    offset = 0
    for name, ne in tensors.items():
        kind = _type(name, ne, weights)
        parts.append(_text(name) + struct.pack(f"<I{len(ne)}QIQ", len(ne), *ne, kind, offset))
        offset += math.ceil(tensor_bytes(kind, ne) / ALIGNMENT) * ALIGNMENT
    header = b"".join(parts)
    with path.open("wb") as file:
        file.write(header)
        file.truncate(math.ceil(len(header) / ALIGNMENT) * ALIGNMENT + offset)
    return path


def _text(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _type(name: str, ne: tuple[int, ...], weights: TensorType) -> TensorType:
    small = len(ne) == 1 or "conv1d" in name or "norm" in name or not name.endswith(".weight")
    return TensorType.F32 if small or "ffn_gate_inp" in name else weights
