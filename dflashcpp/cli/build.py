"""`dflashcpp build`: llama.cpp, patched and compiled for this machine."""

from __future__ import annotations

import shlex
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dflashcpp.cli._options import DryRunOption, JsonOption
from dflashcpp.cli._output import Output

if TYPE_CHECKING:
    from dflashcpp import llamacpp


class Backend(StrEnum):
    """What llama.cpp computes on."""

    cpu = "cpu"
    cuda = "cuda"
    vulkan = "vulkan"
    metal = "metal"


def build(
    base: Annotated[
        str | None,
        typer.Option("--base", metavar="TAG", help="llama.cpp to build on; see `dflashcpp patches`."),
    ] = None,
    backend: Annotated[Backend, typer.Option("--backend", help="What to compute on.")] = Backend.cpu,
    no_patches: Annotated[
        bool, typer.Option("--no-patches", help="Build the base as it is, beside ours.")
    ] = False,
    source: Annotated[
        Path | None,
        typer.Option("--source", metavar="DIR", help="A clean checkout of the base; it is only read."),
    ] = None,
    jobs: Annotated[
        int | None,
        typer.Option("--jobs", "-j", metavar="N", help="Files to compile at once [default: by memory]."),
    ] = None,
    target: Annotated[
        list[str] | None, typer.Option("--target", metavar="NAME", help="Build this too; may be repeated.")
    ] = None,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
) -> None:
    """Fetch, patch and compile llama.cpp. What is in the cache and up to date is not built again."""
    from dflashcpp import llamacpp

    output = Output(as_json=as_json)
    wanted: dict[str, Any] = {
        "base": base,
        "backend": backend.value,
        "patches": not no_patches,
        "source": source,
        "jobs": jobs,
        "targets": (*llamacpp.DEFAULT_TARGETS, *(target or ())),
        "progress": output.progress(),
    }
    if dry_run:
        _show_intent(output, llamacpp.intent(**wanted))
        return
    made = llamacpp.build(**wanted)
    server = made.binary("llama-server")
    data = {
        "base": made.base,
        "commit": made.commit,
        "patches": list(made.patches),
        "llama_server": str(server),
        "libggml": str(made.libggml),
        "backend": made.backend,
        "version": made.version_string,
        "digest": made.digest,
    }
    shown = ", ".join(made.patches) or "none"
    output.result(data, f"llama-server: {server}\nversion: {made.version_string}\npatches: {shown}")


def _show_intent(output: Output, intent: llamacpp.Intent) -> None:
    states = "".join(f"\n  {name}: {state}" for name, state in intent.patches.items()) or " none"
    lines = [
        f"base: {intent.base} (commit {intent.commit})",
        f"source: {intent.source}",
        f"patches:{states}",
        f"version: {intent.version_string}",
        f"targets: {', '.join(intent.targets)} ({intent.jobs} jobs)",
        f"configure: {shlex.join(intent.cmake)}",
        f"result: {intent.root}" + (" (up to date: nothing to do)" if intent.up_to_date else ""),
    ]
    output.result({**vars(intent), "root": str(intent.root)}, "\n".join(lines))
