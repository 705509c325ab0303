"""The goals of drafting, each with the figure that came out. Pure arithmetic over the samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.draft_columns import ALL, BASE, PRISTINE
from benchmarks.draft_figures import CODE, Figures, Sample, Spread
from benchmarks.draft_texts import Verdict

CALL_MS = 2.2
WINDOWED, FULL = "windowed drafter", "full drafter"


@dataclass(frozen=True)
class Goal:
    """What was wanted and what came; `came` None where it was not measured."""

    name: str
    want: float
    came: float | None
    at_most: bool = False
    note: str = ""

    @property
    def met(self) -> bool | None:
        """None where it was not measured."""
        if self.came is None:
            return None
        return self.came <= self.want if self.at_most else self.came >= self.want

    def row(self) -> list[str]:
        """For a table."""
        sign = "at most" if self.at_most else "at least"
        came = "not measured" if self.came is None else f"{self.came:.2f}"
        said = {True: "met", False: "NOT MET", None: "-"}[self.met]
        return [self.name, f"{sign} {self.want:g}", came, said, self.note]

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "name": self.name,
            "want": self.want,
            "at_most": self.at_most,
            "came": self.came,
            "met": self.met,
            "note": self.note,
        }


def best_fixed(figures: Figures, temperature: float) -> str | None:
    """Pristine's column with the best mix at this temperature."""
    names = [name for name in figures.columns(temperature) if name.startswith(PRISTINE)]
    return figures.best(names, BASE, temperature)


def goals(samples: Sequence[Sample], verdicts: Sequence[Verdict]) -> list[Goal]:
    """All of them, in the order of the issue that set them."""
    made = Figures.of(samples, "generation")
    return [
        *(_against_pristine(made, temperature) for temperature in made.temperatures()),
        *_code(made),
        *_no_kind_loses(made),
        _call(Figures.of(samples, "call")),
        *_reading(Figures.of(samples, "reading")),
        *_slots(Figures.of(samples, "slots")),
        _texts(verdicts),
    ]


def _against_pristine(figures: Figures, temperature: float) -> Goal:
    best = best_fixed(figures, temperature)
    came = figures.mix(ALL, best, temperature) if best else None
    want = 1.10 if temperature == 0 else 1.20
    return _goal(f"T = {temperature:g}: mix, by pristine's best fixed length", want, came, note=best or "")


def _goal(name: str, want: float, came: Spread | None, *, at_most: bool = False, note: str = "") -> Goal:
    if came is not None and came.rounds > 1:
        note = f"{note} [{came.low:.2f}..{came.high:.2f}]".strip()
    return Goal(name, want, came.median if came else None, at_most, note)


def _code(figures: Figures) -> list[Goal]:
    kinds = [kind for kind in CODE if kind in figures.kinds()]
    came = figures.mix(ALL, BASE, 0.0, kinds) if kinds else None
    return [_goal("T = 0: code, by no drafter", 1.20, came, note=" and ".join(kinds))]


def _no_kind_loses(figures: Figures) -> list[Goal]:
    found = []
    for temperature in figures.temperatures():
        ratios = {kind: figures.ratio(ALL, BASE, temperature, kind) for kind in figures.kinds()}
        known = {kind: value for kind, value in ratios.items() if value is not None}
        worst = min(known, key=lambda kind: known[kind].median) if known else None
        came = known[worst] if worst else None
        found.append(_goal(f"T = {temperature:g}: worst kind, by no drafter", 0.98, came, note=worst or ""))
    return found


def _call(figures: Figures) -> Goal:
    theirs = figures.speed(_pristine(figures), 0.0) if figures.samples else None
    ours = figures.speed(ALL, 0.0)
    kind = figures.kinds()[0] if figures.samples else "4 rows"
    note = f"pristine takes {1e3 / theirs.median:.2f} ms" if theirs else ""
    return Goal(f"ms of a draft call of {kind}", CALL_MS, 1e3 / ours.median if ours else None, True, note)


def _pristine(figures: Figures) -> str:
    return next((name for name in figures.columns() if name.startswith(PRISTINE)), "")


def _reading(figures: Figures) -> list[Goal]:
    return [
        _goal(f"prompt reading, {kind}, by no drafter", want, _read_ratio(figures, kind))
        for kind, want in ((WINDOWED, 0.95), (FULL, 0.90))
    ]


def _read_ratio(figures: Figures, kind: str) -> Spread | None:
    """The baseline reads without any drafter, so it stands under both kinds."""
    return figures.ratio(ALL, BASE, 0.0, kind)


def _slots(figures: Figures) -> list[Goal]:
    kinds = figures.kinds() or ["4 slots"]
    return [
        _goal(f"{kind} at once, by no drafter", 1.0, figures.ratio(ALL, BASE, 0.0, kind)) for kind in kinds
    ]


def _texts(verdicts: Sequence[Verdict]) -> Goal:
    ours = [verdict for verdict in verdicts if not verdict.column.startswith(PRISTINE)]
    wrong = sum(verdict.word == "different" for verdict in ours)
    ties = sum(verdict.word == "tie" for verdict in ours)
    note = f"{len(ours)} texts, {ties} parted at a tie" if ours else ""
    return Goal("greedy texts that differ from no drafter", 0, wrong if ours else None, True, note)
