"""A GGUF with keys changed or tensors added: files that a loader must refuse."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from dflashcpp.gguf_file import GgufWriter, Kv, TensorType, read_header


def faulty(
    source: Path,
    path: Path,
    keys: Mapping[str, Kv | None] | None = None,
    *,
    without: str | None = None,
    tensors: Mapping[str, tuple[int, ...]] | None = None,
) -> Path:
    """Copy `source` to `path` with these `keys` (None takes one out), less the keys that start with
    `without`, and with F32 zeros of these `tensors` (names and ggml shapes) added.
    """
    header, added = read_header(source), tensors or {}
    found = {**header.kv, **(keys or {})}
    kept = {key: value for key, value in found.items() if value and not (without and key.startswith(without))}
    with GgufWriter(path) as out, source.open("rb") as file:
        for key, value in kept.items():
            out.add(key, value)
        for info in header.tensors.values():
            out.declare(info.name, info.ne, info.type)
        for name, ne in added.items():
            out.declare(name, ne, TensorType.F32)
        out.begin()
        for info in header.tensors.values():
            file.seek(header.data_start + info.offset)
            out.write(info.name, 0, file.read(info.nbytes))
        for name, ne in added.items():
            out.write(name, 0, bytes(4 * int(np.prod(ne))))
        out.commit()
    return path
