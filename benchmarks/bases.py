"""Drafting on an older base against the default one: the same prompts by turns, a fixed draft length.

    dflashcpp build && dflashcpp build --base f449e05
    python -m benchmarks.bases --base f449e05

For the real small pair, with its 4-bit target and with that in BF16: speed of the base by that of the
default one, what was drafted and accepted, and how many greedy texts are the same.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks import draft_files, draft_workloads, machine
from benchmarks.draft_asking import Whole, ask
from dflashcpp import llamacpp, pairs
from dflashcpp.cli._output import Output
from dflashcpp.errors import DflashError
from dflashcpp.server import LlamaServer

TOKENS = 96


@dataclass
class Found:
    """One target: speed ratios by prompt, sums of drafted and accepted tokens, equal texts."""

    ratios: list[float] = field(default_factory=list)
    drafted: list[int] = field(default_factory=lambda: [0, 0])
    accepted: list[int] = field(default_factory=lambda: [0, 0])
    same: int = 0

    def add(self, answers: list[Whole]) -> None:
        """The default base's answer and the other's to one prompt."""
        rates = [one.timings.predicted_n / one.timings.predicted_ms for one in answers]
        self.ratios.append(rates[1] / rates[0])
        for side, one in enumerate(answers):
            self.drafted[side] += one.timings.drafted or 0
            self.accepted[side] += one.timings.accepted or 0
        self.same += answers[0].tokens == answers[1].tokens


def main() -> int:
    """Measure and print; 2 when a build is missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--base", default="f449e05")
    parser.add_argument("--n-max", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    output = Output(as_json=given.json)
    try:
        _measure(given, output)
    except DflashError as error:
        output.error(error)
        return 2
    return 0


def _measure(given: argparse.Namespace, output: Output) -> None:
    builds = [_build(None), _build(given.base)]
    facts = machine.facts(dict(zip(("default", given.base), builds, strict=True)), given.threads)
    output.text(f"{facts['cpu']}, {facts['cores']} cores, load before {facts['load_before']}")
    pair = pairs.load_pair()
    small = pairs.ensure_target(pair, output.progress())
    drafter = pairs.ensure_drafter(pair, output.progress(), target=small)
    rows, result = [], {}
    for target in (small, draft_files.bf16_target(small, builds[0], output.progress())):
        found = _by_turns(target, drafter, builds, given)
        result[target.name] = vars(found)
        rows.append([target.name, *_cells(found)])
    headers = ["target", f"{given.base} by default", "drafted", "accepted", "same texts"]
    output.table(headers, rows)
    output.result({"machine": facts, "targets": result}, "")


def _build(base: str | None) -> llamacpp.Build:
    found = llamacpp.find_build(base=base)
    if found is None:
        flag = f" --base {base}" if base else ""
        raise DflashError("a build is missing", hint=f"dflashcpp build{flag}")
    return found


def _cells(found: Found) -> list[str]:
    ratios = found.ratios
    speed = f"{statistics.median(ratios):.3f} [{min(ratios):.2f}..{max(ratios):.2f}]"
    counted = [f"{one[1]} by {one[0]}" for one in (found.drafted, found.accepted)]
    return [speed, *counted, f"{found.same} of {len(ratios)}"]


def _by_turns(target: Path, drafter: Path, builds: list[llamacpp.Build], given: argparse.Namespace) -> Found:
    found = Found()
    flags = {"parallel": 1, "threads": given.threads, "cache_ram": 0, "ctx_size": 2048}
    flags |= {"spec_draft_n_max": given.n_max, "spec_draft_adaptive": False}
    with ExitStack() as stack:
        servers = [stack.enter_context(LlamaServer(target, drafter, build=one, **flags)) for one in builds]
        for number, prompt in enumerate(_prompts()):
            answers: dict[int, Whole] = {}
            for side in (0, 1) if number % 2 else (1, 0):
                client = servers[side].client()
                said = client.apply_template([{"role": "user", "content": prompt}])
                answers[side] = ask(client, said, TOKENS)
            found.add([answers[0], answers[1]])
    return found


def _prompts() -> list[str]:
    workloads = [one for one in draft_workloads.load([]) if not one.kind.startswith("long")]
    return [conversation.turns[0] for one in workloads for conversation in one.conversations[:2]]


if __name__ == "__main__":
    sys.exit(main())
