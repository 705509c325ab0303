"""A tiny random target that cannot forget its last tokens: llama-server takes checkpoints and replays.

MiniMax-01's layout (llama.cpp `src/models/minimax-01.cpp`): lightning attention, whose state is a sum over
all tokens, in all layers but every third.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from tests.support.checkpoints import add_tokenizer

ARCH = "minimax-01"
INTERVAL = 3
EXPERTS = 2


def write_hybrid_target(
    path: Path, *, hidden: int = 64, layers: int = 6, vocab: int = 20, heads: int = 2, ffn: int = 64
) -> Path:
    """Random weights of unit gain in F32."""
    import gguf

    writer = gguf.GGUFWriter(path, ARCH)
    writer.add_block_count(layers)
    writer.add_context_length(4096)
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(ffn)
    writer.add_head_count(heads)
    writer.add_head_count_kv(heads)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1000000.0)
    writer.add_expert_count(EXPERTS)
    writer.add_expert_used_count(1)
    writer.add_float32(f"{ARCH}.residual_scale", 1.0)
    writer.add_uint32(f"{ARCH}.full_attention_interval", INTERVAL)
    add_tokenizer(writer, vocab)
    generator = np.random.default_rng(3)
    for name, shape in _layout(hidden, layers, vocab, ffn):
        noise = generator.standard_normal(shape, dtype=np.float32) / np.float32(math.sqrt(shape[-1]))
        writer.add_tensor(name, np.ones(shape, np.float32) if len(shape) == 1 else noise)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _layout(hidden: int, layers: int, vocab: int, ffn: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield "token_embd.weight", (vocab, hidden)
    for layer in range(layers):
        block = f"blk.{layer}."
        yield block + "attn_norm.weight", (hidden,)
        yield block + "attn_output.weight", (hidden, hidden)
        if (layer + 1) % INTERVAL == 0:
            for part in ("q", "k", "v"):
                yield f"{block}attn_{part}.weight", (hidden, hidden)
        else:
            yield block + "attn_norm_2.weight", (hidden,)
            yield block + "attn_qkv.weight", (3 * hidden, hidden)
            yield block + "attn_gate.weight", (hidden, hidden)
        yield block + "ffn_norm.weight", (hidden,)
        yield block + "ffn_gate_inp.weight", (EXPERTS, hidden)
        yield block + "ffn_gate_exps.weight", (EXPERTS, ffn, hidden)
        yield block + "ffn_up_exps.weight", (EXPERTS, ffn, hidden)
        yield block + "ffn_down_exps.weight", (EXPERTS, hidden, ffn)
    yield "output_norm.weight", (hidden,)
    yield "output.weight", (vocab, hidden)
