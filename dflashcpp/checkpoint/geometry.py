"""Sizes from tensor shapes, cross-checked with the config: `[[shape]]` of `convert/metadata.toml`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from dflashcpp.checkpoint.config import Config, as_kind
from dflashcpp.checkpoint.placement import Placed, row_of
from dflashcpp.errors import DflashError
from dflashcpp.knowledge import table


def measure(placed: Placed, config: Config, features: frozenset[str]) -> dict[str, int]:
    """The dimensions that shapes are written in, by name.

    Raises DflashError naming tensors whose shapes do not fit together, or a size of the config that
    the tensors contradict.
    """
    rows = [row for row in table("convert/metadata.toml")["shape"] if row.get("when", "always") in features]
    said = {row["field"]: size for row in rows if (size := _said(config, row)) is not None}
    vocab = config.get("vocab")
    said |= {} if vocab is None else {"vocab": vocab}
    sizes = _complete(_from_tensors(rows, placed, said), said)
    wrong = misshapen(placed, sizes)
    if wrong:
        by_config = _complete({**sizes, **said}, said)
        wrong_by_config = misshapen(placed, by_config)
        fewer = wrong_by_config if 0 < len(wrong_by_config) <= len(wrong) else wrong
        raise _misshapen(fewer, _where(placed), config)
    for field, size in said.items():
        if sizes[field] != size:
            row = next(row for row in rows if row["field"] == field)
            raise DflashError(
                f"{config.source} says {_place(config, row)} is {size}, the tensors say {sizes[field]} "
                f"({placed.tensors[row['tensor']].name} is {list(placed.tensors[row['tensor']].shape)})",
                hint="config.json and weights belong to different checkpoints",
            )
    return sizes


def _where(placed: Placed) -> str:
    """The weight file, or the folder when there are several."""
    files = {tensor.file for tensor in placed.tensors.values()}
    return str(files.pop() if len(files) == 1 else files.pop().parent)


def _said(config: Config, row: Mapping[str, Any]) -> int | None:
    found = config.found(row["paths"])
    return as_kind(found[0][1], "int", f"{config.source}: {found[0][0]}") if found else None


def _place(config: Config, row: Mapping[str, Any]) -> str:
    return config.found(row["paths"])[0][0]


def _from_tensors(rows: list[dict[str, Any]], placed: Placed, said: Mapping[str, int]) -> dict[str, int]:
    """Sizes by the rows' expressions; where a shape makes no sense, the config's word for now."""
    sizes: dict[str, int] = {}
    for row in rows:
        shape = placed.tensors[row["tensor"]].shape
        found = _evaluate(row["size"], shape, sizes)
        sizes[row["field"]] = found or said.get(row["field"], 1)
    return sizes


def _evaluate(expression: str, shape: tuple[int, ...], sizes: Mapping[str, int]) -> int | None:
    """`rows / 2 / conv_kernel` from left to right; None when something does not divide or is not there."""
    known = {"rows": shape[0], "columns": shape[-1]} if shape else {}
    if len(shape) == 3:
        known["middle"] = shape[1]
    value, operator = None, ""
    for word in expression.split():
        if word in "*/":
            operator = word
            continue
        number = int(word) if word.isdigit() else {**sizes, **known}.get(word)
        if not number:
            return None
        if operator == "/" and value % number:  # type: ignore[operator]
            return None
        value = number if value is None else (value // number if operator == "/" else value * number)
    return value


def _complete(sizes: dict[str, int], said: Mapping[str, int]) -> dict[str, int]:
    """Dimensions that no tensor tells on its own."""
    if "conv_group" in sizes:
        sizes["conv_groups"] = max(1, sizes["hidden"] // sizes["conv_group"])
    vocab = said.get("vocab")
    if vocab is not None:
        sizes.setdefault("vocab", vocab)
    if "draft_vocab" in sizes:
        sizes.setdefault("vocab", sizes["draft_vocab"])
    if "vocab" in sizes:
        sizes.setdefault("draft_vocab", sizes["vocab"])
    return sizes


def misshapen(placed: Placed, sizes: Mapping[str, int]) -> list[str]:
    """`name is [..], expected [..]` for every tensor whose shape is not the table's."""
    wrong = []
    for name, tensor in placed.tensors.items():
        expected = [_product(entry, sizes) for entry in row_of(name)["shape"]]
        if list(tensor.shape) != expected:
            wrong.append(f"{tensor.name} is {list(tensor.shape)}, expected {expected}")
    return wrong


def table_shape(name: str, sizes: Mapping[str, int]) -> list[int] | None:
    """The torch shape that the table gives a GGUF tensor; None when it or a dimension is unknown."""
    try:
        return [_product(entry, sizes) for entry in row_of(name)["shape"]]
    except (StopIteration, KeyError):
        return None


def _product(entry: str, sizes: Mapping[str, int]) -> int:
    return math.prod(
        int(part) if part.isdigit() else sizes[part] for part in entry.replace(" ", "").split("*")
    )


def _misshapen(wrong: list[str], where: str, config: Config) -> DflashError:
    count = "1 tensor has a wrong shape" if len(wrong) == 1 else f"{len(wrong)} tensors have wrong shapes"
    return DflashError(
        f"{where}: {count}: {'; '.join(wrong[:6])}{f' and {len(wrong) - 6} more' if len(wrong) > 6 else ''}",
        hint=f"weights and {config.source} do not belong together, or a tensor was stored transposed",
    )
