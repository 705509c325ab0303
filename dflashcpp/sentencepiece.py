"""The pieces of a sentencepiece model file: a small protobuf reader, bounded by the file's size.

sentencepiece_model.proto: ModelProto.pieces = 1 (repeated SentencePiece: piece = 1, score = 2,
type = 3); trainer_spec = 2 (model_type = 3: 1 unigram, 2 BPE).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_MAX_BYTES = 256 << 20
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


@dataclass(frozen=True)
class Piece:
    """One token; `kind` is 1 normal, 2 unknown, 3 control, 4 user defined, 5 unused, 6 byte (as in GGUF)."""

    text: str
    score: float
    kind: int


class _Damaged(Exception):
    pass


def read_pieces(path: Path) -> list[Piece] | None:
    """The pieces of a sentencepiece file; None when it is none (tiktoken files bear the same name)."""
    if not 0 < path.stat().st_size <= _MAX_BYTES:
        return None
    data = path.read_bytes()
    try:
        pieces = [
            _piece(value) for number, value in _fields(data) if number == 1 and isinstance(value, bytes)
        ]
    except (_Damaged, UnicodeDecodeError):
        return None
    return pieces or None


def _piece(data: bytes) -> Piece:
    text, score, kind = "", 0.0, 1
    for number, value in _fields(data):
        if number == 1 and isinstance(value, bytes):
            text = value.decode("utf-8")
        elif number == 2 and isinstance(value, float):
            score = value
        elif number == 3 and isinstance(value, int):
            kind = value
    if not 1 <= kind <= 6:
        raise _Damaged
    return Piece(text, score, kind)


def _fields(data: bytes) -> Iterator[tuple[int, int | float | bytes]]:
    """Field numbers and values of one message, without recursion."""
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        number, wire = tag >> 3, tag & 7
        if number == 0:
            raise _Damaged
        if wire == _VARINT:
            value, at = _varint(data, at)
            yield number, value
        elif wire in (_FIXED32, _FIXED64):
            size = 4 if wire == _FIXED32 else 8
            if at + size > len(data):
                raise _Damaged
            yield number, struct.unpack_from("<f" if size == 4 else "<d", data, at)[0]
            at += size
        elif wire == _BYTES:
            size, at = _varint(data, at)
            if at + size > len(data):
                raise _Damaged
            yield number, data[at : at + size]
            at += size
        else:
            raise _Damaged


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(data):
            break
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise _Damaged
