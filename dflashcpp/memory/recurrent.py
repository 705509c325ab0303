"""Recurrent blocks as shapes: gated delta net (Qwen3.5) and Mamba-2 (Nemotron-H).

Mirrors `build_layer_attn_linear` (src/models/qwen35.cpp), src/models/delta-net-base.cpp with the fused
operation, and `build_mamba2_layer` (src/models/mamba-base.cpp) of llama.cpp at commit 0c1e570.
"""

from __future__ import annotations

from dflashcpp.errors import DflashError
from dflashcpp.memory.graph import Tensor
from dflashcpp.memory.layers import Builder
from dflashcpp.memory.model import Ssm


def _ssm(builder: Builder) -> Ssm:
    if builder.model.ssm is None:
        raise DflashError(f"{builder.model.source}: a recurrent layer but no {builder.model.arch}.ssm keys")
    return builder.model.ssm


def _kept(builder: Builder) -> int:
    return builder.batch.rollback + 1


def _joined(builder: Builder, ssm: Ssm, state: Tensor, mixed: Tensor) -> Tensor:
    """The convolution input: the rows kept from before, then those of this batch."""
    batch, graph = builder.batch, builder.graph
    kept = builder.reshape(state, ssm.conv - 1, ssm.conv_channels, batch.sequences)
    turned = graph.view(
        mixed,
        (batch.per_sequence, ssm.conv_channels, batch.sequences),
        (mixed.strides[1], 1, mixed.strides[2], 1),
    )
    length = ssm.conv - 1 + batch.per_sequence
    joined = graph.op("concat", (length, ssm.conv_channels, batch.sequences), kept, turned)
    for _ in range(min(batch.per_sequence, _kept(builder))):
        builder.write_state(
            graph.view(joined, (ssm.conv - 1, ssm.conv_channels, batch.sequences), joined.strides)
        )
    return joined


def _conv(builder: Builder, ssm: Ssm, joined: Tensor, prefix: str) -> Tensor:
    batch = builder.batch
    weight = builder.graph.weight(ssm.conv, ssm.conv_channels)
    out = builder.graph.op(
        "ssm_conv", (ssm.conv_channels, batch.per_sequence, batch.sequences), joined, weight
    )
    if f"{prefix}.ssm_conv1d.bias" in builder.model.tensors:
        out = builder.unary("add", out, builder.graph.weight(ssm.conv_channels))
    return builder.unary("unary", out)


def _part(builder: Builder, source: Tensor, width: int, heads: int) -> Tensor:
    """A strided view of some channels of every token, split into heads."""
    batch = builder.batch
    row = source.ne[0]
    strides = (1, width, row, row * batch.per_sequence)
    return builder.graph.view(source, (width, heads, batch.per_sequence, batch.sequences), strides)


def delta_net(builder: Builder, il: int, x: Tensor) -> Tensor:
    """A linear-attention block of Qwen3.5; `x` is [embd, tokens], so is the result."""
    ssm, batch, graph = _ssm(builder), builder.batch, builder.graph
    prefix = f"blk.{il}"
    head = ssm.inner // ssm.heads
    mixed = builder.linear(f"{prefix}.attn_qkv", x)
    mixed = builder.reshape(mixed, mixed.ne[0], batch.per_sequence, batch.sequences)
    z = builder.linear(f"{prefix}.attn_gate", x)
    beta = builder.linear(f"{prefix}.ssm_beta", x)
    beta = builder.unary("unary", builder.reshape(beta, 1, ssm.heads, batch.per_sequence, batch.sequences))
    alpha = builder.linear(f"{prefix}.ssm_alpha", x)
    alpha = builder.reshape(alpha, ssm.heads, batch.per_sequence, batch.sequences)
    decay = builder.unary("unary", builder.unary("add", alpha, graph.weight(ssm.heads)))
    decay = builder.unary("mul", decay, graph.weight(ssm.heads))
    decay = builder.reshape(decay, 1, ssm.heads, batch.per_sequence, batch.sequences)
    joined = _joined(builder, ssm, builder.state_rows(ssm.row[0]), mixed)
    state = builder.reshape(builder.state_rows(ssm.row[1]), head, head, ssm.heads, batch.sequences)
    flat = _conv(builder, ssm, joined, prefix)
    q, k = (
        builder.unary("scale", builder.unary("rms_norm", _part(builder, flat, ssm.state, ssm.groups)))
        for _ in range(2)
    )
    v = _part(builder, flat, head, ssm.heads)
    rows = batch.tokens + _kept(builder) * head * batch.sequences
    both = graph.op("gated_delta_net", (head * ssm.heads, rows), q, k, v, decay, beta, state)
    builder.write_state(graph.view(both, (ssm.row[1], batch.sequences)))
    out = graph.view(both, (head, ssm.heads, batch.per_sequence, batch.sequences))
    gated = builder.unary("unary", builder.reshape(z, *out.ne))
    out = builder.unary("mul", builder.norm(out), gated)
    out = builder.reshape(out, head * ssm.heads, batch.per_sequence, batch.sequences)
    out = builder.linear(f"{prefix}.ssm_out", out)
    return builder.reshape(out, out.ne[0], batch.tokens)


def mamba2(builder: Builder, il: int, x: Tensor) -> Tensor:
    """A Mamba-2 block of Nemotron-H; `x` is [embd, tokens], so is the result."""
    ssm, batch, graph = _ssm(builder), builder.batch, builder.graph
    prefix = f"blk.{il}"
    head = ssm.inner // ssm.heads
    conv_state = builder.state_rows(ssm.row[0])
    mixed = builder.linear(f"{prefix}.ssm_in", x)
    mixed = builder.reshape(mixed, mixed.ne[0], batch.per_sequence, batch.sequences)
    gate = _part(builder, mixed, head, ssm.heads)
    step = graph.view(mixed, (ssm.heads, batch.per_sequence, batch.sequences), mixed.strides)
    joined = _joined(builder, ssm, conv_state, mixed)
    flat = _conv(builder, ssm, joined, prefix)
    inner = _part(builder, flat, head, ssm.heads)
    b, c = (_part(builder, flat, ssm.state, ssm.groups) for _ in range(2))
    step = builder.unary("add", builder.cont(step), graph.weight(ssm.heads))
    cache = graph.weight(ssm.state, head, ssm.heads, batch.sequences)
    size = ssm.inner * batch.tokens + _kept(builder) * ssm.row[1] * batch.sequences
    a = graph.weight(1, ssm.heads)
    both = graph.op("ssm_scan", (size,), cache, inner, step, a, b, c, builder.copy_ids())
    graph.expand(both)
    builder.write_state(graph.view(both, (ssm.row[1], batch.sequences)))
    y = graph.view(both, inner.ne, inner.strides)
    skip = builder.unary("mul", inner, graph.weight(1, ssm.heads))
    y = builder.unary("add", y, skip)
    y = graph.op("glu", y.ne, builder.cont(gate), y)
    if f"{prefix}.ssm_norm.weight" in builder.model.tensors:
        groups = max(ssm.groups, 1)
        y = builder.norm(builder.reshape(y, ssm.inner // groups, groups, batch.per_sequence, batch.sequences))
    return builder.linear(f"{prefix}.ssm_out", builder.reshape(y, ssm.inner, batch.tokens))
