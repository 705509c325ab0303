"""The GGUF keys of a drafter by the rows `[[key]]` of `convert/metadata.toml`."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping
from typing import Any

from dflashcpp.drafter import ARCHITECTURE, Drafter, Rope, yarn_magnitude
from dflashcpp.gguf_file import Kv, ValueType
from dflashcpp.knowledge import table
from dflashcpp.provenance import Provenance

_TYPES = {
    "u32": ValueType.UINT32,
    "i32": ValueType.INT32,
    "f32": ValueType.FLOAT32,
    "bool": ValueType.BOOL,
    "str": ValueType.STRING,
}

# column `as`: what of the field is written, None for nothing
_AS: dict[str, Callable[[Any, Drafter], Any]] = {
    "all": lambda value, drafter: all(value),
    "mixed": lambda value, drafter: value if len(set(value)) > 1 else None,
    "windowed": lambda value, drafter: value if drafter.window else None,
    "not_silu": lambda value, drafter: None if value == "silu" else value,
    "scaling": lambda value, drafter: value if value in ("linear", "yarn") else None,
    "scaled": lambda value, drafter: value if drafter.rope.type in ("linear", "yarn") else None,
    "yarn": lambda value, drafter: value if drafter.rope.type == "yarn" else None,
    "yarn_ratio": lambda value, drafter: (
        None if value is None else value / yarn_magnitude(drafter.rope.factor)
    ),
    "llama3": lambda value, drafter: value if drafter.rope.type == "llama3" else None,
}


def build_metadata(
    drafter: Drafter,
    provenance: Provenance,
    *,
    file_type: int,
    recipe: str,
    parameters: int,
    tokenizer: Mapping[str, Kv],
) -> dict[str, Kv]:
    """All keys of the file in order: general, dflash, tokenizer, ours."""
    general = {
        "general.architecture": Kv.string(ARCHITECTURE),
        "general.type": Kv.string("model"),
        **provenance.general(size_label(parameters)),
        "general.file_type": Kv.u32(file_type),
        "general.quantization_version": Kv.u32(2),
    }
    keys = drafter_keys(drafter)
    ours = {key: value for key, value in keys.items() if key.startswith("dflashcpp.")}
    theirs = {key: value for key, value in keys.items() if key.startswith(f"{ARCHITECTURE}.")}
    mask = {key: value for key, value in keys.items() if key.startswith("tokenizer.")}
    return {**general, **theirs, **tokenizer, **mask, **ours, **provenance.own(recipe)}


def drafter_keys(drafter: Drafter) -> dict[str, Kv]:
    """The rows `[[key]]`, in order, without those whose value is None."""
    found = {}
    for row in table("convert/metadata.toml")["key"]:
        value = _value(row, drafter)
        if value is not None:
            found[_full(row["key"])] = _kv(row["type"], value)
    return found


def _value(row: Mapping[str, Any], drafter: Drafter) -> Any:
    value: Any = drafter
    for part in row["field"].split("."):
        value = getattr(value, part)
    return _AS[row["as"]](value, drafter) if "as" in row else value


def _full(key: str) -> str:
    return key if key.startswith(("tokenizer.", "dflashcpp.")) else f"{ARCHITECTURE}.{key}"


def _kv(kind: str, value: Any) -> Kv:
    if kind.startswith("["):
        return Kv.array(_TYPES[kind.strip("[]")], list(value))
    return Kv.scalar(_TYPES[kind], value)


def size_label(parameters: int) -> str:
    """`135M`, `2.8B`: llama.cpp gguf-py `model_weight_count_rounded_notation`."""
    sizes = [(1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")]
    size, letter = next((entry for entry in sizes if parameters > entry[0]), sizes[-1])
    count = parameters / size
    digits = max(1 - len(f"{round(count)}".lstrip("0")) + 1, 0)
    return f"{round(count, digits):.{digits}f}{letter}" if digits else f"{round(count)}{letter}"


def same_value(ours: Any, theirs: Any) -> bool:
    """Equal after a trip through 32-bit floats, within dataclasses and tuples too."""
    if isinstance(ours, Rope) and isinstance(theirs, Rope):
        return all(same_value(value, getattr(theirs, name)) for name, value in vars(ours).items())
    if isinstance(ours, float) and isinstance(theirs, int | float):
        if math.isclose(ours, theirs, rel_tol=1e-6):
            return True
        return bool(struct.pack("<f", ours) == struct.pack("<f", theirs))
    return bool(ours == theirs)
