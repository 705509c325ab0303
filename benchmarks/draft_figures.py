"""The arithmetic of benchmarks/drafting.py: medians, ratios, mixes, goals. No server, no clock.

Ratios are taken of what was measured by turns (`Sample.beside`), else within a round, so that what slows the
machine for a while slows both sides; the median over the rounds is what counts, lowest and highest are shown
beside it. A mix is the geometric mean over
workloads of the ratio of each, so that every workload counts alike, however long its texts are; a
workload of several kinds (the held-out prompts) is the geometric mean of them.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

BASE = "no drafter"
CODE = ("coding", "held-out/code")


@dataclass(frozen=True)
class Sample:
    """One setting measured once: `amount` tokens (or draft calls) in `seconds`.

    part: generation, reading, slots or call. kind: of workload. whole_seconds: with the reading of the
    prompts. verify_steps: None where the engine did not tell. foreign: share of the machine that other
    processes took meanwhile, 0 to 1. lengths[n]: steps in which n tokens were drafted, empty if not told.
    beside, whole_beside: amount per second of no drafter, asked the same by turns with this column; 0: it
    was not.
    """

    part: str
    column: str
    temperature: float
    kind: str
    round: int
    amount: int
    seconds: float
    whole_seconds: float = 0.0
    drafted: int = 0
    accepted: int = 0
    verify_steps: int | None = None
    foreign: float = 0.0
    lengths: tuple[int, ...] = ()
    beside: float = 0.0
    whole_beside: float = 0.0

    @property
    def rate(self) -> float:
        """Amount per second."""
        return self.amount / self.seconds if self.seconds > 0 else math.nan

    @property
    def length(self) -> float | None:
        """Mean accepted length, the target's own token included."""
        return 1 + self.accepted / self.verify_steps if self.verify_steps else None


@dataclass(frozen=True)
class Spread:
    """Median, lowest and highest over `rounds` rounds."""

    median: float
    low: float
    high: float
    rounds: int

    def text(self, digits: int = 2) -> str:
        """The median, with the range when there is one."""
        middle = f"{self.median:.{digits}f}"
        return middle if self.rounds < 2 else f"{middle} [{self.low:.{digits}f}..{self.high:.{digits}f}]"


def spread(values: Iterable[float | None]) -> Spread | None:
    """Median, lowest and highest of the values that are numbers; None without any."""
    kept = [value for value in values if value is not None and math.isfinite(value)]
    return Spread(statistics.median(kept), min(kept), max(kept), len(kept)) if kept else None


@dataclass(frozen=True)
class Figures:
    """The samples of one part, to be asked for ratios."""

    samples: tuple[Sample, ...]

    @classmethod
    def of(cls, samples: Iterable[Sample], part: str) -> Figures:
        """Those of one part."""
        return cls(tuple(sample for sample in samples if sample.part == part))

    def columns(self, temperature: float | None = None) -> list[str]:
        """Column names in the order they were measured."""
        return list(dict.fromkeys(s.column for s in self._at(temperature)))

    def kinds(self) -> list[str]:
        """Kinds of workload in the order they were measured first."""
        return sorted({s.kind for s in self.samples})

    def temperatures(self) -> list[float]:
        """Temperatures, lowest first."""
        return sorted({s.temperature for s in self.samples})

    def speed(self, column: str, temperature: float, kind: str | None = None) -> Spread | None:
        """Amount per second; over all kinds the sum of amounts by the sum of seconds."""
        return spread(_total(group) for group in self._rounds(column, temperature, kind).values())

    def length(self, column: str, temperature: float, kind: str | None = None) -> float | None:
        """Mean accepted length over all rounds; None where nothing was drafted or steps are unknown."""
        chosen = [s for g in self._rounds(column, temperature, kind).values() for s in g if s.drafted]
        if not chosen or any(s.verify_steps is None for s in chosen):
            return None
        steps = sum(s.verify_steps or 0 for s in chosen)
        return 1 + sum(s.accepted for s in chosen) / steps if steps else None

    def drafted_a_step(self, column: str, temperature: float) -> float | None:
        """Tokens drafted in a step of the target, over all rounds; None where nobody told the steps."""
        chosen = [s for g in self._rounds(column, temperature, None).values() for s in g]
        drafted = sum(s.drafted for s in chosen)
        steps = sum(sum(s.lengths) or s.verify_steps or 0 for s in chosen)
        return drafted / steps if steps and drafted else None

    def ratio(
        self, column: str, base: str, temperature: float, kind: str, *, whole: bool = False
    ) -> Spread | None:
        """Speed of `column` by speed of `base` on one kind, round by round. `whole`: by whole requests."""
        return spread(self._ratios(column, base, temperature, kind, whole).values())

    def mix(self, column: str, base: str, temperature: float, kinds: Sequence[str] = ()) -> Spread | None:
        """The mix of `column` by that of `base` (see the module's first lines), over all or these kinds."""
        by_kind = {
            kind: self._ratios(column, base, temperature, kind, False) for kind in kinds or self.kinds()
        }
        rounds = set.intersection(*map(set, by_kind.values())) if by_kind else set()
        return spread(mix({kind: found[turn] for kind, found in by_kind.items()}) for turn in sorted(rounds))

    def best(self, columns: Sequence[str], base: str, temperature: float) -> str | None:
        """The column with the highest median mix."""
        found = {column: self.mix(column, base, temperature) for column in columns}
        known = {column: value.median for column, value in found.items() if value is not None}
        return max(known, key=lambda column: known[column]) if known else None

    def _at(self, temperature: float | None) -> list[Sample]:
        return [s for s in self.samples if temperature is None or s.temperature == temperature]

    def _rounds(self, column: str, temperature: float, kind: str | None) -> dict[int, list[Sample]]:
        found: dict[int, list[Sample]] = {}
        for sample in self._at(temperature):
            if sample.column == column and kind in (None, sample.kind):
                found.setdefault(sample.round, []).append(sample)
        return found

    def _ratios(self, column: str, base: str, temperature: float, kind: str, whole: bool) -> dict[int, float]:
        ours, theirs = (self._rounds(name, temperature, kind) for name in (column, base))
        found = {}
        for turn, samples in ours.items():
            one = _by_turns(samples, whole)
            if one is not None and base == BASE and column != BASE:
                found[turn] = one
            elif turn in theirs:
                other = _by_turns(theirs[turn], whole)
                if one is None or other is None:
                    rate = _whole if whole else _total
                    one, other = rate(samples), rate(theirs[turn])
                found[turn] = one / other if other else math.nan
        return {turn: ratio for turn, ratio in found.items() if ratio > 0}


def _by_turns(samples: list[Sample], whole: bool) -> float | None:
    """Speed by that of no drafter at the same time; None where it was not measured so."""
    besides = [s.whole_beside if whole else s.beside for s in samples]
    if not all(besides):
        return None
    return (_whole if whole else _total)(samples) / statistics.fmean(besides)


def _total(samples: list[Sample]) -> float:
    seconds = sum(s.seconds for s in samples)
    return sum(s.amount for s in samples) / seconds if seconds > 0 else math.nan


def _whole(samples: list[Sample]) -> float:
    seconds = sum(s.whole_seconds for s in samples)
    return sum(s.amount for s in samples) / seconds if seconds > 0 else math.nan


def mix(ratios: Mapping[str, float]) -> float:
    """Geometric mean over workloads; kinds named `workload/kind` are first drawn together the same way."""
    groups: dict[str, list[float]] = {}
    for kind, ratio in ratios.items():
        groups.setdefault(kind.partition("/")[0], []).append(ratio)
    return statistics.geometric_mean([statistics.geometric_mean(group) for group in groups.values()])
