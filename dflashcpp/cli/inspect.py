"""`dflashcpp inspect`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dflashcpp.cli._options import JsonOption
from dflashcpp.cli._output import Output

if TYPE_CHECKING:
    from dflashcpp.inspection import Inspection


def inspect(
    file: Annotated[str, typer.Argument(help="Checkpoint (.safetensors, folder) or GGUF (file or URL).")],
    config: Annotated[
        Path | None, typer.Option(help="config.json when it is not beside the weights.")
    ] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="A value for config.json.")
    ] = None,
    fix: Annotated[
        Path | None,
        typer.Option(metavar="OUT", help="Write a GGUF of another tool in llama.cpp's form to OUT."),
    ] = None,
    target: Annotated[
        str | None,
        typer.Option("--target", "-T", help="With --fix: the target, when the file has no tokenizer."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Say what a drafter's file is and what is wrong with it."""
    from dflashcpp.checkpoint.config import parse_overrides
    from dflashcpp.inspection import inspect as look

    out = Output(as_json=as_json)
    if fix is not None:
        _fix(file, fix, target, out)
        return
    found = look(file, config=config, overrides=parse_overrides(set_ or []))
    for note in found.notes:
        out.warning(note)
    out.result(found.to_dict(), _text(found))


def _fix(file: str, path: Path, target: str | None, out: Output) -> None:
    from dflashcpp.dialects import repair
    from dflashcpp.gguf_file import read_header
    from dflashcpp.target_search import given_target

    progress = out.progress()
    found = given_target(target, progress) if target is not None else None
    done = repair(read_header(file), path, target=found, progress=progress)
    for warning in done.warnings:
        out.warning(warning)
    data = {
        "file": str(done.file),
        "bytes": done.bytes,
        "kind": "gguf",
        "dialect": done.dialect,
        "version": done.drafter.version,
        "drafter": done.drafter.to_dict(),
        "changes": list(done.changes),
        "problems": [],
    }
    out.result(data, "\n".join([f"wrote {done.file} from {done.dialect}", *done.changes]))


def _text(found: Inspection) -> str:
    counts = ", ".join(f"{count} {kind}" for kind, count in found.tensors.items())
    lines = [
        f"{found.file}: {found.kind}, {found.dialect}",
        f"weights       {counts}: {found.bytes / 2**20:.2f} MiB",
        *_drafter_lines(found),
    ]
    for problem in found.problems:
        lines += [f"problem       {problem.message}", f"              {problem.fix}"]
    return "\n".join(lines if found.problems else [*lines, "problems      none found"])


def _drafter_lines(found: Inspection) -> list[str]:
    drafter = found.drafter
    if drafter is None:
        return []
    rope = drafter.rope
    sliding = sum(drafter.sliding)
    rows = {
        "version": f"DFlash{'-2' if drafter.version == 2 else ''}",
        "layers": f"{drafter.layers} ({sliding} sliding, window {drafter.window})"
        if sliding
        else drafter.layers,
        "hidden": f"{drafter.hidden}, ffn {drafter.ffn}",
        "heads": f"{drafter.heads} of {drafter.head_dim}, {drafter.kv_heads} key-value heads",
        "block": f"{drafter.block_size} rows, drafts up to {drafter.max_draft}",
        "taps": f"inputs of target layers {list(drafter.taps)} (outputs of {drafter.target_layer_ids})",
        "mask token": drafter.mask_token_id,
        "vocabulary": drafter.vocab if drafter.vocab is not None else "the target's",
        "rope": f"theta {rope.theta:g}"
        + (f", {rope.type} x{rope.factor:g}" if rope.type != "default" else ""),
        "causal": "".join("x" if causal else "-" for causal in drafter.causal)
        + " (x: causal inside the block)",
    }
    if drafter.version == 2:
        rows["convolution"] = f"{drafter.conv_kernel} taps, groups of {drafter.conv_group}"
        rows["selector"] = f"rank {drafter.selector_rank}, {drafter.selector_top_k} candidates"
    return [f"{name:<13} {value}" for name, value in rows.items()]
