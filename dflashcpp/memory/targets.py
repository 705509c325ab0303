"""The graph of a target model, put together block by block from `memory.layers`.

Sources: the graph constructors in llama.cpp src/models/{llama,qwen3,qwen3moe,qwen35,qwen35moe,gemma3,
gemma4,muse-glimmer,openai-moe,mistral3,nemotron-h}.cpp at commit 0c1e570.
"""

from __future__ import annotations

from dflashcpp.memory.graph import Graph, Shape, Tensor
from dflashcpp.memory.layers import Batch, Builder
from dflashcpp.memory.model import Layer, Model
from dflashcpp.memory.recurrent import delta_net, mamba2


def target_graph(model: Model, batch: Batch) -> Graph:
    """The graph llama.cpp reserves memory for when it runs `batch` through the target `model`."""
    builder = Builder(model, batch)
    x = _embedded(builder)
    per_layer = _per_layer_inputs(builder, x)
    for il, layer in enumerate(model.layers):
        x.output = x.output or il in batch.layer_inputs
        x = _block(builder, il, layer, x, per_layer)
    x.output = x.output or len(model.layers) in batch.layer_inputs
    _head(builder, x)
    return builder.graph


def _embedded(builder: Builder) -> Tensor:
    model = builder.model
    weight = builder.graph.weight(*model.ne("token_embd.weight"), host=True)
    x = builder.token_embedding(model.embd, weight)
    style = model.rules.get("embedding", "plain")
    if style == "scaled":
        return builder.unary("scale", x)
    return builder.norm(x, weight=False) if style == "normed" else x


def _block(builder: Builder, il: int, layer: Layer, x: Tensor, per_layer: Tensor | None) -> Tensor:
    if builder.model.rules.get("recurrent") == "mamba2":
        return _single(builder, il, layer, x)
    last = il == len(builder.model.layers) - 1
    normed = builder.norm(x)
    if layer.recurrent:
        builder.graph.expand(normed)
        out = delta_net(builder, il, normed)
    else:
        if builder.model.ssm is not None:
            builder.graph.expand(normed)
        out = _attention(builder, il, layer, normed)
    prefix = f"blk.{il}"
    after_attention = builder.model.has(il, "post_attention_norm.weight")
    before_ffn = builder.model.has(il, "ffn_norm.weight")
    early = last and builder.model.rules.get("rows", "last_layer") == "last_layer"
    normed_first = builder.model.rules.get("post_norm") == "before_rows"
    if after_attention and before_ffn and normed_first:
        out = builder.norm(out)
    if early:
        out, x = builder.pick(out), builder.pick(x)
    if after_attention and before_ffn and not normed_first:
        out = builder.norm(out)
    residual = builder.unary("add", out, x)
    out = _feed_forward(builder, il, prefix, residual)
    if builder.model.has(il, "post_ffw_norm.weight"):
        out = builder.norm(out)
    out = builder.unary("add", out, residual)
    if per_layer is not None:
        out = _add_per_layer(builder, prefix, out, per_layer)
    if builder.model.has(il, "layer_output_scale.weight"):
        out = builder.unary("mul", out, builder.graph.weight(1))
    return out


def _single(builder: Builder, il: int, layer: Layer, x: Tensor) -> Tensor:
    """Nemotron-H: a block is one of recurrent, attention, feed-forward."""
    prefix = f"blk.{il}"
    normed = builder.norm(x)
    if layer.recurrent:
        out = mamba2(builder, il, normed)
    elif builder.model.has(il, "attn_output.weight"):
        q, k, v = builder.qkv(il, normed, layer)
        out = builder.biased(f"{prefix}.attn_output", builder.attention(il, layer, q, k, v))
    else:
        out = _mixture(builder, il, prefix, normed)
    return builder.unary("add", out, x)


def _attention(builder: Builder, il: int, layer: Layer, x: Tensor) -> Tensor:
    model, prefix = builder.model, f"blk.{il}"
    gate: Tensor | None
    k: Tensor | None
    v: Tensor | None
    joint = model.has(il, "attn_q.weight") and (
        model.ne(f"{prefix}.attn_q.weight")[1] == 2 * layer.heads * layer.head_k
    )
    if joint:
        q, k, v, gate = _query_with_gate(builder, il, layer, x)
    else:
        q, k, v = _projected(builder, il, layer, x)
        gate = builder.linear(f"{prefix}.attn_gate", x) if model.has(il, "attn_gate.weight") else None
    q, k = _positioned(builder, il, q, k)
    if model.arch == "gemma3":
        q = builder.unary("scale", q)
    if "attention.temperature_scale" in model.keys:
        q = builder.unary("mul", q, builder.graph.new(1, 1, builder.batch.tokens))
    if model.arch == "gemma4" and v is not None:
        v = builder.unary("rms_norm", v)
    out = builder.attention(il, layer, q, k, v)
    if gate is not None:
        out = builder.unary("mul", out, builder.unary("unary", gate))
    return builder.biased(f"{prefix}.attn_output", out)


def _projected(
    builder: Builder, il: int, layer: Layer, x: Tensor
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    if layer.own_kv:
        return builder.qkv(il, x, layer)
    q = builder.biased(f"blk.{il}.attn_q", x)
    return builder.heads(q, layer, layer.heads, layer.head_k), None, None


def _positioned(builder: Builder, il: int, q: Tensor, k: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Head norms where the file has them, then rotary positions."""
    model = builder.model
    if model.has(il, "attn_q_norm.weight"):
        q = builder.norm(q)
    if k is not None and model.has(il, "attn_k_norm.weight"):
        k = builder.norm(k)
    turned = builder.unary("rope", q, builder.positions)
    return turned, k and builder.unary("rope", k, builder.positions)


def _query_with_gate(
    builder: Builder, il: int, layer: Layer, x: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Qwen3.5: one projection holds query and gate of every head, interleaved."""
    tokens, prefix = builder.batch.tokens, f"blk.{il}"
    both = builder.biased(f"{prefix}.attn_q", x)
    k = builder.heads(builder.biased(f"{prefix}.attn_k", x), layer, layer.kv_heads, layer.head_k)
    v = builder.heads(builder.biased(f"{prefix}.attn_v", x), layer, layer.kv_heads, layer.head_v)
    strides: Shape = (1, 2 * layer.head_k, both.ne[0], both.ne[0] * tokens)
    q = builder.graph.view(both, (layer.head_k, layer.heads, tokens), strides)
    half = builder.graph.view(both, (layer.head_k, layer.heads, tokens), strides)
    return q, k, v, builder.cont(half, layer.head_k * layer.heads, tokens)


def _feed_forward(builder: Builder, il: int, prefix: str, residual: Tensor) -> Tensor:
    """The feed-forward half, from its norm on; a mixture when the block has a router."""
    if builder.model.arch == "gemma4" and builder.model.has(il, "ffn_gate_inp.weight"):
        return _gemma4_mixture(builder, prefix, residual)
    normed = builder.norm(residual)
    return _mixture(builder, il, prefix, normed)


def _mixture(builder: Builder, il: int, prefix: str, x: Tensor) -> Tensor:
    model = builder.model
    if not model.has(il, "ffn_gate_inp.weight"):
        return builder.feed_forward(prefix, x)
    logits = builder.router(prefix, x)
    weighted = model.arch == "gpt-oss"
    inner = x
    if model.has(il, "ffn_latent_down.weight"):
        inner = builder.linear(f"{prefix}.ffn_latent_down", x)
    out = builder.experts(prefix, inner, logits, normed=not weighted, weighted=weighted)
    if model.has(il, "ffn_latent_up.weight"):
        out = builder.linear(f"{prefix}.ffn_latent_up", out)
    if model.has(il, "ffn_up_shexp.weight"):
        shared = builder.feed_forward(prefix, x, shared="_shexp")
        if model.has(il, "ffn_gate_inp_shexp.weight"):
            shared = _shared_gate(builder, prefix, x, shared)
        out = builder.unary("add", out, shared)
    return out


def _shared_gate(builder: Builder, prefix: str, x: Tensor, shared: Tensor) -> Tensor:
    weight = builder.graph.weight(x.ne[0], 1)
    gate = builder.unary("unary", builder.matmul(weight, x))
    return builder.unary("mul", shared, gate)


def _gemma4_mixture(builder: Builder, prefix: str, x: Tensor) -> Tensor:
    """Gemma 4: a dense feed-forward beside the experts, the router on the unnormed residual."""
    dense = builder.norm(builder.feed_forward(prefix, builder.norm(x)))
    inner = builder.norm(x)
    routed = builder.unary("scale", builder.unary("rms_norm", x))
    routed = builder.unary("mul", routed, builder.graph.weight(x.ne[0]))
    logits = builder.linear(f"{prefix}.ffn_gate_inp", routed)
    mixed = builder.norm(builder.experts(prefix, inner, logits, normed=True, weighted=False))
    return builder.unary("add", dense, mixed)


def _per_layer_inputs(builder: Builder, x: Tensor) -> Tensor | None:
    """Gemma 4's per-layer embeddings: looked up and projected once for all layers."""
    width = int(builder.model.keys.get("embedding_length_per_layer_input", 0))
    if not width:
        return None
    graph, tokens, count = builder.graph, builder.batch.tokens, len(builder.model.layers)
    table = graph.weight(*builder.model.ne("per_layer_token_embd.weight"))
    rows = graph.op("get_rows", (width * count, tokens), table, graph.new(tokens))
    rows = graph.expand(builder.unary("scale", builder.reshape(rows, width, count, tokens)))
    projected = builder.unary("scale", builder.linear("per_layer_model_proj", x))
    projected = builder.norm(builder.reshape(projected, width, count, tokens))
    joined = builder.unary("scale", builder.unary("add", projected, rows))
    turned = graph.view(joined, (width, tokens, count), (1, width * count, width, 1))
    return builder.cont(turned)


def _add_per_layer(builder: Builder, prefix: str, x: Tensor, per_layer: Tensor) -> Tensor:
    gate = builder.unary("unary", builder.linear(f"{prefix}.inp_gate", x))
    slab = builder.graph.view(per_layer, gate.ne)
    out = builder.linear(f"{prefix}.proj", builder.unary("mul", gate, slab))
    return builder.unary("add", x, builder.norm(out))


def _head(builder: Builder, x: Tensor) -> None:
    """Final norm, the rows that count, logits and what is done to them."""
    model, rows = builder.model, builder.model.rules.get("rows", "last_layer")
    if rows == "before_norm":
        x.output = True
        x = builder.pick(x)
    x = builder.norm(x)
    if rows == "after_norm":
        x.output = True
        x = builder.pick(x)
    x.output = True
    name = "token_embd" if model.tied else "output"
    logits = builder.linear(name, x)
    if model.arch == "muse-glimmer":
        logits = builder.unary("scale", logits)
    if "final_logit_softcapping" in model.keys:
        for step in ("scale", "unary", "scale"):
            logits = builder.unary(step, logits)
    logits.output = True
    builder.graph.expand(logits)
