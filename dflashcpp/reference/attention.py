"""Who sees whom, and the attention of one draft layer."""

from __future__ import annotations

import torch


def visible(
    queries: torch.Tensor, context: torch.Tensor, *, causal: bool, window: int | None
) -> torch.Tensor:
    """Which keys a block's rows see: bool [batch, rows, context + rows].

    `queries` [batch, rows] are the block's positions, `context` [batch, n] those of the injected
    keys, all older. `window` counts the query itself; None: the layer attends to everything.
    `causal` only matters inside the block: a context key is always in the past.
    """
    keys = torch.cat((context, queries), dim=1)
    distance = queries[:, :, None] - keys[:, None, :]
    seen = torch.ones_like(distance, dtype=torch.bool)
    if causal:
        seen &= distance >= 0
    if window is not None:
        seen &= distance.abs() < window
    return seen


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    seen: torch.Tensor,
    *,
    scale: float,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Grouped-query attention: [batch, rows, heads, head_dim].

    `query` [batch, rows, heads, head_dim]; `key` and `value` [batch, keys, kv_heads, head_dim];
    `sinks` [heads] is one more logit a head that takes weight and gives nothing.
    """
    batch, rows, heads, head_dim = query.shape
    grouped = query.view(batch, rows, key.shape[2], -1, head_dim)
    logits = torch.einsum("brghd,bkgd->bghrk", grouped, key) * scale
    logits = logits.masked_fill(~seen[:, None, None], float("-inf"))
    if sinks is not None:
        column = sinks.view(1, key.shape[2], -1, 1, 1).expand(*logits.shape[:-1], 1)
        logits = torch.cat((logits, column), dim=-1)
    weights = logits.softmax(dim=-1)[..., : key.shape[1]]
    mixed = torch.einsum("bghrk,bkgd->brghd", weights, value)
    return mixed.reshape(batch, rows, heads, head_dim)
