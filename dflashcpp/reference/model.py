"""The drafter itself: encoder, injected context, one pass over a block, logits, a draft.

z      = RMSNorm(fc . concatenated taps)                         one row for each committed token
K, V   = per layer from z, kept for good                         (`inject`)
block  = [anchor, MASK, MASK, ...] through all layers            (`block`)
logits = head(norm(rows)) * multiplier, softcapped               from rows 1..: the anchor has none
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch.nn import functional

from dflashcpp.drafter import Drafter
from dflashcpp.errors import DflashError
from dflashcpp.reference.attention import attend, visible
from dflashcpp.reference.convolution import AFTER, BEFORE, convolve
from dflashcpp.reference.rope import inverse_frequencies, rotate
from dflashcpp.reference.sampling import draw, probabilities
from dflashcpp.reference.selector import walk
from dflashcpp.reference.vocabulary import Vocabulary
from dflashcpp.reference.weights import Weights

Body = Callable[[torch.Tensor], torch.Tensor]

_ACTIVATIONS: dict[str, Body] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_pytorch_tanh": lambda x: functional.gelu(x, approximate="tanh"),
}


@dataclass
class Context:
    """What is known of committed tokens at `positions` [batch, n].

    Keys and values are one tensor a layer, [batch, n, kv_heads, head_dim].
    """

    positions: torch.Tensor
    keys: list[torch.Tensor] = field(default_factory=list)
    values: list[torch.Tensor] = field(default_factory=list)

    def extended(self, more: Context) -> Context:
        """This context followed by `more`."""
        pairs = zip(self.keys, self.values, more.keys, more.values, strict=True)
        joined = [(torch.cat((k, k2), 1), torch.cat((v, v2), 1)) for k, v, k2, v2 in pairs]
        positions = torch.cat((self.positions, more.positions), 1)
        return Context(positions, [k for k, _ in joined], [v for _, v in joined])


@dataclass(frozen=True)
class Draft:
    """Drafted `tokens` [batch, slots] and, when they were sampled, what they were drawn from.

    `q` [batch, slots, K] over `candidates` [batch, slots, K]; `candidates` None: over the vocabulary.
    `hidden` and `logits` are the rows the tokens were read from.
    """

    tokens: torch.Tensor
    hidden: torch.Tensor
    logits: torch.Tensor
    candidates: torch.Tensor | None = None
    q: torch.Tensor | None = None
    scores: torch.Tensor | None = None


class ReferenceDrafter:
    """A drafter run from its settings, its weights and a vocabulary. All tensors are float32."""

    def __init__(self, drafter: Drafter, weights: Weights, vocabulary: Vocabulary) -> None:
        if drafter.activation not in _ACTIVATIONS:
            raise DflashError(f"the reference does not know the activation {drafter.activation!r}")
        self.drafter = drafter
        self.weights = weights
        self.vocabulary = vocabulary
        self._activation = _ACTIVATIONS[drafter.activation]
        divisors = weights.tensor("rope_freqs.weight") if "rope_freqs.weight" in weights.names() else None
        self._frequencies = inverse_frequencies(drafter.rope, drafter.head_dim, divisors)

    def encode(self, features: torch.Tensor) -> torch.Tensor:
        """Taps [batch, n, taps * hidden], in the drafter's order, to z [batch, n, hidden]."""
        return self._norm("enc.output_norm.weight", self.weights.linear("fc.weight", features))

    def inject(self, features: torch.Tensor, positions: torch.Tensor) -> Context:
        """The context of tokens at `positions` [batch, n] whose taps are `features`."""
        z = self.encode(features)
        context = Context(positions)
        for layer in range(self.drafter.layers):
            key, value = self._key_value(layer, z, positions)
            context.keys.append(key)
            context.values.append(value)
        return context

    def block(self, context: Context, ids: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
        """Final-normed rows [batch, rows, hidden] of block `ids` [batch, rows] at `start` [batch]."""
        positions = start[:, None] + torch.arange(ids.shape[1])
        x = self.vocabulary.embed(ids) * (self.drafter.embedding_scale or 1.0)
        for layer in range(self.drafter.layers):
            x = x + self._sublayer(layer, "attn", x, lambda u: self._attention(layer, u, positions, context))  # noqa: B023
            x = x + self._sublayer(layer, "ffn", x, lambda u: self._feed_forward(layer, u))  # noqa: B023
        return self._norm("output_norm.weight", x)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Head, multiplier and softcap on final-normed rows [..., hidden]: [..., vocab]."""
        return self.transformed(self.vocabulary.logits(hidden))

    def transformed(self, logits: torch.Tensor) -> torch.Tensor:
        """The head's raw logits after this drafter's multiplier and softcap."""
        logits = logits * (self.drafter.logit_scale or 1.0)
        if self.drafter.softcap:
            logits = (logits / self.drafter.softcap).tanh() * self.drafter.softcap
        return logits

    def draft(
        self,
        context: Context,
        anchor: torch.Tensor,
        start: torch.Tensor,
        *,
        rows: int | None = None,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        generator: torch.Generator | None = None,
    ) -> Draft:
        """Draft `rows` - 1 tokens after `anchor` [batch], which stands at position `start` [batch].

        `rows` None is the trained block. Above temperature 0 DFlash-2 walks its candidates at that
        temperature; DFlash draws each row from its logits after top-k and top-p.
        """
        masks = torch.full(
            (anchor.shape[0], (rows or self.drafter.block_size) - 1), self.drafter.mask_token_id
        )
        hidden = self.block(context, torch.cat((anchor[:, None], masks), dim=1), start)[:, 1:]
        logits = self.logits(hidden)
        return self.choose(hidden, logits, anchor, temperature, top_k=top_k, top_p=top_p, generator=generator)

    def choose(
        self,
        hidden: torch.Tensor,
        logits: torch.Tensor,
        anchor: torch.Tensor,
        temperature: float = 0.0,
        *,
        top_k: int = 0,
        top_p: float = 1.0,
        generator: torch.Generator | None = None,
    ) -> Draft:
        """The tokens of a draft from its final-normed rows [batch, slots, hidden] and their logits."""
        if self.drafter.selector_top_k:
            width = self.drafter.selector_top_k
            path = walk(self.weights, hidden, logits, anchor, width, temperature, generator)
            return Draft(path.tokens, hidden, logits, path.candidates, path.q, path.scores)
        if temperature <= 0:
            return Draft(logits.argmax(dim=-1), hidden, logits)
        q = probabilities(logits, temperature, top_k=top_k, top_p=top_p)
        tokens = draw(q.flatten(0, 1), generator).view(q.shape[:2])
        return Draft(tokens, hidden, logits, q=q)

    def _sublayer(self, layer: int, kind: str, x: torch.Tensor, body: Body) -> torch.Tensor:
        """Norm, then `body`; DFlash-2 mixes neighbouring rows before and after it."""
        u = self._norm(f"blk.{layer}.{kind}_norm.weight", x)
        if not self.drafter.conv_kernel:
            return body(u)
        base = self.weights.tensor(f"blk.{layer}.{kind}_conv_base")
        dynamic = self.weights.linear(f"blk.{layer}.{kind}_conv_proj.weight", u)
        return convolve(body(convolve(u, base, dynamic, BEFORE)), base, dynamic, AFTER)

    def _attention(
        self, layer: int, u: torch.Tensor, positions: torch.Tensor, context: Context
    ) -> torch.Tensor:
        name, drafter = f"blk.{layer}", self.drafter
        query = self._heads(self.weights.linear(f"{name}.attn_q.weight", u))
        query = self._turn(self._norm(f"{name}.attn_q_norm.weight", query), positions)
        key, value = self._key_value(layer, u, positions)
        seen = visible(
            positions,
            context.positions,
            causal=drafter.causal[layer],
            window=drafter.window if drafter.sliding[layer] else None,
        )
        mixed = attend(
            query,
            torch.cat((context.keys[layer], key), dim=1),
            torch.cat((context.values[layer], value), dim=1),
            seen,
            scale=drafter.attention_scale or drafter.head_dim**-0.5,
            sinks=self.weights.tensor(f"{name}.attn_sinks.weight") if drafter.sinks else None,
        )
        out = self.weights.linear(f"{name}.attn_output.weight", mixed.flatten(2))
        return out * (drafter.value_scale or 1.0)

    def _key_value(
        self, layer: int, x: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        key = self._heads(self.weights.linear(f"blk.{layer}.attn_k.weight", x))
        value = self._heads(self.weights.linear(f"blk.{layer}.attn_v.weight", x))
        return self._turn(self._norm(f"blk.{layer}.attn_k_norm.weight", key), positions), value

    def _feed_forward(self, layer: int, u: torch.Tensor) -> torch.Tensor:
        gate = self._activation(self.weights.linear(f"blk.{layer}.ffn_gate.weight", u))
        up = self.weights.linear(f"blk.{layer}.ffn_up.weight", u)
        return self.weights.linear(f"blk.{layer}.ffn_down.weight", gate * up)

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(*x.shape[:-1], -1, self.drafter.head_dim)

    def _turn(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return rotate(x, positions, self._frequencies, self.drafter.rope.attention_factor)

    def _norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        spread = x.pow(2).mean(dim=-1, keepdim=True) + self.drafter.rms_eps
        return x * spread.rsqrt() * self.weights.tensor(name)
