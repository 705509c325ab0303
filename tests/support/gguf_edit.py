"""Copies of a GGUF with a few things changed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from dflashcpp.gguf_file import GgufWriter, Kv, TensorType, read_header


def rewrite(
    path: Path,
    kv: Mapping[str, Kv | None] | None = None,
    tensors: Mapping[str, Callable[[bytes], bytes] | str | None] | None = None,
) -> Path:
    """A copy of a GGUF with other keys and tensor bytes (a name: that tensor's); None: without."""
    header, data = read_header(path), path.read_bytes()
    edits, copy = dict(tensors or {}), path.with_name(f"edited-{path.name}")
    kept = {name: info for name, info in header.tensors.items() if edits.get(name, name) is not None}

    def raw(name: str) -> bytes:
        info = header.tensors[name]
        return data[header.data_start + info.offset :][: info.nbytes]

    with GgufWriter(copy) as writer:
        for key, value in {**header.kv, **(kv or {})}.items():
            if value is not None:
                writer.add(key, value)
        for name, info in kept.items():
            writer.declare(name, info.ne, TensorType(info.type))
        writer.begin()
        for name in kept:
            edit = edits.get(name) or name
            writer.write(name, 0, raw(edit) if isinstance(edit, str) else edit(raw(name)))
        writer.commit()
    return copy
