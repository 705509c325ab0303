"""Rotary positions of a drafter: default, linear, llama3, YaRN; whole heads or their first part.

NeoX style: element i is turned with element i + dims / 2. Formulas as in transformers
`modeling_rope_utils.py` and llama.cpp `ggml_rope_ext` / `rope_yarn` (ggml/src/ggml-cpu/ops.cpp).
M-RoPE drafters only see text, whose temporal, height and width positions are one number: the same.
"""

from __future__ import annotations

import math

import torch

from dflashcpp.drafter import Rope
from dflashcpp.errors import DflashError


def inverse_frequencies(rope: Rope, head_dim: int, divisors: torch.Tensor | None = None) -> torch.Tensor:
    """Radians a position, float32 [dims / 2].

    `divisors` [dims / 2] is a GGUF's `rope_freqs.weight`; without it llama3's are computed.
    Raises DflashError for a type, or sections, that this reference does not know.
    """
    _check(rope)
    dims = rope.dims or head_dim
    plain = 1.0 / rope.theta ** (torch.arange(0, dims, 2).float() / dims)
    if divisors is None:
        computed = rope.frequency_divisors(head_dim)
        divisors = None if computed is None else torch.tensor(computed)
    if rope.type == "llama3" and divisors is None:
        raise DflashError("llama3 rope needs its scaling numbers or the tensor rope_freqs.weight")
    if divisors is not None:
        plain = plain / divisors
    if rope.type == "linear":
        plain = plain / rope.factor
    if rope.type == "yarn":
        plain = _yarn(plain, rope, dims)
    return plain


def _check(rope: Rope) -> None:
    if rope.type not in {"default", "linear", "llama3", "yarn"}:
        raise DflashError(f"the reference does not know rope type {rope.type!r}")
    if rope.sections is not None and any(rope.sections[3:]):
        raise DflashError(f"the reference only knows M-RoPE sections of text, not {list(rope.sections)}")


def _yarn(plain: torch.Tensor, rope: Rope, dims: int) -> torch.Tensor:
    """Slow pairs are interpolated (divided by the factor), fast ones kept, a ramp between."""
    if not rope.original_context:
        raise DflashError("YaRN needs the original context length")
    low = max(math.floor(_pair_turning(rope.beta_fast, rope, dims)), 0)
    high = min(math.ceil(_pair_turning(rope.beta_slow, rope, dims)), dims - 1)
    pair = torch.arange(dims // 2).float()
    interpolated = ((pair - low) / max(high - low, 1e-3)).clamp(0, 1)
    return plain / rope.factor * interpolated + plain * (1 - interpolated)


def _pair_turning(turns: float, rope: Rope, dims: int) -> float:
    """Which pair (fractional) makes `turns` full turns over the original context."""
    assert rope.original_context
    ratio = rope.original_context / (turns * 2 * math.pi)
    return dims * math.log(ratio) / (2 * math.log(rope.theta))


def rotate(
    x: torch.Tensor, positions: torch.Tensor, frequencies: torch.Tensor, magnitude: float
) -> torch.Tensor:
    """Turn `x` [batch, rows, heads, head_dim] by its `positions` [batch, rows]; what is past dims stays."""
    half = frequencies.shape[0]
    angles = positions[..., None].float() * frequencies
    cos, sin = angles.cos()[:, :, None] * magnitude, angles.sin()[:, :, None] * magnitude
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)
