"""`dflashcpp verify`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dflashcpp.cli._options import JsonOption
from dflashcpp.cli._output import Output


def verify(
    gguf: Annotated[Path, typer.Argument(help="The drafter's GGUF.")],
    source: Annotated[
        str,
        typer.Option("--source", "-s", help="What it was made from: .safetensors file, folder or Hub id."),
    ],
    target: Annotated[
        Path | None,
        typer.Option(
            "--target", "-T", help="The target's GGUF: its embedding and head, else seeded random ones."
        ),
    ] = None,
    blocks: Annotated[int, typer.Option("--blocks", min=1, help="How many random blocks are drafted.")] = 16,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of contexts, features and blocks.")] = 0,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="A value for config.json, as given to convert."),
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="config.json when it is not beside the weights.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Compare a drafter's GGUF with its source: settings, tensors, logits, drafted blocks."""
    from dflashcpp.checkpoint.config import parse_overrides
    from dflashcpp.verify import verify as compare

    out = Output(as_json=as_json)
    result = compare(
        gguf,
        source,
        target=target,
        config=config,
        overrides=parse_overrides(set_ or []),
        blocks=blocks,
        seed=seed,
        progress=out.progress(),
    )
    out.result(result.to_dict(), result.text())
    if not result.passed:
        raise typer.Exit(1)
