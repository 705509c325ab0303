"""`dflashcpp demo`: the main job on the built-in pair, from nothing to a proof."""

from __future__ import annotations

from typing import Annotated

import typer

from dflashcpp.cli._options import JsonOption
from dflashcpp.cli._output import Output

_SLOWER = (
    "Slower with the drafter is what this pair does on a CPU: the small quantised target is bound by "
    "computing, not by reading memory. It proves the way, not the gain; `dflashcpp pairs --json` has "
    "published speeds."
)


def demo(
    n_max: Annotated[
        int, typer.Option("--spec-draft-n-max", min=1, metavar="N", help="Tokens to draft at most.")
    ] = 4,
    draft_type: Annotated[
        str | None, typer.Option("--draft-type", metavar="TYPE", help="Quantise the drafter to this.")
    ] = None,
    threads: Annotated[
        int | None, typer.Option("--threads", min=1, help="For llama-server [default: the cores but one].")
    ] = None,
    build: Annotated[
        str | None,
        typer.Option("--build", metavar="FILE", help="The llama-server to run [default: our build]."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Build, convert, fetch, serve, and ask a coding and a prose question with and without the drafter.

    The first run takes some minutes, later ones seconds. Exit code 1 when the texts differ or the drafter
    is not accepted.
    """
    from dflashcpp import demo as job

    output = Output(as_json=as_json)
    result = job.run(
        build=build, draft_type=draft_type, n_max=n_max, threads=threads, progress=output.progress()
    )
    if as_json:
        output.result(result.to_dict())
    else:
        _show(output, result)
    if result.problems:
        for problem in result.problems:
            output.status(f"error: {problem}")
        raise typer.Exit(1)


def _show(output: Output, result: object) -> None:
    from dflashcpp import demo as job

    assert isinstance(result, job.DemoResult)
    for one in result.asked:
        output.text(f"\n[{one.kind}] {one.question}\n{one.text.strip()}\n")
    title = (
        f"greedy, {result.threads} threads, --spec-draft-n-max {result.n_max}, one run each, {result.version}"
    )
    output.table(*job.table(result), title=title)
    for one in result.asked:
        output.text(f"{one.kind}: the texts with and without the drafter are: {one.agreement.text()}")
    if any(one.ratio is not None and one.ratio < 1 for one in result.asked):
        output.text(_SLOWER)
    output.text("")
    headers = ["context", "memory", "device", "MiB"]
    output.table(headers, result.memory_rows, title="memory as llama-server reports it")
    output.text("next: dflashcpp serve    dflashcpp chat    dflashcpp plan muse-glimmer-30b")
