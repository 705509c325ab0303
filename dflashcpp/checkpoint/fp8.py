"""FP8 weights: which scales belong to a tensor and how they are laid out, checked before anything is read.

Layouts: one scale per tensor; one per output row (compressed-tensors); one per block of rows and
columns, `quantization_config.weight_block_size` (DeepSeek's `weight_scale_inv`, which multiplies
despite its name).
"""

from __future__ import annotations

import math

from dflashcpp.checkpoint.config import Config
from dflashcpp.checkpoint.safetensors_file import RawTensor
from dflashcpp.checkpoint.weights import FLOATS, FP8
from dflashcpp.errors import DflashError


def scale_layout(raw: RawTensor, scale: RawTensor | None, config: Config) -> tuple[int, int] | None:
    """Rows and columns that share a scale; None for one per tensor or per row (or no FP8 at all).

    Raises DflashError when a weight lacks its scale, has one it does not need, or one of a wrong shape.
    """
    if raw.dtype not in FP8:
        if scale is not None:
            raise DflashError(
                f"{raw.file.name}: {raw.name} is {raw.dtype} and yet has a scale, {scale.name}",
                hint="its numbers are packed in an unknown way; convert the unquantised release",
            )
        return None
    if scale is None:
        raise DflashError(
            f"{raw.file.name}: {raw.name} is {raw.dtype} but its scale is missing",
            hint="download the checkpoint again or take the unquantised release",
        )
    if scale.dtype not in FLOATS:
        raise DflashError(
            f"{scale.file.name}: {scale.name} is {scale.dtype}; scales must be F32, BF16 or F16"
        )
    return _blocks(raw, scale, config)


def _blocks(raw: RawTensor, scale: RawTensor, config: Config) -> tuple[int, int] | None:
    count, (rows, columns) = math.prod(scale.shape), (math.prod(raw.shape[:-1]), raw.shape[-1])
    if count == 1 or scale.shape in ((rows,), (rows, 1)):
        return None
    said = config.at("quantization_config.weight_block_size")
    if isinstance(said, list) and len(said) == 2 and all(type(size) is int and size > 0 for size in said):
        high, wide = said
        if scale.shape == (-(-rows // high), -(-columns // wide)):
            return high, wide
    raise DflashError(
        f"{scale.file.name}: {scale.name} has the shape {list(scale.shape)}, which does not fit {raw.name} "
        f"{list(raw.shape)} (weight_block_size is {said})",
        hint="convert the unquantised release",
    )
