"""The drafter in torch, written from the maths alone: what every conversion is measured against.

`model.ReferenceDrafter` drafts, `selector` walks the candidates, `sampling` holds the verification
rule, `generate` runs a whole conversation with any target. Weights come from a checkpoint or are
dequantised from a GGUF (`weights`). Slow and simple on purpose: float32, no caching tricks.
"""

from __future__ import annotations

from dflashcpp.errors import DflashError


def require_torch() -> None:
    """Raise DflashError with the pip command if PyTorch is not installed."""
    try:
        import torch  # noqa: F401
    except ImportError as error:
        raise DflashError(
            "the reference drafter needs PyTorch, which is not installed",
            hint="pip install torch",
        ) from error
