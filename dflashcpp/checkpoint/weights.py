"""Rows of weights as float32, straight from the file: exact for BF16, F16, F32 and FP8 with scales."""

from __future__ import annotations

import functools
import math
import os
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflashcpp.checkpoint.safetensors_file import WIDTH, RawTensor
from dflashcpp.errors import DflashError

if TYPE_CHECKING:
    import numpy as np

FLOATS = ("BF16", "F16", "F32")
FP8 = ("F8_E4M3", "F8_E5M2")


@dataclass(frozen=True)
class SourceTensor:
    """One tensor of a drafter: `name` is the GGUF's, `source_name` the checkpoint's; torch shape."""

    name: str
    source_name: str
    shape: tuple[int, ...]
    dtype: str
    file: Path
    offset: int
    nbytes: int
    store: str  # matrix, f32 or i64
    scale: RawTensor | None = None  # FP8: what the numbers are multiplied with
    scale_block: tuple[int, int] | None = None  # rows and columns that share one scale
    interleaved_heads: int | None = None  # head size when rotary pairs are neighbours, not halves
    made: Any = None  # values computed here instead of read (float32 or int64 array)

    @property
    def columns(self) -> int:
        """Length of a row: the last dimension."""
        return self.shape[-1]

    @property
    def rows(self) -> int:
        """Number of rows: the product of the other dimensions."""
        return math.prod(self.shape[:-1])


class Reader:
    """Reads byte ranges of the checkpoint's files; any thread may call it."""

    def __init__(self) -> None:
        self._files: dict[Path, int] = {}
        self._lock = threading.Lock()

    def read(self, path: Path, offset: int, count: int) -> bytes:
        """`count` bytes from `offset`. Raises DflashError when the file has become shorter or unreadable."""
        parts, position, left = [], offset, count
        while left:
            try:
                part = os.pread(self._descriptor(path), min(left, 1 << 30), position)
            except OSError as error:
                raise DflashError(
                    f"{path} cannot be read at byte {position}: {error.strerror}",
                    hint="the disk or the network share has a fault; download the file again, elsewhere",
                ) from None
            if not part:
                raise DflashError(
                    f"{path} ends at byte {position}; it changed while it was being read",
                    hint="wait until nothing writes to it, then start again",
                )
            parts.append(part)
            position, left = position + len(part), left - len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _descriptor(self, path: Path) -> int:
        with self._lock:
            if path not in self._files:
                try:
                    self._files[path] = os.open(path, os.O_RDONLY)
                except OSError as error:
                    raise DflashError(
                        f"{path} cannot be read: {error.strerror}",
                        hint="it was there a moment ago; start again",
                    ) from None
            return self._files[path]

    def close(self) -> None:
        """Close every file; reading again opens them again."""
        with self._lock:
            for descriptor in self._files.values():
                os.close(descriptor)
            self._files.clear()


def read_rows(reader: Reader, tensor: SourceTensor, start: int, stop: int) -> np.ndarray:
    """Rows `start` to `stop` of a tensor as float32 [stop - start, columns].

    A 1-D tensor is one row. Raises DflashError when the file cannot be read.
    """
    if tensor.made is not None:
        return tensor.made.reshape(tensor.rows, tensor.columns)[start:stop]
    if tensor.interleaved_heads:
        return _halves(reader, tensor, start, stop)
    return _plain_rows(reader, tensor, start, stop)


def _plain_rows(reader: Reader, tensor: SourceTensor, start: int, stop: int) -> np.ndarray:
    width = WIDTH[tensor.dtype] * tensor.columns
    raw = reader.read(tensor.file, tensor.offset + start * width, (stop - start) * width)
    values = decode(raw, tensor.dtype).reshape(stop - start, tensor.columns)
    if tensor.scale is not None:
        values *= _scales(reader, tensor, start, stop)
    return values


def decode(raw: bytes, dtype: str) -> np.ndarray:
    """Bytes of a safetensors float type as a new float32 array; exact for all of `FLOATS` and `FP8`."""
    import numpy as np

    if dtype == "BF16":
        bits = np.frombuffer(raw, dtype="<u2").astype(np.uint32)
        bits <<= 16
        return bits.view(np.float32)
    if dtype in FP8:
        return _fp8_values(dtype)[np.frombuffer(raw, dtype=np.uint8)]
    kinds = {"F16": "<f2", "F32": "<f4"}
    return np.frombuffer(raw, dtype=kinds[dtype]).astype(np.float32)


@functools.cache
def _fp8_values(dtype: str) -> np.ndarray:
    """All 256 numbers of an FP8 type as OCP defines them: E4M3 (NaN only at 0x7F) or E5M2 (IEEE-like)."""
    import numpy as np

    mantissa_bits, bias = (3, 7) if dtype == "F8_E4M3" else (2, 15)
    values = np.zeros(256, dtype=np.float32)
    for code in range(256):
        exponent, mantissa = (code & 0x7F) >> mantissa_bits, code & ((1 << mantissa_bits) - 1)
        fraction = mantissa / (1 << mantissa_bits)
        size = math.ldexp(fraction, 1 - bias) if exponent == 0 else math.ldexp(1 + fraction, exponent - bias)
        if dtype == "F8_E4M3" and code & 0x7F == 0x7F:
            size = math.nan
        if dtype == "F8_E5M2" and exponent == 31:
            size = math.nan if mantissa else math.inf
        values[code] = -size if code & 0x80 else size
    return values


def _scales(reader: Reader, tensor: SourceTensor, start: int, stop: int) -> np.ndarray:
    """The scales of rows `start` to `stop`, in a shape that multiplies with them."""
    import numpy as np

    assert tensor.scale is not None
    scale = tensor.scale
    values = decode(reader.read(scale.file, scale.offset, scale.nbytes), scale.dtype)
    if values.size == 1:
        return values.reshape(1, 1)
    if tensor.scale_block is None:
        return values.reshape(-1, 1)[start:stop]
    high, wide = tensor.scale_block
    grid = values.reshape(scale.shape)
    rows = grid[np.arange(start, stop) // high]
    return np.repeat(rows, wide, axis=1)[:, : tensor.columns]


def _halves(reader: Reader, tensor: SourceTensor, start: int, stop: int) -> np.ndarray:
    """Rotary pairs (0,1), (2,3) ... of each head reordered to halves: even numbers first, then odd ones."""
    import numpy as np

    size = tensor.interleaved_heads
    assert size is not None
    order = np.concatenate([np.arange(0, size, 2), np.arange(1, size, 2)])
    if len(tensor.shape) == 1:
        return _plain_rows(reader, tensor, start, stop)[:, order]
    first, last = start // size * size, -(-stop // size) * size
    heads = _plain_rows(reader, tensor, first, last).reshape(-1, size, tensor.columns)
    return heads[:, order].reshape(-1, tensor.columns)[start - first : stop - first]
