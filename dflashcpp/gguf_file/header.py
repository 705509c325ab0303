"""What a GGUF header holds: metadata, tensor table, where the data starts."""

from __future__ import annotations

import functools
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from dflashcpp.errors import DflashError
from dflashcpp.gguf_file.types import SCALAR_CODE, ValueType


class _Missing:
    """The default of `Header.get`: the key must be there."""


MISSING: Final = _Missing()


@dataclass(frozen=True)
class Kv:
    """One metadata value. `raw` is the value's bytes as they stand in the file, decoded only on demand.

    For an array `raw` begins after the element type and the count, `element_type` is set and
    `count` is its length; otherwise `count` is 1.
    """

    type: int
    element_type: int | None
    count: int
    raw: bytes

    @functools.cached_property
    def value(self) -> Any:
        """The value as int, float, bool, str or a list of these. Bad UTF-8 is shown as U+FFFD."""
        if self.type != ValueType.ARRAY:
            return _decode(self.type, 1, self.raw)[0]
        assert self.element_type is not None
        return _decode(self.element_type, self.count, self.raw)

    @classmethod
    def scalar(cls, kind: ValueType, value: Any) -> Kv:
        """One number, bool or string of type `kind`; DflashError when it does not fit."""
        return cls(kind, None, 1, _encode(kind, [value]))

    @classmethod
    def array(cls, kind: ValueType, values: Sequence[Any]) -> Kv:
        """An array with elements of type `kind`; DflashError when one does not fit."""
        return cls(ValueType.ARRAY, kind, len(values), _encode(kind, values))

    @classmethod
    def string(cls, text: str) -> Kv:
        return cls.scalar(ValueType.STRING, text)

    @classmethod
    def u32(cls, value: int) -> Kv:
        return cls.scalar(ValueType.UINT32, value)

    @classmethod
    def f32(cls, value: float) -> Kv:
        return cls.scalar(ValueType.FLOAT32, value)

    @classmethod
    def bool(cls, value: bool) -> Kv:
        return cls.scalar(ValueType.BOOL, value)

    def encoded(self) -> bytes:
        """Type and value as they stand in a file after the key."""
        head = struct.pack("<I", self.type)
        if self.type == ValueType.ARRAY:
            head += struct.pack("<IQ", self.element_type, self.count)
        return head + self.raw

    @property
    def type_name(self) -> str:
        """For messages: `UINT32`, `array of STRING`."""
        if self.element_type is None:
            return ValueType(self.type).name
        return f"array of {ValueType(self.element_type).name}"


def _decode(kind: int, count: int, raw: bytes) -> list[Any]:
    if kind != ValueType.STRING:
        if kind == ValueType.BOOL:
            return [byte != 0 for byte in raw]
        return list(struct.unpack(f"<{count}{SCALAR_CODE[kind]}", raw))
    texts = []
    at = 0
    for _ in range(count):
        size = int.from_bytes(raw[at : at + 8], "little")
        texts.append(raw[at + 8 : at + 8 + size].decode("utf-8", "replace"))
        at += 8 + size
    return texts


def _encode(kind: ValueType, values: Sequence[Any]) -> bytes:
    if kind == ValueType.STRING:
        encoded = [_utf8(text) for text in values]
        return b"".join(struct.pack("<Q", len(data)) + data for data in encoded)
    if kind == ValueType.BOOL and not all(isinstance(value, bool) for value in values):
        raise DflashError(f"{values!r}: a metadata value of type BOOL must be true or false")
    try:
        return struct.pack(f"<{len(values)}{SCALAR_CODE[kind]}", *values)
    except (struct.error, OverflowError, KeyError, TypeError) as error:
        shown = values[0] if len(values) == 1 else list(values)[:8]
        raise DflashError(f"{shown!r} does not fit a metadata value of type {kind.name}: {error}") from None


def _utf8(text: Any) -> bytes:
    if not isinstance(text, str):
        raise DflashError(f"{text!r}: a metadata value of type STRING must be text")
    return text.encode("utf-8", "surrogateescape")


@dataclass(frozen=True)
class TensorInfo:
    """One tensor: `ne` in ggml order (ne[0] is the row length), `offset` in bytes from `data_start`."""

    name: str
    ne: tuple[int, ...]
    type: int
    offset: int
    nbytes: int


@dataclass(frozen=True)
class Header:
    """A GGUF header. `source` is the path or URL it came from, `size` the whole file in bytes."""

    source: str
    version: int
    kv: dict[str, Kv]
    tensors: dict[str, TensorInfo]
    data_start: int
    size: int

    def get(self, key: str, default: Any = MISSING) -> Any:
        """The decoded value of `key`, else `default`; without a default a DflashError names file and key."""
        found = self.kv.get(key)
        if found is not None:
            return found.value
        if default is MISSING:
            raise DflashError(f"{self.source}: the metadata key {key} is missing")
        return default

    @property
    def architecture(self) -> str:
        """`general.architecture`; DflashError when it is missing or no text."""
        name = self.get("general.architecture")
        if not isinstance(name, str):
            raise DflashError(f"{self.source}: general.architecture must be text, it is {name!r}")
        return name
