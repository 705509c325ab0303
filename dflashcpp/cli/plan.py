"""`dflashcpp plan`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from dflashcpp.cli._llama_args import CONTEXT_SETTINGS as CONTEXT_SETTINGS
from dflashcpp.cli._llama_args import LlamaCommand, Words, arguments
from dflashcpp.cli._options import JsonOption
from dflashcpp.cli._output import Output
from dflashcpp.errors import UsageError

if TYPE_CHECKING:
    from dflashcpp.memory.planning import Plan

COMMAND_CLASS = LlamaCommand
_OWN = {"-m": "target", "--model": "target", "-md": "drafter", "--spec-draft-model": "drafter"}
_OWN |= {"--model-draft": "drafter", "--mmproj": "mmproj", "-mm": "mmproj", "-q": "type", "--type": "type"}


def plan(
    ctx: typer.Context,
    words: Words = None,
    device_memory: Annotated[
        float | None,
        typer.Option(
            "--device-memory", metavar="MIB", help="Memory to fit into [default: read from the device]."
        ),
    ] = None,
    max_context: Annotated[
        bool, typer.Option("--max-context", help="Also say the largest -c that fits.")
    ] = False,
    unpatched: Annotated[
        bool, typer.Option("--unpatched", help="Plan for llama.cpp as it comes, without our patches.")
    ] = False,
    engine: Annotated[
        bool | None,
        typer.Option(
            "--engine/--no-engine", help="Ask our build too [default: when it and the files are here]."
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Say how much memory a target and its drafter will need, before anything is downloaded or started.

    -m and -md take a GGUF file or its URL (only the header is read); -md also takes a checkpoint, as
    converted with -q TYPE. Flags are llama-server's: -c -b -ub -np -ngl -ngld -ctk -ctv -ctkd -ctvd
    --spec-draft-n-max -fa -kvu --mmproj.
    """
    from dflashcpp.memory import as_dict
    from dflashcpp.memory import plan as make_plan

    output = Output(as_json=as_json)
    named, flags = _split(arguments(ctx, words))
    made = make_plan(
        named.get("pair"),
        target=named.get("target"),
        drafter=named.get("drafter"),
        mmproj=named.get("mmproj"),
        type=named.get("type"),
        flags=flags,
        device_memory=device_memory,
        patched=not unpatched,
        engine=engine,
        max_context=max_context,
        progress=output.progress(),
    )
    for text in made.warnings:
        output.warning(text)
    if as_json:
        output.result(as_dict(made))
    else:
        _show(output, made)


def _split(words: list[str]) -> tuple[dict[str, str], list[str]]:
    """The pair or the files, and the flags that are left."""
    named: dict[str, str] = {}
    flags: list[str] = []
    rest = iter(words)
    if words and not words[0].startswith("-"):
        named["pair"] = next(rest)
    for word in rest:
        name, joined, value = word.partition("=")
        if name not in _OWN:
            flags.append(word)
            continue
        given = value if joined else next(rest, None)
        if given is None:
            raise UsageError(f"{name} needs a value")
        named[_OWN[name]] = given
    return named, flags


def _show(output: Output, made: Plan) -> None:
    rows = [
        [line.context, line.kind, line.place, f"{line.mib:.2f}", _origin(line.origin, line.error), line.note]
        for line in made.lines
    ]
    output.table(["context", "memory", "where", "MiB", "known by", ""], rows)
    output.text(_verdict(made))
    if made.largest_context is not None:
        output.text(f"largest context that fits: {made.largest_context or 'none'}")
    if made.savings:
        freed = [[row.flags, f"{row.mib:.2f}", row.cost] for row in made.savings]
        output.table(["flags", "frees MiB", "costs"], freed, title="what frees how much")
    for row in made.published:
        if row["total"] is None:
            continue
        bare, ours = row["total"], row["patched"]["total"]
        output.text(
            f"with {row['drafter']} as published, at start: {bare:.2f} MiB unpatched, {ours:.2f} MiB patched"
        )


def _origin(origin: str, error: float) -> str:
    return f"{origin}, within {100 * error:.0f} %" if error else origin


def _verdict(made: Plan) -> str:
    low, high = made.band
    text = f"{made.total:.2f} MiB on the {made.place}"
    if round(high, 2) > round(low, 2):
        text += f" ({low:.2f} to {high:.2f})"
    room = made.room
    if room is None:
        return text + "; no device was found, --device-memory MIB says what to fit into"
    place = f"{room.free:.2f} MiB free on {room.name} ({room.origin})"
    if made.fits:
        return f"{text}: fits into {place}"
    return f"{text}: does NOT fit into {place}, short by {made.short:.2f} MiB"
