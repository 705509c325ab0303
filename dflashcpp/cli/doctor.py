"""`dflashcpp doctor`: what is wrong with this machine, or with a server."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dflashcpp.cli import _llama_args, _remote
from dflashcpp.cli._options import JsonOption
from dflashcpp.cli._output import Output

if TYPE_CHECKING:
    from dflashcpp.doctor import Check


def doctor(
    pair: Annotated[
        str | None,
        typer.Argument(metavar="[PAIR]", help="Also start this pair with and without its drafter."),
    ] = None,
    url: Annotated[str | None, typer.Option("--url", help="Also check this running server.")] = None,
    api_key_file: Annotated[
        Path | None, typer.Option("--api-key-file", help="A file whose first line is the key.")
    ] = None,
    port: Annotated[int, typer.Option("--port", help="The port that should be free.")] = 8080,
    build: _llama_args.BuildOption = None,
    ssh: _remote.SshOption = None,
    remote_port: _remote.RemotePortOption = None,
    ssh_option: _remote.SshWordsOption = None,
    ssh_config: _remote.SshConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Check this machine; with PAIR, --url or --ssh also a server. Exit code 1 when a check fails."""
    from dflashcpp import doctor as job
    from dflashcpp.client import Client
    from dflashcpp.server.launch import read_api_key

    output = Output(as_json=as_json)
    found = _told(output, job.machine(port))
    if url is not None:
        found += _told(output, job.server(Client(url, read_api_key(api_key_file))))
    if ssh is not None:
        profile, reached = _remote.reach(ssh, ssh_option, ssh_config)
        with _remote.tunnelled(output, profile, reached, remote_port) as near:
            key = read_api_key(_remote.key_file(api_key_file, profile))
            found += _told(output, job.server(Client(near, key)))
    if pair is not None:
        found += _pair(output, pair, build)
    failed = [one.name for one in found if one.state == job.FAIL]
    if as_json:
        output.result({"checks": [vars(one) for one in found], "failed": failed, "pass": not failed})
    else:
        output.text(
            f"{len(found)} checks, {len(failed)} failed" + (f": {', '.join(failed)}" if failed else "")
        )
    if failed:
        raise typer.Exit(1)


def _told(output: Output, checks: Iterable[Check]) -> list[Check]:
    """Show each check as it is made."""
    found = []
    for one in checks:
        found.append(one)
        output.text(f"{one.state:<5} {one.name}: {one.text}")
        if one.fix and one.state != "ok":
            output.text(f"      {one.fix}")
    return found


def _pair(output: Output, name: str, build: str | None) -> list[Check]:
    """The pair with its drafter and then without, one after the other, since both at once may not fit."""
    from dflashcpp import doctor as job
    from dflashcpp import pairs
    from dflashcpp.cli import _serving
    from dflashcpp.server import LlamaServer, spare_threads
    from dflashcpp.server.flags import read_flags

    known, progress = pairs.load_pair(name), output.progress()
    engine = _serving.engine(build, output)
    target = pairs.ensure_target(known, progress)
    drafter = pairs.ensure_drafter(known, progress, target=target)
    options: dict[str, Any] = {"build": engine.binary, "ctx_size": 4096, "progress": progress}
    options["threads"] = spare_threads()
    # a fixed length: where drafting does not pay the adaptive one rests, and nothing would be compared
    adaptive = False if read_flags(engine.binary).has("--spec-draft-adaptive") else None
    with LlamaServer(target, drafter, spec_draft_adaptive=adaptive, **options) as drafting:
        found = _told(output, job.server(drafting.client()))
        answer = job.greedy_answer(drafting.client())
    with LlamaServer(target, **options) as plain:
        found += _told(output, [job.greedy_agreement(plain.client(), answer)])
    return found
