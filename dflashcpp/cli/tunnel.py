"""`dflashcpp tunnel`: a supervised forward to a llama-server behind SSH."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Annotated

import typer

from dflashcpp.cli import _remote
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
    from dflashcpp.remote.command import shown, tunnel_argv
    from dflashcpp.remote.tunnel import Tunnel

    output = Output(as_json=json)
    profile, ssh = _remote.reach(host, ssh_option, ssh_config)
    near = _port(port, profile.local_port, "--port", 0)
    made = Tunnel(ssh, near, _port(remote_port, profile.remote_port, "--remote-port", 1), patience=patience)
    if dry_run:
        argv = tunnel_argv(ssh, made.local_port, made.remote_port)
        output.result(
            {"argv": argv, "local": made.url, "remote": made.remote, "state": "dry run"}, shown(argv)
        )
        return
    raise typer.Exit(_follow(made, output, check))


def _port(given: int | None, default: int, name: str, least: int) -> int:
    port = default if given is None else given
    if not least <= port <= 65535:
        raise UsageError(f"{name} {port} is no port", hint=f"{least} to 65535")
    return port


def _follow(made: Tunnel, output: Output, check: bool) -> int:
    """Run the tunnel until it ends, is interrupted or, with `check`, its state is known. The exit code."""
    from dflashcpp.remote.tunnel import CLOSED, READY, UP, Report
    from dflashcpp.server import supervise

    wanted = UP if check else (READY,)
    teller = _Teller(made, output, wanted)
    made.on_change = teller.changed
    report = made.report
    try:
        with supervise.Signals(), made:
            report = made.wait_settled() if check else (made.wait_end() or made.report)
    except supervise.Told:
        report = Report(CLOSED, "interrupted", final=True)
    teller.tell(report)
    if report.final and report.state != CLOSED:
        Output().error(DflashError(f"{report.state}: {report.message}", hint=report.hint or None))
    return 0 if report.state in (READY, CLOSED) else 1


class _Teller:
    """Shows every change; the result is printed once, from whichever thread comes first."""

    def __init__(self, made: Tunnel, output: Output, wanted: tuple[str, ...]) -> None:
        self._made, self._output, self._wanted = made, output, wanted
        self._told = False
        self._lock = threading.Lock()

    def changed(self, report: Report) -> None:
        """Called in the tunnel's thread."""
        if not report.final:
            self._output.status(report.text())
        if report.state in self._wanted:
            self.tell(report)

    def tell(self, report: Report) -> None:
        """Print the result, unless that was done."""
        made = self._made
        facts = {"local": made.url, "remote": made.remote, "state": report.state}
        more = {"message": report.message, "hint": report.hint or None, "model": report.model or None}
        with self._lock:
            if not self._told:
                self._told = True
                self._output.result({**facts, **more}, f"{made.url} -> {made.remote}: {report.state}")
