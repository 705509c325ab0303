"""Everything a run of benchmarks/drafting.py found out, and the file it is kept in between rounds."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.draft_figures import Sample
from benchmarks.draft_goals import goals
from benchmarks.draft_texts import Verdict
from dflashcpp.errors import DflashError


@dataclass
class Results:
    """Samples, verdicts about texts, the machine, what was left out and why."""

    machine: dict[str, Any]
    samples: list[Sample] = field(default_factory=list)
    verdicts: list[Verdict] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """Plain values, with the goals."""
        return {
            "machine": self.machine,
            "left_out": self.left_out,
            "goals": [goal.as_json() for goal in goals(self.samples, self.verdicts)],
            "samples": [asdict(sample) for sample in self.samples],
            "verdicts": [asdict(verdict) for verdict in self.verdicts],
        }

    def save(self, path: Path) -> None:
        """Write the file in one step."""
        temporary = path.with_name(f"{path.name}.{os.getpid()}.part")
        temporary.write_text(json.dumps(self.as_json(), ensure_ascii=False), encoding="utf-8")
        temporary.replace(path)


def load(path: Path) -> Results:
    """What `save` or `--json` wrote. Raises DflashError."""
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))
        samples = [Sample(**{**row, "lengths": tuple(row["lengths"])}) for row in rows["samples"]]
        verdicts = [Verdict(**{**row, "place": tuple(row["place"])}) for row in rows["verdicts"]]
        return Results(rows["machine"], samples, verdicts, rows["left_out"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DflashError(f"{path} holds no results of benchmarks.drafting: {error!r}") from error


def merge(parts: Sequence[Results]) -> Results:
    """Rounds of several runs as if of one; they must be of the same builds. Raises DflashError."""
    first = parts[0]
    merged = Results(first.machine, left_out=dict(first.left_out))
    for number, part in enumerate(parts):
        if part.machine["builds"] != first.machine["builds"]:
            raise DflashError("these results are of different builds: they cannot be put together")
        shift = 1000 * number
        merged.samples += [Sample(**{**asdict(s), "round": s.round + shift}) for s in part.samples]
        merged.verdicts += [Verdict(**{**asdict(v), "round": v.round + shift}) for v in part.verdicts]
        merged.left_out |= part.left_out
    return merged
