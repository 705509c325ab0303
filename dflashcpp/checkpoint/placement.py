"""Every tensor of the source gets its row of `convert/tensors.toml`, or is named in an error."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dflashcpp.checkpoint.files import listing
from dflashcpp.checkpoint.safetensors_file import RawTensor
from dflashcpp.errors import DflashError
from dflashcpp.knowledge import table

MAX_LAYERS = 256
_SCALE = re.compile(r"(.*\.weight)_(scale|scale_inv)")


@dataclass
class Placed:
    """The source's tensors by their GGUF names, with the scales of FP8 ones and what was left out."""

    tensors: dict[str, RawTensor] = field(default_factory=dict)
    scales: dict[str, RawTensor] = field(default_factory=dict)
    dropped: dict[str, str] = field(default_factory=dict)  # source name: reason

    def layers(self) -> int:
        """One more than the largest layer number that occurs."""
        numbers = [int(match[1]) for name in self.tensors if (match := re.match(r"blk\.(\d+)\.", name))]
        return max(numbers, default=-1) + 1

    def has(self, feature: str) -> bool:
        """Whether any tensor of a feature is there."""
        return any(row_of(name)["when"] == feature for name in self.tensors)


def rows() -> list[dict[str, Any]]:
    """The rows of `convert/tensors.toml`."""
    found: list[dict[str, Any]] = table("convert/tensors.toml")["tensor"]
    return found


def row_of(gguf_name: str) -> dict[str, Any]:
    """The row of one GGUF name, whatever its layer."""
    pattern = re.sub(r"^blk\.\d+\.", "blk.{i}.", gguf_name)
    return next(row for row in rows() if row["name"] == pattern)


def place(tensors: Mapping[str, RawTensor], where: str) -> Placed:
    """Map source names to GGUF names. Raises DflashError listing every name that has no row."""
    placed, unknown = Placed(), []
    patterns = _patterns()
    for bare, tensor in _without_prefix(tensors, where).items():
        scaled = _SCALE.fullmatch(bare)
        gguf_name = _gguf_name(patterns, scaled[1] if scaled else bare)
        if gguf_name is None:
            reason = _drop_reason(bare)
            if reason is None:
                unknown.append(tensor.name)
            else:
                placed.dropped[tensor.name] = reason
            continue
        target = placed.scales if scaled else placed.tensors
        if gguf_name in target:
            raise DflashError(f"{where}: {target[gguf_name].name} and {tensor.name} are the same tensor")
        target[gguf_name] = tensor
    if unknown:
        raise _unknown(sorted(unknown), where)
    return placed


def _unknown(names: list[str], where: str) -> DflashError:
    biases = [name for name in names if name.endswith(".bias")]
    if biases:
        return DflashError(
            f"{where} has biases, which llama.cpp's DFlash cannot load: {listing(biases)}",
            hint="only drafters with attention_bias false work",
        )
    count = "1 tensor" if len(names) == 1 else f"{len(names)} tensors"
    return DflashError(
        f"{where} has {count} that a DFlash drafter does not have: {listing(names)}",
        hint="nothing may be dropped in silence; if llama.cpp knows them, add rows to convert/tensors.toml",
    )


def _patterns() -> list[tuple[re.Pattern[str], str]]:
    found = []
    for row in rows():
        for source in row["source"]:
            pattern = re.escape(source).replace(re.escape("{i}"), r"(0|[1-9]\d{0,2})")
            found.append((re.compile(pattern), row["name"]))
    return found


def _gguf_name(patterns: list[tuple[re.Pattern[str], str]], bare: str) -> str | None:
    for pattern, name in patterns:
        match = pattern.fullmatch(bare)
        if match is None:
            continue
        if "{i}" not in name:
            return name
        if int(match[1]) < MAX_LAYERS:
            return name.replace("{i}", match[1])
    return None


def _drop_reason(bare: str) -> str | None:
    for row in table("convert/flavours.toml")["drop"]:
        if re.fullmatch(row["pattern"], bare):
            return str(row["reason"])
    return None


def _without_prefix(tensors: Mapping[str, RawTensor], where: str) -> dict[str, RawTensor]:
    prefixes = sorted(table("convert/flavours.toml")["prefixes"], key=len, reverse=True)
    result: dict[str, RawTensor] = {}
    for name, tensor in tensors.items():
        prefix = next((prefix for prefix in prefixes if name.startswith(prefix)), "")
        bare = name[len(prefix) :]
        if bare in result:
            raise DflashError(f"{where}: {result[bare].name} and {name} are the same tensor but for a prefix")
        result[bare] = tensor
    return result


def check_complete(placed: Placed, layers: int, features: frozenset[str], where: str) -> None:
    """Every row of the features must be there, in every layer; DflashError lists what is not."""
    missing = []
    for row in rows():
        if row["when"] not in features or not row["source"]:
            continue
        numbers = range(layers) if "{i}" in row["name"] else [0]
        missing += [
            row["source"][0].format(i=number)
            for number in numbers
            if row["name"].format(i=number) not in placed.tensors
        ]
    if missing:
        count = "1 tensor" if len(missing) == 1 else f"{len(missing)} tensors"
        raise DflashError(
            f"{where} lacks {count} of a drafter with {layers} layers: {listing(missing)}",
            hint="the checkpoint is incomplete; download it again",
        )
