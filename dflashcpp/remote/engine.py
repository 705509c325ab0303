"""A llama-server on the far side: named, built by the dflashcpp there, or built there by plain ssh."""

from __future__ import annotations

import json
from dataclasses import dataclass

from dflashcpp.errors import DflashError
from dflashcpp.progress import SILENT, Progress
from dflashcpp.remote import files
from dflashcpp.remote.host import Facts, Host
from dflashcpp.server.flags import FlagTable


@dataclass(frozen=True)
class RemoteEngine:
    """A llama-server over there: its absolute path, its flags, and its base where that is known."""

    binary: str
    table: FlagTable
    base: str | None = None
    origin: str = "named"


def find(
    host: Host, facts: Facts, *, named: str | None = None, may_build: bool = True, progress: Progress = SILENT
) -> RemoteEngine:
    """The llama-server to run there.

    `named` is a path over there; else the dflashcpp there builds (or has built) ours; else our patched
    source is sent over and compiled there with plain cmake. Raises DflashError saying what is missing.
    """
    if named:
        return _engine(host, files.absolute(named, facts.home), None, "named")
    if "dflashcpp" in facts.tools:
        return _by_dflashcpp(host, facts, may_build, progress)
    from dflashcpp.remote import building

    return _engine(
        host, *building.ensure(host, facts, may_build=may_build, progress=progress), "compiled there"
    )


def backend_of(facts: Facts) -> str:
    """What llama.cpp computes on over there: `cuda` with a GPU that nvidia-smi sees, else `cpu`."""
    return "cuda" if facts.gpus else "cpu"


def _by_dflashcpp(host: Host, facts: Facts, may_build: bool, progress: Progress) -> RemoteEngine:
    words = [facts.tools["dflashcpp"], "build", "--backend", backend_of(facts), "--json"]
    if not may_build:
        words.append("--dry-run")
    told = command_json(host, words, progress, f"llama.cpp on {host.name}, by the dflashcpp there")
    binary = str(told.get("llama_server") or f"{told.get('root')}/bin/llama-server")
    return _engine(host, binary, str(told.get("base") or "") or None, "dflashcpp there")


def command_json(host: Host, words: list[str], progress: Progress, label: str) -> dict[str, object]:
    """Run a program of the far side that prints one JSON object; what it says meanwhile is passed on."""
    kept = bytearray()
    with progress.task(label) as task:
        outcome = host.run(
            "command", *words, timeout=None, sink=kept.extend, errors=lambda line: task.note(line.strip())
        )
    try:
        told = json.loads(kept)
    except ValueError:
        told = {}
    if outcome.status != 0 or not isinstance(told, dict):
        said = (told.get("error") if isinstance(told, dict) else None) or outcome.last_words
        hint = told.get("hint") if isinstance(told, dict) else None
        raise DflashError(
            f"{host.name}: {words[0]} {words[1]}: {said or f'status {outcome.status}'}", hint=hint
        )
    return told


def _engine(host: Host, binary: str, base: str | None, origin: str) -> RemoteEngine:
    if files.look(host, binary) is None:
        raise DflashError(
            f"{host.name} has no {binary}",
            hint="name the llama-server over there with --remote-server PATH, or let it be built",
        )
    outcome = host.run("command", binary, "--help", timeout=60.0)
    text = outcome.text if "--model" in outcome.text else outcome.err
    if outcome.status != 0 or "--model" not in text:
        raise DflashError(f"{host.name}: {binary} --help fails: {outcome.last_words or outcome.status}")
    return RemoteEngine(binary, FlagTable.parse(text, f"{host.name}:{binary}"), base, origin)
