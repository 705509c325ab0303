"""The graphs of a DFlash drafter: drafting a block, and taking in the target's features.

Mirrors `llama_model_dflash::graph<false>`, `build_dflash2_conv` and `build_dflash2_selector`
(llama.cpp src/models/dflash.cpp, commit 0c1e570), and `build_sampling` (src/llama-graph.cpp) for the
candidates that DFlash v1 picks on the device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from dflashcpp.memory.graph import Graph, Tensor
from dflashcpp.memory.layers import Batch, Builder
from dflashcpp.memory.model import Layer, Model


def is_v2(model: Model) -> bool:
    return "selector_hidden.weight" in model.tensors


def draft_graph(model: Model, target: Model, batch: Batch, *, sampled_rows: int = 0) -> Graph:
    """The graph of a draft step over `batch.tokens` rows, every one of which gets logits.

    Embeddings and head come from `target` where the drafter has none. `sampled_rows` rows have their
    best candidates picked in the graph (v1 with device sampling).
    """
    builder = Builder(model, batch)
    tokens = builder.graph.new(batch.tokens)
    x = builder.graph.op("get_rows", (model.embd, batch.tokens), embedding(builder, target), tokens)
    if "embedding_scale" in model.keys:
        x = builder.unary("scale", x)
    for il, layer in enumerate(model.layers):
        x = block(builder, il, layer, x, Convolution(lambda _, delta: delta, _convolution))
    hidden = builder.norm(x)
    logits = head(builder, target, hidden)
    builder.graph.expand(logits)
    hidden.output = logits.output = True
    if is_v2(model):
        _selector(builder, hidden, logits, tokens)
    elif sampled_rows:
        sampling(builder, logits, sampled_rows)
    return builder.graph


def inject_graph(model: Model, batch: Batch) -> Graph:
    """The graph that turns `batch.tokens` rows of target features into keys and values."""
    builder = Builder(model, batch)
    width = builder.model.ne("fc.weight")[0]
    features = builder.graph.new(width, batch.tokens)
    fused = builder.norm(builder.linear("fc", features))
    for il, layer in enumerate(model.layers):
        k = builder.heads(builder.linear(f"blk.{il}.attn_k", fused), layer, layer.kv_heads, layer.head_k)
        v = builder.heads(_value(builder, il, fused), layer, layer.kv_heads, layer.head_v)
        k = builder.unary("rope", builder.norm(k), builder.positions)
        if batch.rotate_k:
            k = builder.rotate(k, layer.sliding, "k", layer.head_k)
        if batch.rotate_v:
            v = builder.rotate(v, layer.sliding, "v", layer.head_v)
        builder.store(layer, k, v)
    fused.output = True
    builder.graph.expand(fused)
    return builder.graph


def _value(builder: Builder, il: int, x: Tensor) -> Tensor:
    name = "attn_v" if builder.model.has(il, "attn_v.weight") else "attn_k"
    return builder.linear(f"blk.{il}.{name}", x)


def embedding(builder: Builder, target: Model) -> Tensor:
    own = "token_embd.weight" in builder.model.tensors
    return builder.graph.weight(*(builder.model if own else target).ne("token_embd.weight"), host=True)


def head(builder: Builder, target: Model, hidden: Tensor) -> Tensor:
    """The head (own, or the target's), then what DFlash-2 needs to compare candidates."""
    model = builder.model
    owner = model if "output.weight" in model.tensors or "token_embd.weight" in model.tensors else target
    name = "output.weight" if "output.weight" in owner.tensors else "token_embd.weight"
    logits = builder.matmul(builder.graph.weight(*owner.ne(name)), hidden)
    if is_v2(model):
        if "logit_scale" in model.keys:
            logits = builder.unary("scale", logits)
        if model.keys.get("final_logit_softcapping", 0.0) > 0.0:
            for step in ("scale", "unary", "scale"):
                logits = builder.unary(step, logits)
    if "d2t" in model.tensors:
        rows = logits.ne[1]
        full = builder.unary("fill", builder.graph.new(1, target.vocab, rows))
        part = builder.reshape(logits, 1, logits.ne[0], rows)
        written = builder.graph.view(full, full.ne, None, part, builder.graph.weight(logits.ne[0]))
        logits = builder.reshape(written, target.vocab, rows)
    return logits


@dataclass(frozen=True)
class Convolution:
    """How an engine builds the convolutions of DFlash-2: what is made once a sublayer, and one of the two."""

    prepare: Callable[[Builder, Tensor], Tensor]
    apply: Callable[[Builder, Tensor, Tensor], Tensor]


def block(builder: Builder, il: int, layer: Layer, x: Tensor, convolution: Convolution) -> Tensor:
    """One layer of the drafter over a block."""
    model, prefix = builder.model, f"blk.{il}"
    residual = x
    x = builder.norm(x)
    dynamic = None
    if model.has(il, "attn_conv_proj.weight"):
        dynamic = convolution.prepare(builder, builder.linear(f"{prefix}.attn_conv_proj", x))
        x = convolution.apply(builder, x, dynamic)
    q, k, v = builder.qkv(il, x, layer)
    q, k = builder.norm(q), builder.norm(k)
    if not model.has(il, "attn_v.weight"):
        v = builder.unary("rms_norm", v)
    q, k = builder.unary("rope", q, builder.positions), builder.unary("rope", k, builder.positions)
    out = builder.linear(f"{prefix}.attn_output", builder.attention(il, layer, q, k, v))
    if "attention.value_scale" in model.keys:
        out = builder.unary("scale", out)
    if dynamic is not None:
        out = convolution.apply(builder, out, dynamic)
    if model.has(il, "post_attention_norm.weight"):
        out = builder.norm(out)
    residual = builder.unary("add", out, residual)
    x = builder.norm(residual)
    dynamic = None
    if model.has(il, "ffn_conv_proj.weight"):
        dynamic = convolution.prepare(builder, builder.linear(f"{prefix}.ffn_conv_proj", x))
        x = convolution.apply(builder, x, dynamic)
    out = builder.feed_forward(prefix, x)
    if dynamic is not None:
        out = convolution.apply(builder, out, dynamic)
    if model.has(il, "post_ffw_norm.weight"):
        out = builder.norm(out)
    return builder.unary("add", out, residual)


def _convolution(builder: Builder, x: Tensor, dynamic: Tensor) -> Tensor:
    """`build_dflash2_conv`: weights for every row and channel, then one product a tap."""
    graph, batch, keys = builder.graph, builder.batch, builder.model.keys
    size, kernel, blocks = int(keys["conv_group_size"]), int(keys["conv_kernel_size"]), batch.sequences
    width, rows = x.ne[0], batch.tokens
    groups, block = width // size, rows // blocks
    split = builder.reshape(x, width, block, blocks)
    table = builder.reshape(dynamic, groups, kernel, 2, rows)
    side = graph.view(table, (groups, kernel, rows), (1, groups, groups * kernel * 2, 1))
    coefficients = builder.reshape(builder.cont(side), 1, groups, kernel, rows)
    spread = graph.op("repeat", (size, groups, kernel, rows), coefficients)
    weights = builder.unary("add", spread, graph.weight(size, groups, kernel))
    result: Tensor | None = None
    for tap in range(min(kernel, block)):
        values = split
        if tap:
            before = graph.view(split, (width, block - tap, blocks), split.strides)
            values = graph.op("pad", (width, block, blocks), before)
        values = builder.reshape(values, width, rows)
        slab = graph.view(weights, (size, groups, 1, rows), weights.strides)
        weight = builder.reshape(builder.cont(slab), width, rows)
        term = builder.unary("mul", weight, values)
        result = term if result is None else builder.unary("add", result, term)
    assert result is not None
    return result


def _selector(builder: Builder, hidden: Tensor, logits: Tensor, tokens: Tensor) -> None:
    """`build_dflash2_selector`: candidates of every row and the scores between neighbours."""
    graph, batch, keys = builder.graph, builder.batch, builder.model.keys
    top, blocks = int(keys["selector_top_k"]), batch.sequences
    per_block = batch.tokens // blocks
    block = min(per_block, int(keys["block_size"]))
    chosen = graph.op("top_k", (top, batch.tokens), logits)
    rows = builder.reshape(logits, 1, logits.ne[0], batch.tokens)
    unary = builder.reshape(graph.op("get_rows", (1, top, batch.tokens), rows, chosen), top, batch.tokens)
    gate = builder.linear("selector_hidden", hidden)
    parts = [builder.reshape(part, part.ne[0], per_block, blocks) for part in (chosen, unary, gate)]
    packed = builder.unary("fill", graph.new(hidden.ne[0], 1, blocks))
    if block > 1:
        first = graph.view(tokens, (1, blocks), (1, per_block, blocks, 1))
        run = _scores(builder, parts, 1, builder.cont(first, blocks))
        packed = graph.op("concat", (hidden.ne[0], 2, blocks), packed, run)
    if block > 2:
        before = graph.view(parts[0], (top, block - 2, blocks), parts[0].strides)
        ids = builder.reshape(builder.cont(before), top * (block - 2) * blocks)
        run = _scores(builder, parts, block - 2, ids)
        packed = graph.op("concat", (hidden.ne[0], block, blocks), packed, run)
    packed = builder.reshape(packed, hidden.ne[0], block * blocks)
    packed.output = True
    graph.expand(packed)


def _scores(builder: Builder, parts: list[Tensor], count: int, ids: Tensor) -> Tensor:
    """`score_run`: the pairwise scores of `count` positions, as rows of the hidden size."""
    graph, blocks = builder.graph, builder.batch.sequences
    chosen, unary, gate = (
        builder.cont(graph.view(part, (part.ne[0], count, blocks), part.strides)) for part in parts
    )
    top, rank = chosen.ne[0], gate.ne[0]
    before = ids.ne[0] // (count * blocks)
    flat = builder.reshape(chosen, top * count * blocks)
    successor = graph.op("get_rows", (rank, flat.ne[0]), codebook(builder, "successor"), flat)
    successor = builder.reshape(successor, rank, top, count, blocks)
    predecessor = graph.op("get_rows", (rank, ids.ne[0]), codebook(builder, "predecessor"), ids)
    predecessor = builder.reshape(predecessor, rank, before, count, blocks)
    wide = graph.op("repeat", predecessor.ne, builder.reshape(gate, rank, 1, count, blocks))
    condition = builder.unary("mul", predecessor, wide)
    score = graph.op("mul_mat", (top, before, count, blocks), successor, condition)
    if before == 1:
        score = graph.op("repeat", (top, top, count, blocks), score)
    single = graph.op("repeat", score.ne, builder.reshape(unary, top, 1, count, blocks))
    score = builder.unary("add", score, single)
    row = graph.op(
        "concat",
        (top + top * top, count, blocks),
        graph.op("cast", chosen.ne, chosen),
        builder.reshape(score, top * top, count, blocks),
    )
    return graph.op("pad", (builder.model.embd, count, blocks), row)


def codebook(builder: Builder, which: str) -> Tensor:
    return builder.graph.weight(*builder.model.ne(f"selector_{which}.weight"))


def sampling(builder: Builder, logits: Tensor, rows: int) -> None:
    """`build_sampling` with a top-k chain: a copy of the logits with one more row, candidates a row."""
    graph = builder.graph
    copied = graph.op("pad", (logits.ne[0], logits.ne[1] + 1), logits)
    for _ in range(rows):
        row = graph.view(copied, (logits.ne[0],))
        chosen = graph.op("top_k", (_CANDIDATES,), row)
        table = builder.reshape(row, 1, logits.ne[0])
        values = builder.reshape(graph.op("get_rows", (1, _CANDIDATES), table, chosen), _CANDIDATES)
        values.output = chosen.output = True
        graph.expand(values)


# common_speculative_impl_draft_dflash (common/speculative.cpp): llama_sampler_init_top_k(10)
_CANDIDATES = 10
