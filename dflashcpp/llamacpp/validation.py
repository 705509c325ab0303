"""Every series looked over: headers, series file against folder, and each patch against its base."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from dflashcpp import knowledge
from dflashcpp.errors import DflashError
from dflashcpp.llamacpp import patches, source
from dflashcpp.llamacpp.bases import Base, all_bases
from dflashcpp.llamacpp.patches import Patch, PatchError, Series
from dflashcpp.llamacpp.tree import StoreTree
from dflashcpp.progress import SILENT, Progress

UNCHECKED = "not checked"


@dataclass(frozen=True)
class PatchReport:
    """One patch of a series; `state` is how it fares on its base."""

    name: str
    description: str
    forwarded: str
    drop_when: str
    files: tuple[str, ...]
    state: str


@dataclass(frozen=True)
class SeriesReport:
    """One base and its series. `patches` is None where there is no series for it."""

    base: str
    commit: str
    date: str
    knows: tuple[str, ...]
    digest: str | None
    patches: tuple[PatchReport, ...] | None
    sources: tuple[str, ...]
    problems: tuple[str, ...]


def report(
    bases: tuple[Base, ...] | None = None,
    *,
    check: bool,
    root: Path | None = None,
    progress: Progress = SILENT,
) -> list[SeriesReport]:
    """Look over the series of `bases` (default: all).

    With `check` every patch is applied in memory to its base, whose source is fetched when it is
    not in the cache; without, only where it is. Faults are collected, not raised.
    """
    root = root or knowledge.folder("patches")
    reports = [_series_report(base, root, check, progress) for base in bases or all_bases()]
    if bases is None and check:
        known = {base.tag for base in all_bases()}
        stray = [path.parent.name for path in sorted(root.glob("*/series")) if path.parent.name not in known]
        problems = tuple(f"{name}/series is there, but bases.toml has no such base" for name in stray)
        if problems:
            reports.append(SeriesReport("(others)", "", "", (), None, None, (), problems))
    return reports


def _series_report(base: Base, root: Path, check: bool, progress: Progress) -> SeriesReport:
    facts = (base.tag, base.commit, base.date, base.knows)
    if not patches.has_series(base, root):
        return SeriesReport(*facts, None, None, (), ())
    try:
        problems = [f"{base.tag}/{name} is not in the series" for name in patches.unlisted(root / base.tag)]
        series = patches.load_series(base, root)
    except PatchError as error:
        return SeriesReport(*facts, None, (), (), (error.message,))
    problems += [problem for patch in series.patches for problem in patches.header_problems(patch)]
    problems += _undocumented(series, root)
    states: dict[str, str] = {}
    try:
        store = source.obtain(base, progress=progress) if check else source.cached(base)
        states = patches.plan(series, StoreTree(store, base.tree)).state if store else {}
    except DflashError as error:
        problems.append(error.message)
    rows = tuple(_patch_report(patch, states.get(patch.name, UNCHECKED)) for patch in series.patches)
    return SeriesReport(*facts, series.digest, rows, tuple(series.sources), tuple(problems))


def _undocumented(series: Series, root: Path) -> list[str]:
    readme = root / "README.md"
    text = readme.read_text(encoding="utf-8") if readme.is_file() else ""
    names = [patch.name.removesuffix(".patch") for patch in series.patches]
    return [f"{name}: patches/README.md has no row for it" for name in names if name not in text]


def _patch_report(patch: Patch, state: str) -> PatchReport:
    return PatchReport(
        name=patch.name,
        description=patch.description,
        forwarded=patch.header.get("Forwarded", ""),
        drop_when=patch.header.get("Drop-When", ""),
        files=patch.touched,
        state=state,
    )
