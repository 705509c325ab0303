"""GGUF files: headers, local or behind a URL, and a streaming writer."""

from __future__ import annotations

from pathlib import Path

from dflashcpp.gguf_file.header import Header, Kv, TensorInfo
from dflashcpp.gguf_file.parse import parse
from dflashcpp.gguf_file.types import (
    TensorType,
    ValueType,
    block_size,
    is_quantised,
    layer_of,
    row_bytes,
    tensor_bytes,
)
from dflashcpp.gguf_file.writer import GgufWriter, check_place

__all__ = [
    "GgufWriter",
    "Header",
    "Kv",
    "TensorInfo",
    "TensorType",
    "ValueType",
    "block_size",
    "check_place",
    "is_quantised",
    "layer_of",
    "read_header",
    "row_bytes",
    "tensor_bytes",
]


def read_header(source: str | Path, *, token: str | None = None) -> Header:
    """The header of a GGUF file: a path, or an http(s) URL of which only the header is fetched.

    DflashError names the file and what is wrong: not GGUF, another byte order or version, cut off,
    tensor data past the end, a key or tensor twice, type numbers that do not exist, bad offsets.
    """
    if isinstance(source, str) and source.startswith(("http://", "https://")):
        from dflashcpp.gguf_file.remote import RemoteSource

        with RemoteSource(source, token=token) as remote:
            return parse(remote)
    from dflashcpp.gguf_file.source import LocalSource

    with LocalSource(Path(source)) as local:
        return parse(local)
