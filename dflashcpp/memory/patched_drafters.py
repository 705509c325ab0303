"""The graph of a draft step as our patches build it (patches/src/dflash2-graph.cpp).

Against `memory.drafters`: the head and the selector leave out the anchors, a lattice row is as wide as
it needs to be, the convolutions make their weights once a sublayer, and layers whose causality is not
the context's have a mask of their own.
"""

from __future__ import annotations

from collections.abc import Sequence

from dflashcpp.memory.drafters import Convolution, block, codebook, embedding, head, is_v2, sampling
from dflashcpp.memory.graph import Graph, Tensor
from dflashcpp.memory.layers import Batch, Builder
from dflashcpp.memory.model import Model


def patched_draft_graph(model: Model, target: Model, batch: Batch, *, sampled_rows: int = 0) -> Graph:
    """As `drafters.draft_graph`, for `batch.tokens` rows of which `batch.outputs` are read (v1)."""
    builder = _Builder(model, batch)
    tokens = builder.graph.new(batch.tokens)
    x = builder.graph.op("get_rows", (model.embd, batch.tokens), embedding(builder, target), tokens)
    if "embedding_scale" in model.keys:
        x = builder.unary("scale", x)
    for il, layer in enumerate(model.layers):
        builder.other = _is_other(model, il)
        x = block(builder, il, layer, x, Convolution(_weights, _convolve))
    hidden = builder.norm(x if is_v2(model) else builder.pick(x))
    hidden.output = True
    rows = _masks(builder, hidden) if is_v2(model) else hidden
    gate = builder.linear("selector_hidden", rows) if is_v2(model) else None
    logits = head(builder, target, rows)
    logits.output = True
    builder.graph.expand(logits)
    if gate is not None:
        _lattice(builder, logits, gate, tokens)
    elif sampled_rows:
        sampling(builder, logits, sampled_rows)
    return builder.graph


class _Builder(Builder):
    """Two masks for each kind of layer: the context's causality, and the other."""

    other = False

    def __init__(self, model: Model, batch: Batch) -> None:
        super().__init__(model, batch)
        self._usual, self._others = self._masks, dict[bool, Tensor]()

    def mask(self, sliding: bool) -> Tensor:
        self._masks = self._others if self.other else self._usual
        return super().mask(sliding)


def _is_other(model: Model, il: int) -> bool:
    pattern = model.keys.get("attention.causal_pattern")
    if not isinstance(pattern, Sequence):
        return False
    return bool(pattern[il]) != bool(model.keys.get("attention.causal", False))


def _masks(builder: Builder, hidden: Tensor) -> Tensor:
    """`mask_rows`: all rows but the first of each block."""
    blocks = builder.batch.sequences
    rows = builder.batch.tokens - blocks
    view = builder.graph.view(hidden, (hidden.ne[0], rows // blocks, blocks))
    return builder.reshape(builder.cont(view) if blocks > 1 else view, hidden.ne[0], rows)


def _weights(builder: Builder, delta: Tensor) -> Tensor:
    """`conv_weights`: base and coefficients of both sides."""
    keys, rows = builder.model.keys, builder.batch.tokens
    size, slots = int(keys["conv_group_size"]), 2 * int(keys["conv_kernel_size"])
    groups = delta.ne[0] // slots
    one = builder.reshape(delta, 1, groups, slots, rows)
    spread = builder.graph.op("repeat", (size, groups, slots, rows), one)
    return builder.unary("add", spread, builder.graph.weight(size, groups, slots))


def _convolve(builder: Builder, x: Tensor, weights: Tensor) -> Tensor:
    """`block_conv`: one product a tap, added in place."""
    graph, blocks = builder.graph, builder.batch.sequences
    size, groups, slots = weights.ne[:3]
    width = builder.batch.tokens // blocks
    total: Tensor | None = None
    for tap in range(min(slots // 2, width)):
        ne = (size, groups, width - tap, blocks)
        term = graph.op("mul", ne, graph.view(x, ne), graph.view(weights, ne))
        total = term if total is None else graph.view(total, total.ne, None, term)
    assert total is not None
    return builder.reshape(total, x.ne[0], builder.batch.tokens)


def _lattice(builder: Builder, logits: Tensor, gate: Tensor, tokens: Tensor) -> None:
    """`selector_lattice`: candidates of every mask and the scores between neighbours."""
    graph, blocks = builder.graph, builder.batch.sequences
    top, rank, masks = int(builder.model.keys["selector_top_k"]), gate.ne[0], logits.ne[1]
    count = masks // blocks
    chosen = graph.op("top_k", (top, masks), logits)
    unary = graph.op("get_rows", (1, top, masks), builder.reshape(logits, 1, logits.ne[0], masks), chosen)
    ids = builder.reshape(chosen, top * masks)
    before = _predecessors(builder, ids, tokens, (rank, top, count, blocks))
    after = graph.op("get_rows", (rank, top * masks), codebook(builder, "successor"), ids)
    after = builder.reshape(after, rank, top, count, blocks)
    before = builder.unary("mul", before, builder.reshape(gate, rank, 1, count, blocks))
    scores = graph.op("mul_mat", (top, top, count, blocks), after, before)
    scores = builder.unary("add", scores, builder.reshape(unary, top, 1, count, blocks))
    split = builder.reshape(chosen, top, count, blocks)
    row = top + top * top
    rows = graph.op(
        "concat",
        (row, count, blocks),
        graph.op("cast", split.ne, split),
        builder.reshape(scores, top * top, count, blocks),
    )
    padded = graph.op("pad", (row, count + 1, blocks), rows)
    lattice = builder.reshape(padded, row, (count + 1) * blocks)
    lattice.output = True
    graph.expand(lattice)


def _predecessors(builder: Builder, ids: Tensor, tokens: Tensor, ne: tuple[int, int, int, int]) -> Tensor:
    """`predecessor_rows`: of the anchor for the first mask, of the candidates before for the others."""
    graph = builder.graph
    rank, top, count, blocks = ne
    table = codebook(builder, "predecessor")
    anchors = builder.cont(graph.view(tokens, (1, blocks)), blocks)
    first = builder.reshape(graph.op("get_rows", (rank, blocks), table, anchors), rank, 1, 1, blocks)
    first = graph.op("repeat", (rank, top, 1, blocks), first)
    if count == 1:
        return first
    rows = graph.op("get_rows", (rank, ids.ne[0]), table, ids)
    return graph.op("concat", ne, first, graph.view(rows, (rank, top, count - 1, blocks)))
