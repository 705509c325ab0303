"""A small Llama or Qwen3 target in torch, from a GGUF, that gives up the inputs of its layers.

Only what the tests' targets need: RMSNorm, rotary positions (interleaved for `llama`, as its GGUF is
permuted; halves for `qwen3`), grouped-query attention, optional q/k norms, SwiGLU, tied or own head.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch.nn import functional

from dflashcpp.gguf_file import read_header
from dflashcpp.reference.weights import GgufWeights


class LlamaTarget:
    """Feeds tokens with a cache; `taps` number the layers whose input is returned."""

    def __init__(self, path: Path, taps: Sequence[int]) -> None:
        header = read_header(path)
        arch = str(header.get("general.architecture"))
        self.weights = GgufWeights(header, keep_bytes=2**31)
        self.taps = tuple(taps)
        self.layers = int(header.get(f"{arch}.block_count"))
        self.heads = int(header.get(f"{arch}.attention.head_count"))
        self.kv_heads = int(header.get(f"{arch}.attention.head_count_kv"))
        hidden = int(header.get(f"{arch}.embedding_length"))
        self.head_dim = int(header.get(f"{arch}.attention.key_length", hidden // self.heads))
        self.eps = float(header.get(f"{arch}.attention.layer_norm_rms_epsilon"))
        theta = float(header.get(f"{arch}.rope.freq_base"))
        self.frequencies = 1.0 / theta ** (torch.arange(0, self.head_dim, 2).float() / self.head_dim)
        self.interleaved = arch == "llama"
        self.reset()

    def reset(self) -> None:
        """Forget every token."""
        self.keys: list[torch.Tensor | None] = [None] * self.layers
        self.values: list[torch.Tensor | None] = [None] * self.layers
        self.length = 0

    def rewind(self, length: int) -> None:
        """Keep the first `length` tokens."""
        self.keys = [key[:length] for key in self.keys if key is not None]
        self.values = [value[:length] for value in self.values if value is not None]
        self.length = length

    def feed(self, tokens: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits [n, vocab] and the inputs of the tapped layers, joined: [n, taps * hidden]."""
        x = self.weights.gather("token_embd.weight", torch.tensor(list(tokens)))
        positions = torch.arange(self.length, self.length + len(tokens))
        inputs = {}
        for layer in range(self.layers):
            inputs[layer] = x
            x = x + self._attention(layer, self._norm(f"blk.{layer}.attn_norm.weight", x), positions)
            x = x + self._feed_forward(layer, self._norm(f"blk.{layer}.ffn_norm.weight", x))
        self.length += len(tokens)
        head = "output.weight" if "output.weight" in self.weights.names() else "token_embd.weight"
        logits = self.weights.linear(head, self._norm("output_norm.weight", x))
        return logits, torch.cat([inputs[tap] for tap in self.taps], dim=-1)

    def _attention(self, layer: int, u: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        query, key, value = (self._heads(layer, part, u) for part in "qkv")
        query, key = self._turn(query, positions), self._turn(key, positions)
        before_key, before_value = self.keys[layer], self.values[layer]
        if before_key is not None and before_value is not None:
            key, value = torch.cat((before_key, key)), torch.cat((before_value, value))
        self.keys[layer], self.values[layer] = key, value
        seen = torch.arange(key.shape[0])[None] <= positions[:, None]
        group = self.heads // self.kv_heads
        mixed = functional.scaled_dot_product_attention(
            query.transpose(0, 1),
            key.repeat_interleave(group, dim=1).transpose(0, 1),
            value.repeat_interleave(group, dim=1).transpose(0, 1),
            attn_mask=seen,
        )
        return self.weights.linear(f"blk.{layer}.attn_output.weight", mixed.transpose(0, 1).flatten(1))

    def _heads(self, layer: int, part: str, u: torch.Tensor) -> torch.Tensor:
        x = self.weights.linear(f"blk.{layer}.attn_{part}.weight", u)
        x = x.view(len(u), -1, self.head_dim)
        norm = f"blk.{layer}.attn_{part}_norm.weight"
        return self._norm(norm, x) if norm in self.weights.names() else x

    def _turn(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        angles = positions[:, None].float() * self.frequencies
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        if self.interleaved:
            first, second = x[..., 0::2], x[..., 1::2]
            return torch.stack((first * cos - second * sin, second * cos + first * sin), dim=-1).flatten(-2)
        first, second = x.chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)

    def _feed_forward(self, layer: int, u: torch.Tensor) -> torch.Tensor:
        gate = functional.silu(self.weights.linear(f"blk.{layer}.ffn_gate.weight", u))
        up = self.weights.linear(f"blk.{layer}.ffn_up.weight", u)
        return self.weights.linear(f"blk.{layer}.ffn_down.weight", gate * up)

    def _norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        spread = x.pow(2).mean(dim=-1, keepdim=True) + self.eps
        return x * spread.rsqrt() * self.weights.tensor(name)
