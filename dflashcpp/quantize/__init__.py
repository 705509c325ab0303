"""Quantising: recipes that equal llama-quantize's, and libggml to do it.

choices = choose_types("Q4_K_M", tensors)
library = load_libggml() if needs_libggml(choices.values()) else None
data = encode(choices[name].type, rows, library)
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from dflashcpp.errors import DflashError
from dflashcpp.gguf_file.types import TensorType
from dflashcpp.quantize.floats import FLOATS, encode_float
from dflashcpp.quantize.libggml import LibGgml, load_libggml
from dflashcpp.quantize.mix import Mix, check_name, mix_of
from dflashcpp.quantize.patterns import Override, parse_overrides, tensor_type
from dflashcpp.quantize.recipes import Choice, Recipe, TensorLike, choose_types, recipe, recipe_names

if TYPE_CHECKING:
    import numpy as np

__all__ = [
    "Choice",
    "LibGgml",
    "Mix",
    "Override",
    "Recipe",
    "TensorLike",
    "check_name",
    "choose_types",
    "decode",
    "encode",
    "load_libggml",
    "mix_of",
    "needs_libggml",
    "parse_overrides",
    "recipe",
    "recipe_names",
    "tensor_type",
]


def needs_libggml(choices: Iterable[Choice]) -> bool:
    """Whether any quantisable tensor gets a type that numpy alone cannot write."""
    return any(choice.quantisable and choice.type not in FLOATS for choice in choices)


def decode(kind: int, data: np.ndarray, what: str) -> np.ndarray:
    """uint8 [n, bytes per row] -> float32 [n, k]; DflashError, naming `what`, for types unknown to gguf."""
    import numpy as np
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    try:
        return dequantize(data, GGMLQuantizationType(int(kind))).astype(np.float32, copy=False)
    except (NotImplementedError, ValueError):
        raise DflashError(
            f"{what} is {TensorType(kind).name}, which gguf cannot read",
            hint="a newer gguf may: pip install --upgrade gguf",
        ) from None


def encode(kind: int, rows: np.ndarray, library: LibGgml | None = None) -> np.ndarray:
    """float32 [n, k] -> uint8 [n, bytes per row] in any type; `library` for the quantised ones."""
    if kind in FLOATS:
        return encode_float(kind, rows)
    if library is None:
        raise ValueError("a quantised type needs a library from load_libggml()")
    return library.quantize(kind, rows)
