"""Drafting side by side: no drafter, llama.cpp as it is, and ours with every feature off, alone, all on.

    python -m benchmarks.drafting                       # everything; an hour on two cores
    python -m benchmarks.drafting --quick               # one short round of the columns that matter
    python -m benchmarks.drafting --only coding --columns "pristine 4" --columns "all features" --rounds 1
    python -m benchmarks.drafting --save run.json       # kept after every round, also when stopped
    python -m benchmarks.drafting --from run.json       # the tables of a run that was made before

The built-in real pair, its target in BF16. Every column has a server of its own, started anew in every round;
no two run at once. benchmarks/README.md says what the figures mean. Ratios mean something on a quiet machine
only: its load is printed.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks import draft_columns, draft_files, draft_report, draft_results, draft_workloads, machine
from benchmarks.draft_columns import BASE, CONTROL, Column, Feature, fixed
from benchmarks.draft_figures import Sample
from benchmarks.draft_goals import FULL, WINDOWED
from benchmarks.draft_measuring import Setup, Text, draft_calls, generation, parallel, reading
from benchmarks.draft_results import Results
from benchmarks.draft_texts import judge
from benchmarks.draft_workloads import Workload
from dflashcpp import llamacpp, pairs
from dflashcpp.cli._output import Output
from dflashcpp.errors import DflashError
from dflashcpp.server.launch import DEFAULT_N_MAX

PARTS = ("generation", "reading", "slots", "call")
CALL_ROWS = 4
QUICK_LENGTHS = (2, 4)
QUICK_TEMPERATURES = (0.0, 1.0)


@dataclass(frozen=True)
class Plan:
    """What is to be measured."""

    rounds: int
    parts: tuple[str, ...]
    temperatures: tuple[float, ...]
    columns: tuple[Column, ...]
    features: tuple[Feature, ...]
    workloads: tuple[Workload, ...]
    slots: int
    n_max: int
    prompt_words: int


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; 1 when a goal was missed, 2 when nothing could be measured."""
    given = _parser().parse_args(arguments)
    output = Output(as_json=given.json)
    try:
        results = _loaded(given.saved) if given.saved else _measured(given, output)
    except DflashError as error:
        output.error(error)
        return 2
    draft_report.show(results, output)
    found = results.as_json()
    output.result(found, f"again: python -m benchmarks.drafting {' '.join(sys.argv[1:])}".rstrip())
    return 1 if any(goal["met"] is False for goal in found["goals"]) else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, help="default: 3, with --quick 1")
    parser.add_argument("--quick", action="store_true", help="minutes: fewer columns, shorter texts")
    parser.add_argument("--only", action="append", default=[], metavar="KIND", help="workloads so named")
    parser.add_argument("--columns", action="append", default=[], metavar="NAME", help="columns so named")
    parser.add_argument("--part", action="append", choices=PARTS, help="default: all of them")
    parser.add_argument("--temperature", action="append", type=float, help="default: as in drafting.toml")
    parser.add_argument("--n-max", type=int, default=DEFAULT_N_MAX, help="drafted at most by ours")
    parser.add_argument("--slots", type=int, default=4)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="of llama-server")
    parser.add_argument("--max-tokens", type=int, help="cut every answer shorter than its workload says")
    parser.add_argument("--conversations", type=int, help="at most so many of every workload")
    parser.add_argument("--build", action="store_true", help="compile what is missing; else it is an error")
    parser.add_argument("--ours", type=Path, metavar="FILE", help="a llama-server in place of our build")
    parser.add_argument("--pristine", type=Path, metavar="FILE", help="one in place of pristine llama.cpp")
    parser.add_argument("--save", type=Path, metavar="FILE", help="keep the results after every round")
    parser.add_argument("--from", dest="saved", type=Path, action="append", metavar="FILE", help="show these")
    parser.add_argument("--json", action="store_true")
    return parser


def _loaded(files: Sequence[Path]) -> Results:
    return draft_results.merge([draft_results.load(file) for file in files])


def _measured(given: argparse.Namespace, output: Output) -> Results:
    _clean_environment(output)
    builds = {
        "ours": _build(given.ours, given.build, True, output),
        "pristine": _build(given.pristine, given.build, False, output),
    }
    table = draft_columns.read_table()
    left_out = draft_columns.unknown(table.features, builds["ours"])
    plan = make_plan(given, table, [one for one in table.features if one.name not in left_out])
    results = Results(machine.facts(builds, given.threads), left_out=left_out)
    for name, why in left_out.items():
        output.warning(f"{name} is left out: {why}")
    if results.machine["load_before"] > machine.BUSY_LOAD:
        output.warning(f"the load is {results.machine['load_before']}: ratios mean little")
    with tempfile.TemporaryDirectory(prefix="drafting-") as scratch:
        setup, windowed = _files(builds, given.threads, Path(scratch), plan.features, output)
        results.machine["models"] = f"{setup.target.name}, {setup.drafter.name}"
        _run(plan, setup, windowed, results, given.save, output)
    return results


def _clean_environment(output: Output) -> None:
    for name in [name for name in os.environ if name.startswith(("LLAMA_ARG_", "DFLASHCPP_TRACE"))]:
        output.warning(f"{name} is set: it is taken out for this run")
        del os.environ[name]


def _build(given: Path | None, compile_: bool, patched: bool, output: Output) -> llamacpp.Build:
    if given is not None:
        return draft_files.build_at(given)
    if compile_:
        return llamacpp.build(patches=patched, progress=output.progress())
    found = llamacpp.find_build(patched=patched)
    if found is None:
        flag = "" if patched else " --no-patches"
        raise DflashError("a build is missing", hint=f"dflashcpp build{flag}, or --build")
    return found


def _files(
    builds: dict[str, llamacpp.Build],
    threads: int,
    scratch: Path,
    features: Sequence[Feature],
    output: Output,
) -> tuple[Setup, Path]:
    progress = output.progress()
    pair = pairs.load_pair()
    small = pairs.ensure_target(pair, progress)
    target = draft_files.bf16_target(small, builds["pristine"], progress)
    drafter = pairs.ensure_drafter(pair, progress, target=small)
    windowed = draft_files.windowed_drafter(pair, small, scratch, progress)
    heads = {
        one.head: draft_files.drafter_with_head(pair, small, one.head, scratch, progress)
        for one in features
        if one.head
    }
    return Setup(target, drafter, builds, threads, scratch, heads=heads), windowed


def make_plan(given: argparse.Namespace, table: draft_columns.Table, features: Sequence[Feature]) -> Plan:
    """What the arguments ask for. Raises UsageError for names that are none."""
    if given.quick:
        table = replace(table, lengths=QUICK_LENGTHS, temperatures=QUICK_TEMPERATURES)
    columns = draft_columns.make(table, features, given.n_max)
    if given.quick and not given.columns:
        columns = [one for one in columns if one.name != CONTROL and not one.name.startswith("only ")]
    workloads = draft_workloads.load(given.only)
    conversations = given.conversations or (1 if given.quick else None)
    tokens = given.max_tokens or (48 if given.quick else None)
    return Plan(
        rounds=given.rounds or (1 if given.quick else 3),
        parts=tuple(given.part or PARTS),
        temperatures=tuple(given.temperature or table.temperatures),
        columns=tuple(draft_columns.select(columns, given.columns)),
        features=tuple(features),
        workloads=tuple(one.shorter(conversations or 10**6, tokens or 10**6) for one in workloads),
        slots=given.slots,
        n_max=given.n_max,
        prompt_words=300 if given.quick else 1200,
    )


def _run(
    plan: Plan, setup: Setup, windowed: Path, results: Results, save: Path | None, output: Output
) -> None:
    """All rounds. What was measured stays when it is stopped by Ctrl-C."""
    texts: list[Text] = []
    try:
        for turn in range(plan.rounds):
            output.status(f"round {turn + 1} of {plan.rounds}")
            texts += _round(plan, setup, windowed, turn, results.samples, output)
            if save:
                results.save(save)
        output.status("comparing texts")
        results.verdicts += judge(setup, texts)
    except KeyboardInterrupt:
        output.warning("stopped: what follows is of the rounds before, texts are not compared")
    if save:
        results.save(save)


def _round(
    plan: Plan, setup: Setup, windowed: Path, turn: int, samples: list[Sample], output: Output
) -> list[Text]:
    texts: list[Text] = []
    if "generation" in plan.parts:
        for temperature, column in _settings(plan, turn):
            made, said = generation(setup, column, temperature, turn, plan.workloads)
            samples += made
            texts += said
            output.status(f"  T = {temperature:g}, {column.name}: {_speed(made):.1f} tok/s")
    if "reading" in plan.parts:
        samples += _read(plan, setup, windowed, turn)
    few = [one.shorter(2, 64) for one in plan.workloads if not one.kind.startswith("long")]
    columns = _main_columns(plan)
    if "slots" in plan.parts:
        chosen = [Column(BASE, False, None), *columns]
        samples += [parallel(setup, column, plan.slots, turn, few) for column in _rotated(chosen, turn)]
    if "call" in plan.parts:
        chosen = [Column(fixed(CALL_ROWS - 1), False, CALL_ROWS - 1)]
        chosen.append(draft_columns.fixed_rows(plan.features, CALL_ROWS))
        calls = [draft_calls(setup, column, turn, few) for column in _rotated(chosen, turn)]
        samples += [sample for sample in calls if sample is not None]
    return texts


def _settings(plan: Plan, turn: int) -> Iterator[tuple[float, Column]]:
    """Temperature by temperature, the columns in an order that turns with the round."""
    for temperature in plan.temperatures:
        columns = [column for column in plan.columns if column.measured_at(temperature)]
        for column in _rotated(columns, turn * max(1, len(columns) // plan.rounds)):
            yield temperature, column


def _rotated(columns: Sequence[Column], by: int) -> list[Column]:
    by %= len(columns)
    return [*columns[by:], *columns[:by]]


def _main_columns(plan: Plan) -> list[Column]:
    """Pristine as it comes, ours as it is meant to be."""
    return [
        Column(fixed(plan.n_max), False, plan.n_max),
        draft_columns.all_features(plan.features, plan.n_max),
    ]


def _speed(samples: Sequence[Sample]) -> float:
    return sum(s.amount for s in samples) / (sum(s.seconds for s in samples) or 1.0)


def _read(plan: Plan, setup: Setup, windowed: Path, turn: int) -> Iterator[Sample]:
    """The baseline, and every main column with the full and the windowed drafter."""
    prompt = draft_workloads.long_text(plan.prompt_words)
    settings: list[tuple[Column, str, Path | None]] = [(Column(BASE, False, None), FULL, None)]
    for column in _main_columns(plan):
        settings += [(column, FULL, None), (column, WINDOWED, windowed)]
    for column, kind, drafter in settings[turn % len(settings) :] + settings[: turn % len(settings)]:
        sample = reading(setup, column, kind, turn, prompt, drafter)
        yield sample
        if column.name == BASE:
            yield replace(sample, kind=WINDOWED)


if __name__ == "__main__":
    sys.exit(main())
