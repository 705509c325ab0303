"""The columns of benchmarks/drafting.py: which build, which drafter, which features on.

Features stand in benchmarks/drafting.toml. One that a build does not know is left out, and that is said.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.draft_figures import BASE
from dflashcpp.errors import UsageError
from dflashcpp.llamacpp import Build
from dflashcpp.server.flags import read_flags

TABLE = Path(__file__).with_suffix("").with_name("drafting.toml")
SWITCH = "DFLASHCPP_OFF"

PRISTINE = "pristine "
CONTROL = "no drafter, ours"
OFF = "features off"
ALL = "all features"


@dataclass(frozen=True)
class Feature:
    """One thing that can be turned on and off: by flags, by its name in DFLASHCPP_OFF, by the type of the
    head in the drafter's own file (`convert --head`), or several of them.
    """

    name: str
    on: tuple[str, ...] = ()
    off: tuple[str, ...] = ()
    env: str | None = None
    head: str = ""
    patch: str | None = None
    temperatures: tuple[float, ...] | None = None
    changes_length: bool = False
    trial: bool = False

    @classmethod
    def of(cls, row: dict[str, Any]) -> Feature:
        """From a row of the table."""
        values: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list) else value for key, value in row.items()
        }
        return cls(**values)


@dataclass(frozen=True)
class Table:
    """What drafting.toml says."""

    lengths: tuple[int, ...]
    temperatures: tuple[float, ...]
    features: tuple[Feature, ...]


@dataclass(frozen=True)
class Column:
    """One setting of one build. n_max None: no drafter is loaded at all. Ours: the build has our patches.
    head: type of a head in the drafter's file; empty: it uses the target's.
    """

    name: str
    ours: bool
    n_max: int | None
    flags: tuple[str, ...] = ()
    off: tuple[str, ...] = ()
    head: str = ""
    temperatures: tuple[float, ...] | None = field(default=None)

    def measured_at(self, temperature: float) -> bool:
        """Whether it is worth measuring at this temperature."""
        return self.temperatures is None or temperature in self.temperatures


def read_table(path: Path = TABLE) -> Table:
    """The table of features, lengths and temperatures."""
    rows = tomllib.loads(path.read_text(encoding="utf-8"))
    features = tuple(Feature.of(row) for row in rows.get("feature", ()))
    return Table(tuple(rows["lengths"]), tuple(rows["temperatures"]), features)


def unknown(features: Sequence[Feature], build: Build) -> dict[str, str]:
    """Features this build cannot switch, with the reason."""
    table = read_flags(build.binary("llama-server"))
    found = {}
    for feature in features:
        missing = [word for word in (*feature.on, *feature.off) if _is_flag(word) and not table.has(word)]
        if missing:
            found[feature.name] = f"llama-server does not know {', '.join(dict.fromkeys(missing))}"
        elif feature.env and not _reads_switch(build):
            found[feature.name] = f"the build does not read {SWITCH}"
        elif feature.patch and not _has_patch(build, feature.patch):
            found[feature.name] = f"the build lacks the patch {feature.patch}"
    return found


def _is_flag(word: str) -> bool:
    return word.startswith("-") and not word[1:2].isdigit()


def _reads_switch(build: Build) -> bool:
    """Variables are listed in no `--help`; the name stands in a library that asks for it."""
    libraries = [path for path in (build.root / "bin").glob("lib*") if path.is_file()]
    return any(SWITCH.encode() in path.read_bytes() for path in libraries)


def _has_patch(build: Build, name: str) -> bool:
    """By the manifest; a build without one is taken to have it."""
    names = [patch.removesuffix(".patch").partition("-")[2] for patch in build.patches]
    return not names or name in names


def with_features(
    name: str, features: Sequence[Feature], on: Callable[[Feature], bool], n_max: int
) -> Column:
    """A column of ours: what `on` holds of turned on, all others off."""
    flags = tuple(word for feature in features for word in (feature.on if on(feature) else feature.off))
    off = tuple(feature.env for feature in features if feature.env and not on(feature))
    head = next((feature.head for feature in features if feature.head and on(feature)), "")
    return Column(name, True, n_max, flags, off, head)


def make(table: Table, features: Sequence[Feature], n_max: int) -> list[Column]:
    """Every column for these features, in the order they are shown."""
    columns = [Column(BASE, False, None), Column(CONTROL, True, None)]
    columns += [Column(fixed(length), False, length) for length in sorted({*table.lengths, n_max})]
    columns.append(with_features(OFF, features, lambda _: False, n_max))
    for one in features:
        alone = with_features(f"only {one.name}", features, one.__eq__, n_max)
        columns.append(replace(alone, temperatures=one.temperatures))
    columns.append(all_features(features, n_max))
    return columns


def all_features(features: Sequence[Feature], n_max: int) -> Column:
    """Ours as it is meant to be used."""
    return with_features(ALL, features, lambda feature: not feature.trial, n_max)


def fixed_rows(features: Sequence[Feature], rows: int) -> Column:
    """Ours with every feature but those that change how many rows are drafted: anchor and rows - 1 masks."""
    return with_features(
        ALL, features, lambda feature: not (feature.changes_length or feature.trial), rows - 1
    )


def fixed(length: int) -> str:
    """The name of pristine's column with this length."""
    return f"{PRISTINE}{length}"


def select(columns: Sequence[Column], wanted: Sequence[str]) -> list[Column]:
    """The columns asked for (part of a name is enough), and always the baseline. Raises UsageError."""
    for word in wanted:
        if not any(word in column.name for column in columns):
            names = ", ".join(column.name for column in columns)
            raise UsageError(f"no column is named '{word}'", hint=f"there are: {names}")
    return [c for c in columns if not wanted or c.name == BASE or any(word in c.name for word in wanted)]
