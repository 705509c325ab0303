"""The tables of benchmarks/drafting.py."""

from __future__ import annotations

from benchmarks.draft_columns import BASE
from benchmarks.draft_figures import Figures, Spread
from benchmarks.draft_goals import goals
from benchmarks.draft_results import Results
from benchmarks.draft_texts import VERDICTS, counts
from benchmarks.machine import BUSY_LOAD
from dflashcpp.cli._output import Output
from dflashcpp.stats import number

BUSY_SHARE = 0.05


def show(results: Results, output: Output) -> None:
    """Machine, tables, goals."""
    output.text(machine_text(results))
    made = Figures.of(results.samples, "generation")
    for temperature in made.temperatures():
        _generation(made, temperature, output)
    _whole(made, output)
    for part, title in (("reading", "Reading a prompt"), ("slots", "Several slots"), ("call", "Draft calls")):
        _part(Figures.of(results.samples, part), part, title, output)
    _texts(results, output)
    rows = [goal.row() for goal in goals(results.samples, results.verdicts)]
    _table(output, "Goals", ["goal", "wanted", "came", "", "of"], rows)


def machine_text(results: Results) -> str:
    """What it was measured on, and whether it was quiet."""
    facts = results.machine
    lines = [
        f"{facts['cpu']}, {facts['cores']} cores, {facts['memory_gib']} GiB, {facts['system']}",
        f"load before: {facts['load_before']}; llama-server with -t {facts['threads']}; {facts['compiler']}",
        *(f"{name}: {text}" for name, text in facts["builds"].items()),
        f"models: {facts.get('models', '')}",
        f"patches: {', '.join(facts['patches'])}",
        *(f"left out: {name}: {why}" for name, why in results.left_out.items()),
    ]
    busy = max((sample.foreign for sample in results.samples), default=0.0)
    if facts["load_before"] > BUSY_LOAD or busy > BUSY_SHARE:
        lines.append(
            f"WARNING: not a quiet machine (load before {facts['load_before']}, other processes took up to "
            f"{100 * busy:.0f} % of it): ratios mean little"
        )
    return "\n".join(lines)


def _generation(figures: Figures, temperature: float, output: Output) -> None:
    kinds = figures.kinds()
    rows = []
    for column in figures.columns(temperature):
        ratios = [figures.ratio(column, BASE, temperature, kind) for kind in kinds]
        length = number(figures.length(column, temperature), 2)
        drafted = number(figures.drafted_a_step(column, temperature), 2)
        speed, mixed = figures.speed(column, temperature), figures.mix(column, BASE, temperature)
        shown = number(speed.median if speed else None, 1)
        rows.append([column, shown, drafted, length, _spread(mixed), *map(_short, ratios)])
    title = f"Generation, T = {temperature:g}: ratio to no drafter, median of rounds [lowest..highest]"
    _table(output, title, ["", "tok/s", "drafted", "length", "mix", *map(_head, kinds)], rows)


def _head(kind: str) -> str:
    return kind.replace("held-out/", "held: ")


def _whole(figures: Figures, output: Output) -> None:
    kinds = figures.kinds()
    if 0.0 not in figures.temperatures():
        return
    rows = [
        [column, *(_short(figures.ratio(column, BASE, 0.0, kind, whole=True)) for kind in kinds)]
        for column in figures.columns(0.0)
    ]
    title = "Whole requests, prompts included, T = 0: ratio to no drafter"
    _table(output, title, ["", *map(_head, kinds)], rows)


def _part(figures: Figures, part: str, title: str, output: Output) -> None:
    if not figures.samples:
        return
    unit = "ms a call" if part == "call" else "tok/s"
    rows = []
    for kind in figures.kinds():
        for column in figures.columns():
            speed = figures.speed(column, 0.0, kind)
            if speed is None:
                continue
            if part == "call":
                speed = Spread(1e3 / speed.median, 1e3 / speed.high, 1e3 / speed.low, speed.rounds)
            ratio = figures.ratio(column, BASE, 0.0, kind)
            length = number(figures.length(column, 0.0, kind), 2)
            rows.append([kind, column, speed.text(), _spread(ratio), length])
    _table(output, title, ["", "", unit, "by no drafter", "length"], rows)


def _texts(results: Results, output: Output) -> None:
    found = counts(results.verdicts)
    rows = [[column, *(str(words[word]) for word in VERDICTS)] for column, words in found.items()]
    if not rows:
        return
    _table(output, "Greedy texts, by the one of no drafter", ["", *VERDICTS], rows)
    shown = {v.text for v in results.verdicts if v.word in ("tie", "different", "unsteady")}
    for text in sorted(shown):
        output.text(f"  {text}")


def _table(output: Output, title: str, headers: list[str], rows: list[list[str]]) -> None:
    """The title on a line of its own: a narrow table would fold it."""
    output.text(f"\n{title}")
    output.table(headers, rows)


def _spread(value: Spread | None) -> str:
    return "-" if value is None else value.text()


def _short(value: Spread | None) -> str:
    return "-" if value is None else f"{value.median:.2f}"
