"""`dflashcpp patches`: what we change in llama.cpp, and whether it still fits."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from dflashcpp.cli._options import JsonOption
from dflashcpp.cli._output import Output

if TYPE_CHECKING:
    from dflashcpp.llamacpp.validation import SeriesReport


def patches(
    base: Annotated[
        str | None, typer.Option("--base", metavar="TAG", help="Only this base [default: all].")
    ] = None,
    check: Annotated[
        bool,
        typer.Option("--check", help="Apply every series in memory; fetches sources that are not cached."),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """List the llama.cpp bases and our patches on each; --check validates them without building."""
    from dflashcpp.llamacpp.bases import find_base
    from dflashcpp.llamacpp.validation import report

    output = Output(as_json=as_json)
    chosen = (find_base(base),) if base else None
    reports = report(chosen, check=check, progress=output.progress())
    for each in reports:
        _show(output, each)
    problems = [f"{each.base}: {problem}" for each in reports for problem in each.problems]
    for problem in problems:
        output.warning(problem)
    output.result(
        {"bases": [asdict(each) for each in reports], "problems": problems},
        f"{len(problems)} problems" if problems else "no problems" if check else "",
    )
    if problems:
        raise typer.Exit(1)


def _show(output: Output, each: SeriesReport) -> None:
    knows = ", ".join(each.knows) or "nothing of DFlash"
    output.text(f"{each.base}  llama.cpp of {each.date}, knows {knows}")
    if each.patches is None:
        output.text("  no series\n")
        return
    rows = [(row.name, row.description, len(row.files), row.forwarded, row.state) for row in each.patches]
    output.table(("patch", "what it gives", "files", "forwarded", "on this base"), rows)
    output.text("")
