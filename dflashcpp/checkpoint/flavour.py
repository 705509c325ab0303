"""Whose checkpoint this is (`convert/flavours.toml`); what is no plain DFlash drafter is refused by name."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dflashcpp.checkpoint.config import Config
from dflashcpp.checkpoint.safetensors_file import RawTensor
from dflashcpp.errors import DflashError
from dflashcpp.knowledge import table


@dataclass(frozen=True)
class Flavour:
    """A publisher's way of writing a drafter; the columns of `convert/flavours.toml`."""

    name: str
    title: str
    causal: str  # when the config is silent: none, all, sliding
    partial_rotary: bool = False
    sliding_without_switch: bool = False
    unsaid_warns: bool = False


def architectures(config: Config) -> list[str]:
    """The texts in `architectures` (a list, or one text); an empty list when there are none."""
    found = config.at("architectures")
    found = [found] if isinstance(found, str) else found
    return [name for name in found if isinstance(name, str)] if isinstance(found, list) else []


def recognise(config: Config, tensors: Mapping[str, RawTensor]) -> Flavour:
    """The first flavour of the table that fits. Raises DflashError for refused and for unknown ones."""
    refuse(config, tensors)
    named = architectures(config)
    for row in table("convert/flavours.toml")["flavour"]:
        if _fits(row, config, named, tensors):
            return Flavour(
                name=row["name"],
                title=row["title"],
                causal=row["causal"],
                partial_rotary=row.get("partial_rotary", False),
                sliding_without_switch=row.get("sliding_without_switch", False),
                unsaid_warns=row.get("unsaid_warns", False),
            )
    said = ", ".join(named) or "nothing"
    raise DflashError(
        f"{config.source} is no DFlash drafter that dflashcpp knows: architectures says {said}",
        hint="known: DFlashDraftModel, DFlash2DraftModel, MuseGlimmerAssistantModel, speculators' DFlash",
    )


def _fits(row: Mapping[str, Any], config: Config, named: list[str], tensors: Mapping[str, RawTensor]) -> bool:
    if "dflash2" in row and row["dflash2"] != any("candidate_selector." in name for name in tensors):
        return False
    return bool(set(row["architectures"]) & set(named)) or any(
        config.at(path) is not None for path in row["config"]
    )


def refuse(config: Config, tensors: Mapping[str, RawTensor]) -> None:
    """Raise DflashError by name for a checkpoint of another kind (`[[refused]]` of the table)."""
    for row in table("convert/flavours.toml")["refused"]:
        why = _refused_by(row, config, tensors)
        if why:
            article = "an" if row["name"][0] in "AEIOU" else "a"
            raise DflashError(
                f"{config.source} belongs to {article} {row['name']} checkpoint ({why}): {row['reason']}",
                hint=row["instead"],
            )
    _refuse_unknown_kind(config)


def _refuse_unknown_kind(config: Config) -> None:
    """Keys that name the kind of drafter: a value nobody knows may mean another computation."""
    for row in table("convert/flavours.toml")["kind"]:
        value = config.at(row["path"])
        if value is not None and _lower(value) not in row["plain"]:
            raise DflashError(
                f"{config.source}: {row['path']} is {str(value)[:60]!r}, a kind of drafter that dflashcpp "
                f"does not know (plain DFlash: {', '.join(row['plain'])} or nothing)",
                hint=f"if it is a plain DFlash drafter all the same: --set {row['path']}=null",
            )


def _lower(value: Any) -> Any:
    return value.lower() if isinstance(value, str) else value


def _refused_by(row: Mapping[str, Any], config: Config, tensors: Mapping[str, RawTensor]) -> str | None:
    for name in architectures(config):
        if name in row.get("architectures", []):
            return f"architectures says {name}"
    for path, values in row.get("config", {}).items():
        if _lower(config.at(path)) in [_lower(value) for value in values]:
            return f"{path} is {config.at(path)}"
    patterns = [re.compile(pattern) for pattern in row.get("tensors", [])]
    return next((f"tensor {name}" for name in tensors if any(p.search(name) for p in patterns)), None)
