"""Weights that llama.cpp keeps a second time on the CPU, rearranged for its matrix kernels.

`ggml_repack_get_optimal_repack_type` (ggml/src/ggml-cpu/repack.cpp, commit 0c1e570): by type, by what
the processor can do, and where the number of rows divides. The file stays mapped beside the copy.
"""

from __future__ import annotations

import functools
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# processor feature -> {type: the number of rows must be a multiple of this}
_REPACKED: dict[str, dict[str, int]] = {
    "avx2": {"Q4_0": 8, "Q4_K": 8, "IQ4_NL": 8, "MXFP4": 8},
    "avx512f": {"Q2_K": 8},
    "asimddp": {"Q4_0": 4, "Q4_K": 8, "Q5_K": 8, "Q6_K": 8, "IQ4_NL": 4, "MXFP4": 4, "Q8_0": 4},
}
_LOOKED_UP = ("token_embd", "per_layer_token_embd", "selector_predecessor", "selector_successor")


@functools.cache
def features() -> frozenset[str]:
    """What this processor can do, in the words of /proc/cpuinfo; Apple's know `asimddp`."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return frozenset({"asimddp"} if platform.machine() == "arm64" else ())
    lines = [line.partition(":")[2] for line in text.splitlines() if line.startswith(("flags", "Features"))]
    return frozenset(" ".join(lines[:1]).split())


def is_repacked(kind: int, ne: tuple[int, ...], known: frozenset[str] | None = None) -> bool:
    """Whether a matrix of this type and shape gets a second copy on a processor with features `known`."""
    from dflashcpp.gguf_file import TensorType

    if len(ne) < 2:
        return False
    name = TensorType(kind).name
    for feature in features() if known is None else known:
        rows = _REPACKED.get(feature, {}).get(name)
        if rows and ne[1] % rows == 0:
            return True
    return False


def split(tensors: Mapping[str, Any], tied: bool, known: frozenset[str] | None = None) -> tuple[int, int]:
    """Bytes mapped from the file and bytes of the copies, for a model that runs on the CPU.

    What is mapped reaches from the first to the last tensor that is not copied.
    """
    copied = {
        name
        for name, tensor in tensors.items()
        if _multiplied(name) and is_repacked(tensor.type, tensor.ne, known)
    }
    size = sum(tensors[name].nbytes for name in copied)
    head = tensors.get("token_embd.weight")
    if tied and head is not None and is_repacked(head.type, head.ne, known):
        size += head.nbytes
    return _span([tensor for name, tensor in tensors.items() if name not in copied]), size


def _multiplied(name: str) -> bool:
    return name.endswith(".weight") and not name.startswith(_LOOKED_UP)


def _span(tensors: list[Any]) -> int:
    offsets = [getattr(tensor, "offset", None) for tensor in tensors]
    if not tensors or any(offset is None for offset in offsets):
        return sum(tensor.nbytes for tensor in tensors)
    return max(tensor.offset + tensor.nbytes for tensor in tensors) - min(tensor.offset for tensor in tensors)
