"""How far a conversion may be from its source: per stored type, and for what the drafter computes.

A tensor's error is bounded by its type alone. What that does to logits depends on the drafter, so it
is not guessed: the source is run once more with random errors of the same size in every tensor, and
a conversion may be off by a few times as much. Measured ratios and margins: docs/verify.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dflashcpp.reference.comparison import Numbers

# Root mean square error over that of the source: 1.25 times the worst of five distributions (normal,
# Laplace, Student t with 4 and 3 degrees of freedom, normal with outlier columns), as measured with
# libggml by `benchmarks/verify_bounds.py`. Types that need an importance matrix: estimated.
TENSOR_BOUNDS = {
    "F64": 1e-6,
    "F32": 1e-6,
    "F16": 0.0005,
    "BF16": 0.0025,
    "Q8_0": 0.0125,
    "Q6_K": 0.035,
    "Q5_K": 0.06,
    "Q5_1": 0.061,
    "Q5_0": 0.097,
    "Q4_K": 0.117,
    "Q4_1": 0.127,
    "NVFP4": 0.13,
    "IQ4_NL": 0.142,
    "IQ4_XS": 0.144,
    "Q4_0": 0.18,
    "MXFP4": 0.2,
    "Q3_K": 0.24,
    "IQ3_S": 0.3,
    "IQ3_XXS": 0.38,
    "Q2_K": 0.445,
    "IQ2_XS": 0.55,
    "IQ2_XXS": 0.6,
    "IQ2_S": 0.63,
    "IQ1_M": 0.76,
    "IQ1_S": 0.8,
    "TQ1_0": 1.04,
    "TQ2_0": 1.04,
}
_INTEGERS = 0.0  # d2t is a table, not a number

_ERROR, _KL_MEAN, _KL_MAX, _COUNTS = 2.0, 4.0, 8.0, 3.0  # times what random errors do
_SPARE = 4  # rows, or blocks, that may differ besides: they are few, and ties are close
_ROUNDING, _KL_ROUNDING = 1e-5, 1e-6  # float32


@dataclass(frozen=True)
class Limits:
    """What the numbers of a comparison may be: at most, and for the last two at least."""

    hidden_error: float
    edge_error: float
    kl_mean: float
    kl_max: float
    top1: float
    blocks_equal: float


def tensor_bound(type_name: str) -> float:
    """The largest error of one tensor stored as `type_name`; whole numbers must be the same."""
    return TENSOR_BOUNDS.get(type_name, _INTEGERS)


def limits(noise: Numbers | None) -> Limits:
    """Limits from what random errors of the same size did to the source; None: there were no errors."""
    if noise is None:
        return Limits(_ROUNDING, _ROUNDING, _KL_ROUNDING, _KL_ROUNDING, 1.0, 1.0)
    return Limits(
        hidden_error=_ERROR * noise.hidden_error + _ROUNDING,
        edge_error=_ERROR * (noise.edge_error or 0.0) + _ROUNDING,
        kl_mean=_KL_MEAN * noise.kl_mean + _KL_ROUNDING,
        kl_max=_KL_MAX * noise.kl_max + _KL_ROUNDING,
        top1=_share(noise.top1, noise.rows),
        blocks_equal=_share(noise.blocks_equal, noise.blocks),
    )


def _share(agreed: float, count: int) -> float:
    """The least share of `count` that must agree where random errors left `agreed`."""
    return max(0.0, 1.0 - _COUNTS * (1.0 - agreed) - _SPARE / count)


def outside(numbers: Numbers, allowed: Limits) -> list[str]:
    """A sentence for each number that is further off than the stored types explain."""
    checks = [
        ("mean KL", numbers.kl_mean, allowed.kl_mean, 1),
        ("largest KL", numbers.kl_max, allowed.kl_max, 1),
        ("error of the final rows", numbers.hidden_error, allowed.hidden_error, 1),
        ("error of the selector's edges", numbers.edge_error or 0.0, allowed.edge_error, 1),
        ("top-1 agreement", numbers.top1, allowed.top1, -1),
        ("share of equal blocks", numbers.blocks_equal, allowed.blocks_equal, -1),
    ]
    return [
        f"{name} is {value:.3g}; what is stored explains {limit:.3g}"
        for name, value, limit, sign in checks
        if sign * value > sign * limit
    ]
