"""`dflashcpp serve`: llama-server with a drafter, started, proved and watched."""

from __future__ import annotations

import shlex
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dflashcpp.cli import _llama_args, _remote, _serving
from dflashcpp.cli._options import DryRunOption, JsonOption
from dflashcpp.cli._output import Output

if TYPE_CHECKING:
    from dflashcpp.server.launch import Launch

CONTEXT_SETTINGS = _llama_args.CONTEXT_SETTINGS
COMMAND_CLASS = _llama_args.LlamaCommand


def serve(
    ctx: typer.Context,
    words: _llama_args.Words = None,
    draft_type: Annotated[
        str | None, typer.Option("--draft-type", metavar="TYPE", help="Quantise the pair's drafter to this.")
    ] = None,
    no_draft: Annotated[
        bool, typer.Option("--no-draft", help="Serve the target alone, as a baseline.")
    ] = False,
    restart: Annotated[bool, typer.Option("--restart", help="Start it again when it dies.")] = False,
    detach: Annotated[
        bool, typer.Option("--detach", help="Leave it running; see status, logs, stop.")
    ] = False,
    verbose: Annotated[bool, typer.Option("--verbose", help="Show llama-server's log.")] = False,
    build: _llama_args.BuildOption = None,
    ssh: _remote.SshOption = None,
    push: Annotated[
        bool, typer.Option("--push", help="With --ssh: copy files of this machine that are missing there.")
    ] = False,
    remote_server: Annotated[
        str | None,
        typer.Option("--remote-server", metavar="PATH", help="With --ssh: the llama-server there."),
    ] = None,
    remote_port: _remote.RemotePortOption = None,
    ssh_option: _remote.SshWordsOption = None,
    ssh_config: _remote.SshConfigOption = None,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
) -> None:
    """Serve a target with its drafter, until Ctrl-C.

    Without PAIR or -m: the pair of the config file, else the built-in one. llama-server's flags are taken
    as they are (-m -md -c -np -ngl -ngld -fa -ctk -ctv -ctkd -ctvd --spec-draft-n-max --port --host ...);
    those this build does not know are refused, unless they stand after --.
    """
    from dflashcpp.server import supervise

    output = Output(as_json=as_json)
    arguments = _llama_args.arguments(ctx, words)
    stay = {"detach": detach, "restart": restart, "verbose": verbose, "dry_run": dry_run}
    with supervise.Signals():  # from the first step on: a build and a download end in good order as well
        if ssh is None:
            _here(output, build, arguments, with_draft=not no_draft, draft_type=draft_type, **stay)
            return
        from dflashcpp.remote.serving import Wanted

        wanted = Wanted(
            words=tuple(arguments),
            with_draft=not no_draft,
            draft_type=draft_type,
            push=push,
            dry_run=dry_run,
            remote_port=remote_port,
            server=remote_server,
        )
        profile, reached = _remote.reach(ssh, ssh_option, ssh_config)
        _remote.serve(output, profile, reached, wanted, show=_show, **stay)


def _here(
    output: Output,
    build: str | None,
    arguments: list[str],
    *,
    with_draft: bool,
    draft_type: str | None,
    detach: bool,
    restart: bool,
    verbose: bool,
    dry_run: bool,
) -> None:
    engine = _serving.engine(build, output, may_build=not dry_run)
    parsed = engine.table.split(arguments)
    if dry_run:
        launch, missing = _serving.planned(engine, parsed, with_draft=with_draft, type=draft_type)
        _say(output, launch)
        data = {"argv": launch.argv, "spec_type": launch.spec_type, "url": launch.url, "first": missing}
        output.result(data, "\n".join([*(f"# first: {step}" for step in missing), shlex.join(launch.argv)]))
        return
    launch, _ = _serving.launch(engine, parsed, output, with_draft=with_draft, type=draft_type)
    _say(output, launch)
    if detach:
        from dflashcpp.server import detached

        _show(output, detached.start(launch, restart=restart, progress=output.progress()))
        return
    _run(output, launch, restart=restart, verbose=verbose)


def _run(output: Output, launch: Launch, *, restart: bool, verbose: bool) -> None:
    from dflashcpp.server import LlamaServer, supervise
    from dflashcpp.server.process import Identity

    server = LlamaServer.of(launch, progress=output.progress())
    server.supervisor = Identity.of_this()
    shortage = server.shortage()
    if shortage:
        output.warning(shortage)
    up = False
    try:
        with server:
            up = True
            _show(output, server.report())
            output.status("Ctrl-C ends it" if sys.stdin.isatty() else f"its log: {server.log}")
            if verbose:
                supervise.show_log(server, output.status)
            supervise.watch(server, restart=restart, say=output.status)
    except supervise.Told:
        if not up:
            raise


def _say(output: Output, launch: Launch) -> None:
    for note in launch.notes:
        output.status(f"note: {note}")
    for warning in launch.warnings:
        output.warning(warning)


def _show(output: Output, report: dict[str, Any]) -> None:
    """The result of a start: address, proof, memory."""
    rows = report.pop("rows")
    headers = report.pop("headers", None) or ["context", "memory", "device", "MiB"]
    if output.as_json:
        output.result(report)
        return
    output.table(headers, rows, title="memory, MiB")
    proof = report["proof"]
    if proof:
        counts = f"{proof['drafted']} drafted, {proof['accepted']} accepted"
        output.text(f"drafting: {report['spec_type']}, proved: {counts}")
    else:
        output.text("drafting: none")
    output.text(f"ready: {report['url']} (pid {report['pid']})")
