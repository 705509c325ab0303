"""`dflashcpp convert`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dflashcpp.cli._options import DryRunOption, JsonOption
from dflashcpp.cli._output import Output


def convert(
    source: Annotated[str, typer.Argument(help="Drafter checkpoint: .safetensors file, folder or Hub id.")],
    target: Annotated[
        str | None,
        typer.Option("--target", "-T", help="The target's GGUF. Left out: looked for, see docs/convert.md."),
    ] = None,
    type_: Annotated[
        str, typer.Option("--type", "-q", metavar="TYPE", help="Q4_K_M, Q8_0, BF16 ... in any case.")
    ] = "Q4_K_M",
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Default: dflash-<model>-<TYPE>.gguf here.")
    ] = None,
    tensor_type: Annotated[
        list[str] | None, typer.Option(metavar="NAME=TYPE", help="Another type for tensors matching NAME.")
    ] = None,
    keep_selector: Annotated[
        str | None, typer.Option(metavar="TYPE", help="Type of the DFlash-2 selector's tensors.")
    ] = None,
    head: Annotated[
        str | None,
        typer.Option(
            metavar="TYPE",
            help="Store the target's head too, in this type: drafts read that one; memory grows by it.",
        ),
    ] = None,
    pure: Annotated[bool, typer.Option("--pure", help="The type's own type for every matrix.")] = False,
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="KEY=VALUE", help="A value for config.json, such as rope_theta=1000000."
        ),
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="config.json when it is not beside the weights.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Allow F16 for DFlash-2.")] = False,
    threads: Annotated[int | None, typer.Option("--threads", "-t", min=1, help="Default: all cores.")] = None,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
) -> None:
    """Convert a drafter checkpoint to a quantised GGUF."""
    from dflashcpp.checkpoint.config import parse_overrides
    from dflashcpp.conversion import convert as convert_checkpoint

    out = Output(as_json=as_json)
    result = convert_checkpoint(
        source,
        target=target,
        type=type_,
        output=output,
        tensor_types=tensor_type or [],
        threads=threads,
        progress=out.progress(),
        pure=pure,
        keep_selector=keep_selector,
        head=head,
        force=force,
        config=config,
        overrides=parse_overrides(set_ or []),
        dry_run=dry_run,
    )
    for warning in result.warnings:
        out.warning(warning)
    out.result(result.to_dict(), result.text())
