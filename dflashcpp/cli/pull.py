"""`dflashcpp pull`: fetch a pair and convert its drafter, ready to serve."""

from __future__ import annotations

from typing import Annotated

import typer

from dflashcpp.cli._options import DryRunOption, JsonOption
from dflashcpp.cli._output import Output


def pull(
    pair: Annotated[str, typer.Argument(metavar="PAIR", help="One of `dflashcpp pairs`.")],
    draft_type: Annotated[
        str | None, typer.Option("--draft-type", metavar="TYPE", help="Quantise the drafter to this.")
    ] = None,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
) -> None:
    """Fetch target and drafter of a known pair and convert the drafter. What is there is used again."""
    from dflashcpp import pairs

    output = Output(as_json=as_json)
    known = pairs.load_pair(pair)
    if dry_run:
        steps = [
            f"{word}: {source.where}, {_size(source)}{' (already here)' if here else ''}"
            for word, source, here in (
                ("target", known.target, pairs.local_target(known)),
                ("drafter", known.drafter, pairs.local_source(known)),
            )
        ]
        output.result({"pair": known.name, "steps": steps}, "\n".join(steps))
        return
    progress = output.progress()
    target = pairs.ensure_target(known, progress)
    drafter = pairs.ensure_drafter(known, progress, type=draft_type, target=target)
    data = {"pair": known.name, "target": str(target), "drafter": str(drafter)}
    output.result(data, f"target: {target}\ndrafter: {drafter}\nserve it with: dflashcpp serve {known.name}")


def _size(source: object) -> str:
    count = getattr(source, "bytes", None)
    return f"{count / 2**20:.0f} MiB" if count else "size not known"
