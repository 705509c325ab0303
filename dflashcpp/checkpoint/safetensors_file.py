"""safetensors headers: 8 bytes of length (little endian), a JSON object, then the data.

Takes any bytes: every length is checked against the file before it is used. The format is that of
the safetensors README; like its own reader this one allows no holes and no overlaps.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from dflashcpp.checkpoint.json_file import parse_object
from dflashcpp.errors import DflashError

WIDTH = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E8M0": 1,
    "I16": 2,
    "U16": 2,
    "F16": 2,
    "BF16": 2,
    "I32": 4,
    "U32": 4,
    "F32": 4,
    "I64": 8,
    "U64": 8,
    "F64": 8,
}
_MAX_HEADER = 32 << 20  # bytes; a drafter has a few hundred tensors
_MAX_DIMS = 8


@dataclass(frozen=True)
class RawTensor:
    """One tensor of a safetensors file: torch shape, where its bytes stand in `file`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    offset: int
    nbytes: int


def read_safetensors(path: Path) -> dict[str, RawTensor]:
    """Names and places of all tensors of a file; reads the header only.

    Raises DflashError that says what the file is instead, or how much of it is missing.
    """
    size, head = _head(path)
    length = int.from_bytes(head[:8], "little")
    if size < 8 or not 2 <= length <= size - 8 or length > _MAX_HEADER:
        raise _no_safetensors(path, size, head, length)
    with path.open("rb") as file:
        file.seek(8)
        text = file.read(length)
    header = parse_object(text, f"the header of {path}")
    header.pop("__metadata__", None)
    tensors = {name: _entry(path, name, entry, 8 + length) for name, entry in header.items()}
    _check_cover(path, tensors, 8 + length, size)
    return tensors


def _head(path: Path) -> tuple[int, bytes]:
    try:
        with path.open("rb") as file:
            return path.stat().st_size, file.read(512)
    except FileNotFoundError:
        raise DflashError(f"there is no file {path}", hint="check the path") from None
    except IsADirectoryError:
        raise DflashError(f"{path} is a directory, not a safetensors file") from None
    except OSError as error:
        raise DflashError(f"{path} cannot be read: {error.strerror}") from None


def _no_safetensors(path: Path, size: int, head: bytes, length: int) -> DflashError:
    again = "download it again"
    if size == 0:
        return DflashError(f"{path} is empty", hint=again)
    if head.startswith(b"version https://git-lfs"):
        return DflashError(
            f"{path} is a Git LFS pointer of {size} bytes, not the weights",
            hint="run `git lfs pull` in that repository, or download the file from the Hub",
        )
    if head.startswith(b"GGUF"):
        return DflashError(
            f"{path} is a GGUF file, not safetensors", hint="`dflashcpp inspect FILE` reads it"
        )
    if head.startswith((b"PK\x03\x04", b"\x80\x02")):
        return DflashError(f"{path} is a PyTorch file, not safetensors", hint="save it as safetensors first")
    if head.lstrip()[:1] == b"<":
        return DflashError(f"{path} is a web page, not safetensors", hint=again)
    if size >= 9 and head[8:9] == b"{" and 2 <= length <= _MAX_HEADER:
        return DflashError(
            f"{path} is cut off: it has {size} bytes, its header alone promises {length + 8}", hint=again
        )
    return DflashError(f"{path} is not a safetensors file", hint="expected 8 bytes of length, then JSON")


def _entry(path: Path, name: str, entry: Any, data_start: int) -> RawTensor:
    def bad(what: str) -> DflashError:
        return DflashError(
            f"{path}: tensor {name[:100]} {what}", hint="the file is damaged; download it again"
        )

    if not isinstance(entry, dict):
        raise bad("has no description")
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in WIDTH:
        raise bad(f"has the unknown type {str(dtype)[:40]!r}")
    if not _whole_numbers(shape) or len(shape) > _MAX_DIMS:
        raise bad(f"has no sensible shape: {str(shape)[:80]}")
    if not _whole_numbers(offsets) or len(offsets) != 2:
        raise bad(f"has no sensible data_offsets: {str(offsets)[:80]}")
    nbytes = math.prod(shape) * WIDTH[dtype]
    if offsets[1] - offsets[0] != nbytes:
        raise bad(f"of {dtype} {shape} needs {nbytes} bytes, its place has {offsets[1] - offsets[0]}")
    return RawTensor(name, dtype, tuple(shape), path, data_start + offsets[0], nbytes)


def _whole_numbers(values: Any) -> TypeGuard[list[int]]:
    return isinstance(values, list) and all(type(item) is int and 0 <= item < 1 << 48 for item in values)


def _check_cover(path: Path, tensors: dict[str, RawTensor], data_start: int, size: int) -> None:
    position = data_start
    for tensor in sorted(tensors.values(), key=lambda item: (item.offset, item.nbytes)):
        if tensor.offset != position:
            raise DflashError(
                f"{path}: tensor {tensor.name[:100]} begins at byte {tensor.offset}, the one before ends at "
                f"{position}",
                hint="the file is damaged; download it again",
            )
        position += tensor.nbytes
    if position > size:
        raise DflashError(
            f"{path} is cut off: it has {size} bytes, its header promises {position}",
            hint="download it again (a broken download is resumed by `hf download`)",
        )
    if position < size:
        raise DflashError(
            f"{path} has {size} bytes, its header describes only {position}",
            hint="the file is damaged; download it again",
        )
