"""`dflashcpp tunnel`: a supervised forward to a llama-server behind SSH."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from dflashcpp.cli._options import DryRunOption, JsonOption
from dflashcpp.cli._output import Output
from dflashcpp.errors import DflashError, UsageError

if TYPE_CHECKING:
    from dflashcpp.remote.tunnel import Report, Tunnel

HostArgument = Annotated[
    str, typer.Argument(help="SSH host (as in ~/.ssh/config), or a profile of the config file.")
]
SshOption = Annotated[
    list[str] | None,
    typer.Option(
        "-o", "--ssh-option", metavar="KEY=VALUE", help="Passed to ssh as -o KEY=VALUE; may be repeated."
    ),
]
SshConfigOption = Annotated[str | None, typer.Option("-F", "--ssh-config", help="Another ssh_config file.")]


def tunnel(
    host: HostArgument,
    port: Annotated[
        int | None, typer.Option("--port", help="Port on this machine; 0 takes any free one.")
    ] = None,
    remote_port: Annotated[
        int | None, typer.Option("--remote-port", help="llama-server's port over there.")
    ] = None,
    ssh_option: SshOption = None,
    ssh_config: SshConfigOption = None,
    check: Annotated[bool, typer.Option("--check", help="End as soon as the state is known.")] = False,
    patience: Annotated[
        float,
        typer.Option("--patience", min=0, help="Seconds to try before it has stood once; then for ever."),
    ] = 30.0,
    dry_run: DryRunOption = False,
    json: JsonOption = False,
) -> None:
    """Forward a local port to llama-server behind SSH, and say at all times how it stands.

    With --json one object {local, remote, state} is printed once the server answers (or when the
    tunnel ends before that); the tunnel then stays until Ctrl-C.
    """
    from dflashcpp import config
    from dflashcpp.remote.command import Ssh, shown, tunnel_argv
    from dflashcpp.remote.tunnel import Tunnel

    output = Output(as_json=json)
    profile = config.profile(host)
    ssh = Ssh.of(profile, ssh_words(ssh_option, ssh_config))
    made = Tunnel(
        ssh,
        _port(port, profile.local_port, "--port", 0),
        _port(remote_port, profile.remote_port, "--remote-port", 1),
        lambda report: None if report.final else output.status(report.text()),
        patience=patience,
    )
    if dry_run:
        argv = tunnel_argv(ssh, made.local_port, made.remote_port)
        output.result(
            {"argv": argv, "local": made.url, "remote": made.remote, "state": "dry run"}, shown(argv)
        )
        return
    raise typer.Exit(_follow(made, output, check))


def ssh_words(options: list[str] | None, config_file: str | None) -> list[str]:
    """The `-o` and `-F` of a command as words for ssh."""
    words = [word for option in options or [] for word in ("-o", option)]
    return [*(["-F", config_file] if config_file else []), *words]


def _port(given: int | None, default: int, name: str, least: int) -> int:
    port = default if given is None else given
    if not least <= port <= 65535:
        raise UsageError(f"{name} {port} is no port", hint=f"{least} to 65535")
    return port


def _follow(made: Tunnel, output: Output, check: bool) -> int:
    """Run the tunnel until it ends, is interrupted or, with `check`, its state is known. The exit code."""
    from dflashcpp.remote.tunnel import CLOSED, READY, Report, interrupted_by_signals

    told = False
    report = made.report
    try:
        with interrupted_by_signals(), made:
            report = made.wait_settled() if check else made.wait_ready_or_end()
            told = _tell(made, report, output)
            if not check and not report.final:
                report = made.wait_end() or report
    except KeyboardInterrupt:
        report = Report(CLOSED, "interrupted", final=True) if told or not report.final else report
    if not told:
        _tell(made, report, output)
    if report.final and report.state != CLOSED:
        Output().error(DflashError(f"{report.state}: {report.message}", hint=report.hint or None))
    return 0 if report.state == READY or report.state == CLOSED else 1


def _tell(made: Tunnel, report: Report, output: Output) -> bool:
    facts = {"local": made.url, "remote": made.remote, "state": report.state}
    more = {"message": report.message, "hint": report.hint or None, "model": report.model or None}
    output.result({**facts, **more}, f"{made.url} -> {made.remote}: {report.state}")
    return True
