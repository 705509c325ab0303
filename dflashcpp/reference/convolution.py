"""DFlash-2's local convolution: grouped, depthwise, causal inside the block, kernel made on the fly."""

from __future__ import annotations

import torch

BEFORE, AFTER = 0, 1  # sides of a kernel: on a sublayer's input, on its output


def convolve(x: torch.Tensor, base: torch.Tensor, dynamic: torch.Tensor, side: int) -> torch.Tensor:
    """Mix each row of a block with the rows just before it.

    `x` [batch, rows, hidden]; `base` [2, kernel, hidden]; `dynamic` [batch, rows, 2 * kernel * groups]
    is the projection of the sublayer's normed input, the same for both sides. Rows before the block
    count as zero.
    """
    batch, rows, hidden = x.shape
    kernel = base.shape[1]
    groups = dynamic.shape[-1] // (2 * kernel)
    per_tap = dynamic.view(batch, rows, 2, kernel, groups)[:, :, side]
    coefficients = per_tap.repeat_interleave(hidden // groups, dim=-1) + base[side]
    mixed = torch.zeros_like(x)
    for tap in range(min(kernel, rows)):
        mixed[:, tap:] += coefficients[:, tap:, tap] * x[:, : rows - tap]
    return mixed
