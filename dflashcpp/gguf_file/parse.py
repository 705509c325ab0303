"""GGUF header bytes -> Header. Takes any bytes: every length is bounded by the file before it is used.

Layout and checks follow llama.cpp ggml/src/gguf.cpp (`gguf_init_from_reader`), commit 0c1e570:
magic, u32 version, i64 tensors, i64 pairs, pairs, tensor infos, padding to the alignment, data.
"""

from __future__ import annotations

import math
import struct
from typing import Protocol

from dflashcpp.errors import DflashError
from dflashcpp.gguf_file.header import Header, Kv, TensorInfo
from dflashcpp.gguf_file.types import (
    SCALAR_SIZE,
    TensorType,
    ValueType,
    block_size,
    tensor_bytes,
)

_U64 = struct.Struct("<Q")
_U32 = struct.Struct("<I")
MAX_DIMS = 4
MAX_NAME = 64
DEFAULT_ALIGNMENT = 32
MAX_HEADER = 1 << 30  # bytes; the largest vocabularies make about 20 MiB
_REMOVED = {4: "Q4_2", 5: "Q4_3", 31: "Q4_0_4_4", 32: "Q4_0_4_8", 33: "Q4_0_8_8", 36: "IQ4_NL_4_4"}


class Source(Protocol):
    """The beginning of a file, of which more can be had."""

    name: str
    size: int

    def upto(self, end: int) -> bytes | bytearray:
        """The file's first bytes, at least `end` of them (`end` <= `size`), more if that is cheap."""
        ...


class _Cursor:
    """Reads forward through a source; never beyond its end."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.at = 0
        self.data: bytes | bytearray = b""

    def bad(self, what: str, hint: str | None = None) -> DflashError:
        return DflashError(f"{self.source.name}: {what}", hint=hint)

    def need(self, count: int, what: str) -> None:
        """Make `count` bytes from here on available."""
        end = self.at + count
        if end <= len(self.data):
            return
        if end > self.source.size:
            raise self.bad(
                f"the header is cut off: {what} would end at byte {end} of {self.source.size}",
                "download or convert it again",
            )
        if end > MAX_HEADER:
            raise self.bad(f"{what} makes the header larger than {MAX_HEADER >> 20} MiB; the file is damaged")
        self.data = self.source.upto(end)

    def u32(self, what: str) -> int:
        self.need(4, what)
        value: int = _U32.unpack_from(self.data, self.at)[0]
        self.at += 4
        return value

    def u64(self, what: str) -> int:
        self.need(8, what)
        value: int = _U64.unpack_from(self.data, self.at)[0]
        self.at += 8
        return value

    def take(self, count: int, what: str) -> bytes:
        self.need(count, what)
        piece = bytes(self.data[self.at : self.at + count])
        self.at += count
        return piece

    def text(self, what: str) -> str:
        raw = self.take(self.u64(f"the length of {what}"), what)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            raise self.bad(f"{what} is not UTF-8: {raw[:40]!r}") from None

    def skip_strings(self, count: int, what: str) -> None:
        """Pass over `count` strings. The hot loop of large vocabularies: no function call per string."""
        self.need(8 * count, what)
        data, at, have = self.data, self.at, len(self.data)
        unpack = _U64.unpack_from
        for _ in range(count):
            if at + 8 > have:
                data, have = self._more(at, 8, what)
            at += 8 + unpack(data, at)[0]
            if at > have:
                data, have = self._more(at, 0, what)
        self.at = at

    def _more(self, at: int, count: int, what: str) -> tuple[bytes | bytearray, int]:
        self.at = at
        self.need(count, what)
        return self.data, len(self.data)


def parse(source: Source) -> Header:
    """Read a header. Raises DflashError naming the file and what is wrong with it."""
    cursor = _Cursor(source)
    version = _preamble(cursor)
    tensor_count, kv_count = cursor.u64("the number of tensors"), cursor.u64("the number of metadata keys")
    # the smallest tensor entry has 8+4+4+8 bytes, the smallest pair 8+1+4+1
    if tensor_count > source.size // 24 or kv_count > source.size // 14:
        raise cursor.bad(
            f"promises {tensor_count} tensors and {kv_count} metadata keys, more than {source.size} bytes "
            "can hold; the file is damaged"
        )
    kv = _read_kv(cursor, kv_count)
    alignment = _alignment(cursor, kv)
    infos = _read_tensor_infos(cursor, tensor_count)
    data_start = -(-cursor.at // alignment) * alignment if infos else cursor.at
    _check_layout(cursor, infos, alignment, data_start)
    return Header(source.name, version, kv, infos, data_start, source.size)


def _preamble(cursor: _Cursor) -> int:
    source = cursor.source
    if source.size == 0:
        raise cursor.bad("the file is empty", "download or convert it again")
    start = bytes(source.upto(min(source.size, 64))[:64])
    if start[:4] != b"GGUF":
        raise _not_gguf(cursor, start)
    cursor.at = 4
    version = cursor.u32("the version")
    if version & 0xFFFF == 0 and version:
        raise cursor.bad("is a big-endian GGUF file; only little-endian ones can be read")
    if version not in (2, 3):
        raise cursor.bad(
            f"is GGUF version {version}; versions 2 and 3 can be read", "convert the model again"
        )
    return version


def _not_gguf(cursor: _Cursor, start: bytes) -> DflashError:
    if start.startswith(b"version https://git-lfs"):
        return cursor.bad(
            "is a Git LFS pointer, not the file itself", "fetch the file (git lfs pull, or hf download)"
        )
    if start.startswith(b"PK\x03\x04"):
        return cursor.bad("is a zip archive, not a GGUF file")
    if start[8:9] == b"{":
        return cursor.bad("looks like a safetensors file, not a GGUF file")
    if start.lstrip()[:1] == b"<":
        return cursor.bad("is a web page, not a GGUF file", "the download went wrong; check the address")
    return cursor.bad(f"is not a GGUF file: it begins with {start[:4]!r} instead of b'GGUF'")


def _read_kv(cursor: _Cursor, count: int) -> dict[str, Kv]:
    pairs: dict[str, Kv] = {}
    for index in range(count):
        key = cursor.text(f"metadata key {index}")
        if not key:
            raise cursor.bad(f"metadata key {index} is empty")
        if key in pairs:
            raise cursor.bad(f"the metadata key {key} stands in it twice")
        pairs[key] = _read_value(cursor, key)
    return pairs


def _read_value(cursor: _Cursor, key: str) -> Kv:
    what = f"the value of {key[:80]}"
    kind = cursor.u32(f"the type of {key[:80]}")
    element: int | None = None
    count = 1
    if kind == ValueType.ARRAY:
        element = cursor.u32(f"the element type of {key[:80]}")
        count = cursor.u64(f"the length of {key[:80]}")
    inner = kind if element is None else element
    if inner == ValueType.STRING:
        begin = cursor.at
        cursor.skip_strings(count, what)
        return Kv(kind, element, count, bytes(cursor.data[begin : cursor.at]))
    if inner not in SCALAR_SIZE:
        raise cursor.bad(
            f"the metadata key {key[:80]} has the type number {inner}, which does not exist here"
        )
    return Kv(kind, element, count, cursor.take(count * SCALAR_SIZE[inner], what))


def _alignment(cursor: _Cursor, kv: dict[str, Kv]) -> int:
    found = kv.get("general.alignment")
    if found is None:
        return DEFAULT_ALIGNMENT
    if found.type != ValueType.UINT32:
        raise cursor.bad(f"general.alignment must be UINT32, it is {found.type_name}")
    value: int = found.value
    if value == 0 or value & (value - 1):
        raise cursor.bad(f"general.alignment is {value}, it must be a power of two")
    return value


def _read_tensor_infos(cursor: _Cursor, count: int) -> dict[str, TensorInfo]:
    infos: dict[str, TensorInfo] = {}
    for index in range(count):
        name = cursor.text(f"the name of tensor {index}")
        if len(name.encode()) >= MAX_NAME:
            raise cursor.bad(f"tensor {index} has a name of {MAX_NAME} bytes or more: {name[:80]!r}")
        if name in infos:
            raise cursor.bad(f"the tensor {name} stands in it twice")
        infos[name] = _read_tensor_info(cursor, name)
    return infos


def _read_tensor_info(cursor: _Cursor, name: str) -> TensorInfo:
    dims = cursor.u32(f"the shape of {name}")
    if not 1 <= dims <= MAX_DIMS:
        raise cursor.bad(f"tensor {name} has {dims} dimensions; 1 to {MAX_DIMS} are possible")
    ne = tuple(cursor.u64(f"the shape of {name}") for _ in range(dims))
    kind = _tensor_type(cursor, name, cursor.u32(f"the type of {name}"))
    offset = cursor.u64(f"the offset of {name}")
    if math.prod(ne) >= 1 << 63 or max(ne) >= 1 << 63:
        raise cursor.bad(f"tensor {name} has an impossible shape {list(ne)}")
    if ne[0] % block_size(kind):
        raise cursor.bad(
            f"tensor {name} is {kind.name} with rows of {ne[0]} numbers, no multiple of {block_size(kind)}"
        )
    return TensorInfo(name, ne, kind, offset, tensor_bytes(kind, ne))


def _tensor_type(cursor: _Cursor, name: str, number: int) -> TensorType:
    try:
        return TensorType(number)
    except ValueError:
        pass
    if number in _REMOVED:
        raise cursor.bad(
            f"tensor {name} has the type {_REMOVED[number]}, which llama.cpp has removed",
            "quantise the model again",
        )
    raise cursor.bad(
        f"tensor {name} has the type number {number}, which llama.cpp does not have",
        "the file comes from a fork (ik_llama.cpp and others have types of their own) or from a newer "
        "llama.cpp; take an unquantised or a standard one",
    )


def _check_layout(cursor: _Cursor, infos: dict[str, TensorInfo], alignment: int, data_start: int) -> None:
    """llama.cpp wants the tensors one after another, each padded to the alignment."""
    expected = 0
    for info in infos.values():
        if info.offset % alignment:
            raise cursor.bad(
                f"tensor {info.name} starts at offset {info.offset}, not aligned to {alignment} bytes"
            )
        if info.offset != expected:
            raise cursor.bad(f"tensor {info.name} starts at offset {info.offset} instead of {expected}")
        end = data_start + info.offset + info.nbytes
        if end > cursor.source.size:
            raise cursor.bad(
                f"the file is cut off: tensor {info.name} ends at byte {end}, the file has "
                f"{cursor.source.size} bytes",
                "download or convert it again",
            )
        expected = -(-(info.offset + info.nbytes) // alignment) * alignment
