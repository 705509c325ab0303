"""F32, F16 and BF16 in numpy: for conversions that need no libggml.

BF16 rounds to nearest, ties to even: llama.cpp ggml/src/ggml-impl.h `ggml_compute_fp32_to_bf16`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dflashcpp.gguf_file.types import TensorType

if TYPE_CHECKING:
    import numpy as np

FLOATS = frozenset({TensorType.F32, TensorType.F16, TensorType.BF16})


def encode_float(kind: int, rows: np.ndarray) -> np.ndarray:
    """float32 [n, k] -> uint8 [n, bytes per row]. Finite values only (F16 overflow becomes infinity)."""
    import numpy as np

    rows = np.ascontiguousarray(rows, np.float32)
    if kind == TensorType.F32:
        out = rows
    elif kind == TensorType.F16:
        with np.errstate(over="ignore", under="ignore"):
            out = rows.astype(np.float16)
    else:
        bits = rows.view(np.uint32)
        out = ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype(np.uint16)
    return out.view(np.uint8).reshape(rows.shape[0], -1)
