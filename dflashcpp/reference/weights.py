"""Weights of a drafter as float32, by their GGUF names, from a checkpoint or dequantised from a GGUF.

Nothing is held beyond a budget: a matrix is read, dequantised and multiplied a slice of rows at a
time, so that a drafter of several GB runs in a few hundred MB.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import torch

from dflashcpp.errors import DflashError

if TYPE_CHECKING:
    from dflashcpp.checkpoint import Checkpoint
    from dflashcpp.gguf_file import Header, TensorInfo

T = TypeVar("T")

SLICE_BYTES = 64 * 2**20
KEEP_BYTES = 512 * 2**20
_BLOCK = 32


class Weights:
    """Tensors by GGUF name, shapes in torch order ([out, in]). Subclasses say `shape` and `read`."""

    def __init__(self, label: str, keep_bytes: int = KEEP_BYTES) -> None:
        self.label = label
        self._budget = keep_bytes
        self._kept: dict[str, torch.Tensor] = {}

    def names(self) -> tuple[str, ...]:
        """All tensors there are."""
        raise NotImplementedError

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape in torch order. Raises DflashError if the tensor is missing."""
        raise NotImplementedError

    def read(self, name: str, start: int, stop: int) -> np.ndarray:
        """Rows start..stop (all dimensions but the last counted as rows): float32 [rows, columns]."""
        raise NotImplementedError

    def rows(self, name: str) -> int:
        """How many rows `read` can give."""
        return math.prod(self.shape(name)[:-1])

    def slice(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Rows start..stop as float32 [rows, columns], from memory if the tensor is kept there."""
        if name in self._kept:
            return self._kept[name][start:stop]
        return torch.from_numpy(self.read(name, start, stop))

    def tensor(self, name: str) -> torch.Tensor:
        """A whole tensor, float32, in its own shape."""
        return self._whole(name).view(self.shape(name))

    def integers(self, name: str) -> torch.Tensor:
        """A 1-D tensor of whole numbers (below 2**24): int64."""
        return torch.from_numpy(self.read(name, 0, self.rows(name))).long().flatten()

    def linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """x @ W.T for `x` [..., in]: [..., out]; a slice of W at a time unless W is kept."""
        if self._keepable(name):
            return x @ self._whole(name).T
        parts = [x @ self.slice(name, start, stop).T for start, stop in self.slices(name)]
        return torch.cat(parts, dim=-1)

    def gather(self, name: str, rows: torch.Tensor) -> torch.Tensor:
        """The rows named by `rows` (int64, any shape): float32 [*rows.shape, columns]."""
        columns = self.shape(name)[-1]
        if self._keepable(name):
            return self._whole(name)[rows]
        flat, where = rows.reshape(-1).unique(return_inverse=True)
        read = [self.slice(name, row, row + 1) for row in flat.tolist()]
        return torch.cat(read)[where].view(*rows.shape, columns)

    def slices(self, name: str) -> list[tuple[int, int]]:
        """Row ranges whose float32 form stays within SLICE_BYTES."""
        rows = self.rows(name)
        step = max(1, SLICE_BYTES // (4 * self.shape(name)[-1]))
        return [(start, min(start + step, rows)) for start in range(0, rows, step)]

    def _keepable(self, name: str) -> bool:
        return name in self._kept or 4 * math.prod(self.shape(name)) <= self._budget

    def _whole(self, name: str) -> torch.Tensor:
        if name not in self._kept:
            value = torch.from_numpy(self.read(name, 0, self.rows(name)))
            if not self._keepable(name):
                return value
            self._budget -= 4 * value.numel()
            self._kept[name] = value
        return self._kept[name]


class TensorWeights(Weights):
    """Weights that are already in memory."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], label: str = "memory") -> None:
        super().__init__(label)
        self._tensors = dict(tensors)

    def names(self) -> tuple[str, ...]:
        return tuple(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(_found(self._tensors, name, self.label).shape)

    def read(self, name: str, start: int, stop: int) -> np.ndarray:
        value = _found(self._tensors, name, self.label).float()
        return value.reshape(-1, value.shape[-1])[start:stop].numpy()


class CheckpointWeights(Weights):
    """Weights of a checkpoint opened by `dflashcpp.checkpoint.open_checkpoint`."""

    def __init__(self, checkpoint: Checkpoint, keep_bytes: int = KEEP_BYTES) -> None:
        super().__init__(str(checkpoint.path), keep_bytes)
        self._checkpoint = checkpoint

    def names(self) -> tuple[str, ...]:
        return tuple(self._checkpoint.tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(_found(self._checkpoint.tensors, name, self.label).shape)

    def read(self, name: str, start: int, stop: int) -> np.ndarray:
        return self._checkpoint.read_rows(name, start, stop)


class GgufWeights(Weights):
    """Weights of a GGUF, dequantised when read. Also serves a target's embedding and head."""

    def __init__(self, header: Header, keep_bytes: int = KEEP_BYTES) -> None:
        super().__init__(header.source, keep_bytes)
        self._header = header
        self._data = np.memmap(Path(header.source), dtype=np.uint8, mode="r")

    def names(self) -> tuple[str, ...]:
        return tuple(self._header.tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(reversed(self._info(name).ne))

    def type_name(self, name: str) -> str:
        """How the tensor is stored: `F32`, `Q4_K` ..."""
        from dflashcpp.gguf_file import TensorType

        return TensorType(self._info(name).type).name

    def read(self, name: str, start: int, stop: int) -> np.ndarray:
        from dflashcpp.gguf_file import TensorType
        from dflashcpp.quantize import decode

        info = self._info(name)
        row_bytes = info.nbytes // self.rows(name)
        begin = self._header.data_start + info.offset + start * row_bytes
        raw = np.array(self._data[begin : begin + (stop - start) * row_bytes])
        raw = raw.reshape(stop - start, row_bytes)
        if info.type == TensorType.I64:
            return raw.view(np.int64).astype(np.float32)
        return decode(info.type, raw, f"{self.label}: tensor {name}")

    def _info(self, name: str) -> TensorInfo:
        return _found(self._header.tensors, name, self.label)


class NoisyWeights(Weights):
    """Another side's weights with random errors of a given size: what quantising could do to them.

    `errors` gives each tensor's error relative to its size; within blocks of 32 numbers the noise
    follows the block's own size, as a quantised block's does.
    """

    def __init__(self, weights: Weights, errors: Mapping[str, float], seed: int) -> None:
        super().__init__(f"{weights.label} with noise")
        self._weights, self._errors, self._seed = weights, dict(errors), seed

    def names(self) -> tuple[str, ...]:
        return self._weights.names()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._weights.shape(name)

    def read(self, name: str, start: int, stop: int) -> np.ndarray:
        values = self._weights.slice(name, start, stop).numpy()
        error = self._errors.get(name, 0.0)
        if error == 0:
            return values
        width = _BLOCK if values.shape[1] % _BLOCK == 0 else values.shape[1]
        blocks = values.reshape(-1, width)
        size = np.sqrt(np.mean(np.square(blocks), axis=1, keepdims=True))
        generator = np.random.default_rng([self._seed, start, *name.encode()])
        noise = generator.standard_normal(blocks.shape, dtype=np.float32)
        return (blocks + np.float32(error) * size * noise).reshape(values.shape)


def _found(tensors: Mapping[str, T], name: str, label: str) -> T:
    if name not in tensors:
        raise DflashError(f"{label} has no tensor {name}")
    return tensors[name]
