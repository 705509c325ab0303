"""Value and tensor types of GGUF, with the sizes that decide every offset.

Numbers and block sizes: llama.cpp ggml/include/ggml.h (`ggml_type`), ggml/src/ggml.c (`type_traits`)
and ggml/include/gguf.h (`gguf_type`), commit 0c1e570.
"""

from __future__ import annotations

import enum
import math
import re
from collections.abc import Sequence

from dflashcpp.errors import DflashError


class ValueType(enum.IntEnum):
    """What a metadata value is."""

    UINT8 = 0
    INT8 = 1
    UINT16 = 2
    INT16 = 3
    UINT32 = 4
    INT32 = 5
    FLOAT32 = 6
    BOOL = 7
    STRING = 8
    ARRAY = 9
    UINT64 = 10
    INT64 = 11
    FLOAT64 = 12


# struct codes of the values with a fixed size; strings and arrays are missing here
SCALAR_CODE: dict[int, str] = {
    ValueType.UINT8: "B",
    ValueType.INT8: "b",
    ValueType.UINT16: "H",
    ValueType.INT16: "h",
    ValueType.UINT32: "I",
    ValueType.INT32: "i",
    ValueType.FLOAT32: "f",
    ValueType.BOOL: "?",
    ValueType.UINT64: "Q",
    ValueType.INT64: "q",
    ValueType.FLOAT64: "d",
}
SCALAR_SIZE: dict[int, int] = {
    ValueType.UINT8: 1,
    ValueType.INT8: 1,
    ValueType.UINT16: 2,
    ValueType.INT16: 2,
    ValueType.UINT32: 4,
    ValueType.INT32: 4,
    ValueType.FLOAT32: 4,
    ValueType.BOOL: 1,
    ValueType.UINT64: 8,
    ValueType.INT64: 8,
    ValueType.FLOAT64: 8,
}


class TensorType(enum.IntEnum):
    """How a tensor's numbers are stored. The names are llama.cpp's, in capitals."""

    F32 = 0
    F16 = 1
    Q4_0 = 2
    Q4_1 = 3
    Q5_0 = 6
    Q5_1 = 7
    Q8_0 = 8
    Q8_1 = 9
    Q2_K = 10
    Q3_K = 11
    Q4_K = 12
    Q5_K = 13
    Q6_K = 14
    Q8_K = 15
    IQ2_XXS = 16
    IQ2_XS = 17
    IQ3_XXS = 18
    IQ1_S = 19
    IQ4_NL = 20
    IQ3_S = 21
    IQ2_S = 22
    IQ4_XS = 23
    I8 = 24
    I16 = 25
    I32 = 26
    I64 = 27
    F64 = 28
    IQ1_M = 29
    BF16 = 30
    TQ1_0 = 34
    TQ2_0 = 35
    MXFP4 = 39
    NVFP4 = 40
    Q1_0 = 41
    Q2_0 = 42


_T = TensorType
# type: (elements in a block, bytes in a block)
_BLOCK: dict[TensorType, tuple[int, int]] = {
    _T.F32: (1, 4),
    _T.F16: (1, 2),
    _T.BF16: (1, 2),
    _T.F64: (1, 8),
    _T.I8: (1, 1),
    _T.I16: (1, 2),
    _T.I32: (1, 4),
    _T.I64: (1, 8),
    _T.Q1_0: (128, 18),
    _T.Q2_0: (64, 18),
    _T.Q4_0: (32, 18),
    _T.Q4_1: (32, 20),
    _T.Q5_0: (32, 22),
    _T.Q5_1: (32, 24),
    _T.Q8_0: (32, 34),
    _T.Q8_1: (32, 36),
    _T.MXFP4: (32, 17),
    _T.NVFP4: (64, 36),
    _T.Q2_K: (256, 84),
    _T.Q3_K: (256, 110),
    _T.Q4_K: (256, 144),
    _T.Q5_K: (256, 176),
    _T.Q6_K: (256, 210),
    _T.Q8_K: (256, 292),
    _T.IQ1_S: (256, 50),
    _T.IQ1_M: (256, 56),
    _T.IQ2_XXS: (256, 66),
    _T.IQ2_XS: (256, 74),
    _T.IQ2_S: (256, 82),
    _T.IQ3_XXS: (256, 98),
    _T.IQ3_S: (256, 110),
    _T.IQ4_NL: (32, 18),
    _T.IQ4_XS: (256, 136),
    _T.TQ1_0: (256, 54),
    _T.TQ2_0: (256, 66),
}
_PLAIN = frozenset({_T.F32, _T.F16, _T.BF16, _T.F64, _T.I8, _T.I16, _T.I32, _T.I64})


def is_quantised(kind: int) -> bool:
    """Whether the type packs several numbers into a block."""
    return TensorType(kind) not in _PLAIN


def block_size(kind: int) -> int:
    """Numbers in one block; a row must be a multiple of it."""
    return _BLOCK[TensorType(kind)][0]


def row_bytes(kind: int, length: int) -> int:
    """Bytes of one row of `length` numbers; DflashError when `length` is no multiple of the block.

    `ggml_row_size` does the same without the check in a release build.
    """
    elements, size = _BLOCK[TensorType(kind)]
    if length % elements:
        raise DflashError(
            f"a row of {length} numbers cannot be {TensorType(kind).name}: it needs a multiple of {elements}"
        )
    return length // elements * size


def tensor_bytes(kind: int, ne: Sequence[int]) -> int:
    """Bytes of a tensor of ggml shape `ne` (ne[0] is the row length)."""
    return row_bytes(kind, ne[0]) * math.prod(ne[1:])


def layer_of(name: str) -> int:
    """The layer a tensor name belongs to (`blk.3.attn_v.weight` -> 3), or -1."""
    match = re.match(r"blk\.(\d{1,6})\.", name)
    return int(match[1]) if match else -1
