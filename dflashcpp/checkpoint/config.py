"""Settings out of config.json by the rows of `convert/metadata.toml`: ordered places, no silent defaults."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from typing import Any

from dflashcpp.errors import DflashError
from dflashcpp.knowledge import table


def lookup(config: Mapping[str, Any], path: str) -> Any:
    """The value at `path` (dots reach into objects), or None; a null counts as absent."""
    value: Any = config
    for part in path.split("."):
        if not isinstance(value, Mapping):
            return None
        value = value.get(part)
    return value


def _with(values: Any, parts: list[str], value: Any) -> dict[str, Any]:
    """A copy of `values` with `value` at the path `parts`."""
    found = dict(values) if isinstance(values, Mapping) else {}
    found[parts[0]] = _with(found.get(parts[0]), parts[1:], value) if parts[1:] else value
    return found


class Config:
    """One config.json with the user's overrides on top.

    `source` names it in errors; `overrides` maps a path (`dflash_config.causal`) to the value to take
    instead: an overridden place is believed, the other places of the same setting are not asked.
    """

    def __init__(
        self, values: Mapping[str, Any], source: str, overrides: Mapping[str, Any] | None = None
    ) -> None:
        self.values = values
        self.source = source
        self.overrides = dict(overrides or {})
        for path, value in self.overrides.items():
            self.values = _with(self.values, path.split("."), value)
        self._rows = {row["field"]: row for row in table("convert/metadata.toml")["setting"]}
        self._asked: set[str] = set()
        self._check_groups()

    def at(self, path: str) -> Any:
        """The value at one place, an override first; None when it is not there."""
        self._asked.add(path)
        return lookup(self.values, path)

    def found(self, paths: list[str]) -> list[tuple[str, Any]]:
        """The places of `paths` that say something; only the overridden ones when there are any."""
        taken = [path for path in paths if path in self.overrides] or paths
        return [(path, value) for path in taken if (value := self.at(path)) is not None]

    def get(self, field: str, *, needed: bool = True) -> Any:
        """The setting `field`, checked for its kind and minimum, or None when the config is silent.

        `needed` false returns None even for a setting that has no default.

        Raises DflashError for two places that disagree, a wrong kind, and for a needed one that is missing.
        """
        row = self._rows[field]
        places = [(path, self._checked(path, value, row)) for path, value in self.found(row["paths"])]
        if not places:
            if needed and row.get("need"):
                raise self.missing(field)
            return None
        for path, value in places[1:]:
            if value != places[0][1]:
                raise DflashError(
                    f"{self.source}: {places[0][0]} is {places[0][1]} but {path} is {value}",
                    hint=f"say which one is right with --set {path}=VALUE",
                )
        return places[0][1]

    def place(self, field: str) -> str:
        """Where `field` was found, else the first place where it belongs; for messages."""
        paths = self._rows[field]["paths"]
        return next((path for path, _ in self.found(paths)), paths[0])

    def missing(self, field: str, hint: str | None = None) -> DflashError:
        """The error for a setting that nobody said."""
        paths = self._rows[field]["paths"]
        return DflashError(
            f"{self.source} does not say {paths[0]}{_or(paths[1:])}, and there is no safe default",
            hint=hint
            or f"take the config.json that belongs to these weights, or pass --set {paths[-1]}=VALUE",
        )

    def unknown(self) -> list[str]:
        """Keys of `dflash_config` that nothing reads: new ones, or misspelt."""
        group = lookup(self.values, "dflash_config") or {}
        known = self._known()
        return [f"dflash_config.{key}" for key in group if f"dflash_config.{key}" not in known]

    def check_overrides(self) -> None:
        """Raise DflashError for an override that nothing reads: a misspelt one would change nothing."""
        known = self._known()
        for path in self.overrides:
            if path in known or any(path.startswith(f"{group}.") for group in self._asked):
                continue
            near = difflib.get_close_matches(path, known, 3, 0.6)
            raise DflashError(
                f"--set {path}: no setting of a drafter has that name",
                hint=f"close to it: {', '.join(near)}" if near else "the names are those of config.json",
            )

    def _known(self) -> set[str]:
        rows = [*self._rows.values(), *table("convert/metadata.toml")["shape"]]
        named = {path for row in rows for path in row["paths"]}
        return self._asked | named | set(table("convert/metadata.toml")["ignored"])

    def _check_groups(self) -> None:
        """What should be an object and is not would be overlooked with all that is meant by it."""
        for group in table("convert/metadata.toml")["groups"]:
            value = self.values.get(group)
            if value is not None and not isinstance(value, Mapping):
                raise DflashError(
                    f"{self.source}: {group} must be an object, it is {json.dumps(value)[:80]}",
                    hint="take the config.json that belongs to these weights",
                )

    def _checked(self, path: str, value: Any, row: Mapping[str, Any]) -> Any:
        hint = f"correct it, or pass --set {path}=VALUE"
        value = as_kind(value, row["kind"], f"{self.source}: {path}", hint)
        least = row.get("min")
        if least is not None and (value < least or (row["kind"] == "float" and value <= least)):
            raise DflashError(
                f"{self.source}: {path} is {value}; it must be {_bound(row)} {least}", hint=hint
            )
        return value


def _bound(row: Mapping[str, Any]) -> str:
    return "greater than" if row["kind"] == "float" else "at least"


def _or(paths: list[str]) -> str:
    return f" (or {' or '.join(paths)})" if paths else ""


def as_kind(value: Any, kind: str, what: str, hint: str | None = None) -> Any:
    """`value` as int, float, bool, text or ints; DflashError naming `what` when it is none.

    Whole numbers must fit 32 bits and numbers a 32-bit float: so GGUF stores them.
    """
    if kind == "int" and type(value) is int and abs(value) < 1 << 31:
        return value
    if kind == "float" and type(value) in (int, float) and (value == 0 or 1e-37 < abs(value) < 1e30):
        return float(value)
    if kind == "bool" and isinstance(value, bool):
        return value
    if kind == "text" and isinstance(value, str):
        return value
    if kind == "ints" and isinstance(value, list) and len(value) <= 1024:
        return [as_kind(item, "int", f"an entry of {what}", hint) for item in value]
    words = {
        "int": "a whole number" if type(value) is not int else "between -2^31 and 2^31",
        "float": "a number" if type(value) not in (int, float) else "a number that a 32-bit float can hold",
        "bool": "true or false",
        "text": "a text",
    }
    raise DflashError(
        f"{what} must be {words.get(kind, 'a list of whole numbers')}, it is {json.dumps(value)[:80]}",
        hint=hint or "correct it, or download that file again",
    )


def parse_overrides(pairs: list[str]) -> dict[str, Any]:
    """`["rope_theta=5e6", ...]` as a mapping; the value is JSON, else a text."""
    result: dict[str, Any] = {}
    for pair in pairs:
        path, equals, text = pair.partition("=")
        if not equals or not path:
            raise DflashError(f"--set {pair}: expected KEY=VALUE, for example rope_theta=1000000")
        try:
            result[path] = json.loads(text)
        except ValueError:
            result[path] = text
    return result
