"""The graphs llama.cpp builds for its target architectures, as shapes (see `memory.graph`).

Mirrors `llm_graph_context::build_*` (src/llama-graph.cpp) and the builders in src/models/ at commit
0c1e570: which tensors exist, which operations may write in place, and the order of evaluation. What a
block holds is read from the tensors of the file (biases, norms, gates, experts); the rest comes from
`models/architectures.toml`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from dflashcpp.memory.graph import Graph, Shape, Tensor
from dflashcpp.memory.model import Layer, Model


@dataclass(frozen=True)
class Batch:
    """What a reserve assumes (llama_context::sched_reserve): sizes in tokens, cells and rows.

    `kv_cells` and `swa_cells` are per stream; `outputs` rows get logits; `rollback` recurrent states
    are kept beside the last; `layer_inputs` are the blocks whose input a drafter reads. `widen_k` and
    `widen_v`: a CUDA device turns the whole quantised cache of a layer into f16 to attend to it.
    """

    tokens: int
    sequences: int
    streams: int
    outputs: int
    kv_cells: int
    swa_cells: int
    flash: bool = True
    rotate_k: bool = False
    rotate_v: bool = False
    widen_k: bool = False
    widen_v: bool = False
    rollback: int = 0
    layer_inputs: frozenset[int] = field(default_factory=frozenset)

    @property
    def per_sequence(self) -> int:
        return self.tokens // self.sequences


class Builder:
    """Builds one graph; every method appends to `graph` in llama.cpp's order."""

    def __init__(self, model: Model, batch: Batch) -> None:
        self.model = model
        self.batch = batch
        self.graph = Graph()
        self._masks: dict[bool, Tensor] = {}
        self._index: dict[tuple[bool, str], Tensor] = {}
        self._rotation: dict[tuple[bool, str], Tensor] = {}
        self._copy_ids: Tensor | None = None
        self.positions = self.graph.new(batch.tokens * (4 if "rope.dimension_sections" in model.keys else 1))
        self.out_ids = self.graph.new(batch.outputs)

    # small operations

    def unary(self, name: str, x: Tensor, *others: Tensor) -> Tensor:
        """An operation whose result looks like `x` and may take its place."""
        return self.graph.op(name, x.ne, x, *others)

    def cont(self, x: Tensor, *ne: int) -> Tensor:
        return self.graph.op("cont", ne or x.ne, x)

    def reshape(self, x: Tensor, *ne: int) -> Tensor:
        return self.graph.view(x, ne)

    def matmul(self, weight: Tensor, x: Tensor) -> Tensor:
        return self.graph.op("mul_mat", (weight.ne[1], x.ne[1], x.ne[2], x.ne[3]), weight, x)

    def linear(self, name: str, x: Tensor) -> Tensor:
        """`build_lora_mm` with the weight of that name, its scale and nothing else."""
        weight = self.graph.weight(*self.model.ne(f"{name}.weight"))
        out = self.matmul(weight, x)
        if f"{name}.scale" in self.model.tensors:
            out = self.unary("mul", out, self.graph.weight(1))
        return out

    def biased(self, name: str, x: Tensor) -> Tensor:
        out = self.linear(name, x)
        if f"{name}.bias" in self.model.tensors:
            out = self.unary("add", out, self.graph.weight(out.ne[0]))
        return out

    def norm(self, x: Tensor, weight: bool = True) -> Tensor:
        out = self.unary("rms_norm", x)
        return self.unary("mul", out, self.graph.weight(x.ne[0])) if weight else out

    def pick(self, x: Tensor) -> Tensor:
        """Keep the rows that have an output."""
        return self.graph.op("get_rows", (x.ne[0], self.batch.outputs), x, self.out_ids)

    # inputs

    def token_embedding(self, embd: int, weight: Tensor) -> Tensor:
        """`build_inp_embd`: the row lookup, and beside it the input for ready-made embeddings."""
        tokens = self.graph.new(self.batch.tokens)
        rows = self.graph.op("get_rows", (embd, self.batch.tokens), weight, tokens)
        self.graph.expand(rows)
        self.graph.expand(self.graph.new(embd, self.batch.tokens))
        if "embedding_scale" in self.model.keys:
            rows = self.unary("scale", rows)
        self.graph.expand(rows)
        return rows

    def mask(self, sliding: bool) -> Tensor:
        if sliding not in self._masks:
            batch = self.batch
            cells = batch.swa_cells if sliding else batch.kv_cells
            self._masks[sliding] = self.graph.new(
                cells, batch.tokens // batch.streams, 1, batch.streams, size=2 if batch.flash else 4
            )
        return self._masks[sliding]

    def index(self, sliding: bool, which: str, rows: int) -> Tensor:
        return self._index.setdefault((sliding, which), self.graph.new(rows, size=8))

    def rotation(self, sliding: bool, which: str, head: int) -> Tensor:
        """The Hadamard matrix for a quantised cache (build_input_k_rot, build_input_v_rot)."""
        side = 64
        while which == "k" and head % (side * 2) == 0:
            side *= 2
        return self._rotation.setdefault((sliding, which), self.graph.new(side, side))

    def rotate(self, x: Tensor, sliding: bool, which: str, head: int) -> Tensor:
        matrix = self.rotation(sliding, which, head)
        rows = self.reshape(x, matrix.ne[0], x.nbytes // 4 // matrix.ne[0])
        return self.reshape(self.matmul(matrix, rows), *x.ne)

    # attention

    def heads(self, x: Tensor, layer: Layer, count: int, head: int) -> Tensor:
        return self.reshape(x, head, count, self.batch.tokens)

    def qkv(self, il: int, x: Tensor, layer: Layer) -> tuple[Tensor, Tensor, Tensor]:
        """`build_qkv`: separate or fused projections, split into heads."""
        model, graph, tokens = self.model, self.graph, self.batch.tokens
        if model.has(il, "attn_qkv.weight"):
            fused = self.biased(f"blk.{il}.attn_qkv", x)
            strides: Shape = (1, layer.head_k, fused.ne[0], fused.ne[0] * tokens)
            return (
                graph.view(fused, (layer.head_k, layer.heads, tokens), strides),
                graph.view(fused, (layer.head_k, layer.kv_heads, tokens), strides),
                graph.view(fused, (layer.head_v, layer.kv_heads, tokens), strides),
            )
        q = self.biased(f"blk.{il}.attn_q", x)
        k = self.biased(f"blk.{il}.attn_k", x)
        v = self.biased(f"blk.{il}.attn_v", x) if model.has(il, "attn_v.weight") else k
        return (
            self.heads(q, layer, layer.heads, layer.head_k),
            self.heads(k, layer, layer.kv_heads, layer.head_k),
            self.heads(v, layer, layer.kv_heads, layer.head_v),
        )

    def store(self, layer: Layer, k: Tensor, v: Tensor) -> None:
        """`cpy_k` and `cpy_v`: write the new rows into the cache."""
        batch, graph = self.batch, self.graph
        for which, x, row in (("k", k, layer.kv_row[0]), ("v", v, layer.kv_row[1])):
            scattered = which == "v" and not batch.flash
            rows = batch.tokens * (self._widest_v() if scattered else 1)
            cache = graph.weight(1 if scattered else row, 1)
            flat = graph.view(x, (1, row * batch.tokens) if scattered else (row, batch.tokens))
            index = self.index(layer.sliding, which, rows)
            graph.expand(graph.view(cache, cache.ne, None, flat, index))

    def _widest_v(self) -> int:
        return max(layer.kv_row[1] for layer in self.model.layers if not layer.recurrent)

    def attend(self, il: int, q: Tensor, layer: Layer) -> Tensor:
        """`build_attn_mha`: flash attention, or the score matrix of a whole ubatch without it.

        Scratch: `ggml_cuda_flash_attn_ext_get_alloc_size` (ggml/src/ggml-cuda/fattn.cu).
        """
        batch, graph = self.batch, self.graph
        per_stream = batch.tokens // batch.streams
        query = graph.view(q, (layer.head_k, per_stream, layer.heads, batch.streams), q.strides)
        mask = self.mask(layer.sliding)
        cells = mask.ne[0]
        keys = graph.weight(layer.head_k, cells, layer.kv_heads, batch.streams)
        values = graph.weight(layer.head_v, cells, layer.kv_heads, batch.streams)
        rows = (layer.head_v * layer.heads, batch.tokens)
        if batch.flash:
            out = graph.op(
                "flash", (layer.head_v, layer.heads, per_stream, batch.streams), query, keys, values, mask
            )
            out.scratch = 2 * (keys.nbytes // 4 * batch.widen_k + values.nbytes // 4 * batch.widen_v)
            return graph.expand(graph.view(out, rows))
        scores = graph.op("mul_mat", (cells, per_stream, layer.heads, batch.streams), keys, query)
        if "attn_logit_softcapping" in self.model.keys:
            for name in ("scale", "unary", "scale"):
                scores = self.unary(name, scores)
        weights = self.unary("soft_max", scores, mask)
        mixed = graph.op("mul_mat", (layer.head_v, per_stream, layer.heads, batch.streams), values, weights)
        turned = graph.view(mixed, (layer.head_v, layer.heads, per_stream, batch.streams), mixed.strides)
        return graph.expand(self.cont(turned, *rows))

    def attention(self, il: int, layer: Layer, q: Tensor, k: Tensor | None, v: Tensor | None) -> Tensor:
        """`build_attn` without the output projection; no K and V: the cache of an earlier layer."""
        batch, graph, sliding = self.batch, self.graph, layer.sliding
        if batch.rotate_k:
            q = self.rotate(q, sliding, "k", layer.head_k)
            k = k and self.rotate(k, sliding, "k", layer.head_k)
        if batch.rotate_v:
            v = v and self.rotate(v, sliding, "v", layer.head_v)
        graph.expand(q)
        if k is not None and v is not None:
            graph.expand(v)
            graph.expand(k)
            self.store(layer, k, v)
        out = self.attend(il, q, layer)
        return self.rotate(out, sliding, "v", layer.head_v) if batch.rotate_v else out

    # feed-forward

    def feed_forward(self, prefix: str, x: Tensor, *, shared: str = "") -> Tensor:
        """`build_ffn`: gated, or squared without a gate; `shared` is the suffix `_shexp`."""
        up = self.biased(f"{prefix}.ffn_up{shared}", x)
        if f"{prefix}.ffn_gate{shared}.weight" in self.model.tensors:
            gate = self.biased(f"{prefix}.ffn_gate{shared}", x)
            hidden = self.graph.op("glu", gate.ne, gate, up)
        elif self.model.rules.get("activation") == "square":
            hidden = self.unary("sqr", self.unary("unary", up))
        else:
            hidden = self.graph.op("glu", (up.ne[0] // 2, *up.ne[1:]), up)
        return self.biased(f"{prefix}.ffn_down{shared}", hidden)

    def router(self, prefix: str, x: Tensor) -> Tensor:
        logits = self.linear(f"{prefix}.ffn_gate_inp", x)
        if f"{prefix}.ffn_gate_inp.bias" in self.model.tensors:
            logits = self.unary("add", logits, self.graph.weight(logits.ne[0]))
        return logits

    def experts(self, prefix: str, x: Tensor, logits: Tensor, *, normed: bool, weighted: bool) -> Tensor:
        """`build_moe_ffn`. `normed`: weights are divided by their sum; `weighted`: softmax of the chosen."""
        graph, model, tokens = self.graph, self.model, x.ne[1]
        used = model.experts_used
        probs = logits if weighted else self.unary("soft_max", logits)
        chooser = probs
        if f"{prefix}.exp_probs_b.bias" in model.tensors:
            chooser = graph.op("add", probs.ne, probs, graph.weight(model.experts))
        order = graph.op("argsort", (model.experts, tokens), chooser)
        chosen = graph.view(order, (used, tokens), (1, model.experts, model.experts * tokens, 1))
        table = graph.view(probs, (1, model.experts, tokens))
        weights = graph.op("get_rows", (1, used, tokens), table, chosen)
        if weighted:
            soft = self.unary("soft_max", self.reshape(weights, used, tokens))
            weights = self.reshape(soft, 1, used, tokens)
        if normed:
            flat = self.reshape(weights, used, tokens)
            total = self.unary("clamp", graph.op("sum_rows", (1, tokens), flat))
            weights = self.reshape(self.unary("div", flat, total), 1, used, tokens)
        if model.keys.get("expert_weights_scale", 0.0) not in (0.0, 1.0):
            weights = self.unary("scale", weights)
        graph.expand(weights)
        return self._mix(prefix, x, chosen, weights)

    def expert_linear(self, name: str, x: Tensor, chosen: Tensor) -> Tensor:
        weight = self.graph.weight(*self.model.ne(f"{name}.weight"))
        ne = (weight.ne[1], chosen.ne[0], chosen.ne[1])
        out = self.graph.op("mul_mat_id", ne, weight, x, chosen)
        if f"{name}.bias" in self.model.tensors:
            out = self.unary("add_id", out, self.graph.weight(ne[0]), chosen)
        return out

    def _mix(self, prefix: str, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        graph, tokens, used = self.graph, x.ne[1], chosen.ne[0]
        one = self.reshape(x, x.ne[0], 1, tokens)
        if f"{prefix}.ffn_gate_up_exps.weight" in self.model.tensors:
            both = self.expert_linear(f"{prefix}.ffn_gate_up_exps", one, chosen)
            half: Shape = (both.ne[0] // 2, *both.ne[1:])
            gate = graph.view(both, half, both.strides)
            up = graph.view(both, half, both.strides)
            hidden = graph.op("glu", half, gate, up)
        elif f"{prefix}.ffn_gate_exps.weight" in self.model.tensors:
            up = self.expert_linear(f"{prefix}.ffn_up_exps", one, chosen)
            gate = self.expert_linear(f"{prefix}.ffn_gate_exps", one, chosen)
            hidden = graph.op("glu", up.ne, gate, up)
        else:
            up = self.expert_linear(f"{prefix}.ffn_up_exps", one, chosen)
            hidden = self.unary("sqr", self.unary("unary", up))
        parts = self.expert_linear(f"{prefix}.ffn_down_exps", hidden, chosen)
        parts = self.unary("mul", parts, weights)
        graph.expand(parts)
        views = [
            graph.expand(graph.view(parts, (parts.ne[0], tokens), self._slab(parts))) for _ in range(used)
        ]
        out = views[0]
        for view in views[1:]:
            out = graph.expand(graph.op("add", (parts.ne[0], tokens), out, view))
        return self.cont(out) if used == 1 else out

    def _slab(self, parts: Tensor) -> Shape:
        return (1, parts.strides[2], parts.strides[3], parts.strides[3])

    # recurrent state

    def state_rows(self, elements: int) -> Tensor:
        """`build_rs`: the states of the sequences of this batch, copied out of the cache."""
        cache = self.graph.weight(elements, self.batch.sequences)
        return self.graph.expand(self.copied(cache, elements))

    def copied(self, cache: Tensor, elements: int) -> Tensor:
        return self.graph.op("get_rows", (elements, self.batch.sequences), cache, self.copy_ids())

    def copy_ids(self) -> Tensor:
        if self._copy_ids is None:
            self._copy_ids = self.graph.new(self.batch.sequences)
        return self._copy_ids

    def write_state(self, x: Tensor) -> None:
        """A copy into the recurrent cache: memory of the cache, not of the graph."""
        cache = self.graph.weight(*x.ne)
        self.graph.expand(self.graph.view(cache, x.ne, None, x))
