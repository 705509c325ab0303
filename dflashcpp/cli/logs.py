"""`dflashcpp logs`: the log of a server of ours."""

from __future__ import annotations

from typing import Annotated

import typer

from dflashcpp.cli import _remote
from dflashcpp.cli._output import Output


def logs(
    port: Annotated[int | None, typer.Option("--port", help="Which server [default: the only one].")] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on as it grows.")] = False,
    lines: Annotated[int, typer.Option("--lines", "-n", min=0, help="How many of the last lines.")] = 50,
    ssh: _remote.SshOption = None,
    remote_port: _remote.RemotePortOption = None,
    ssh_option: _remote.SshWordsOption = None,
    ssh_config: _remote.SshConfigOption = None,
) -> None:
    """Print the last lines of a server's log; with -f go on until it ends or Ctrl-C."""
    from dflashcpp.errors import DflashError
    from dflashcpp.server import logs as files
    from dflashcpp.server import registry
    from dflashcpp.server.diagnose import tail

    output = Output()
    if ssh is not None:
        _remote.logs(
            output, _remote.reach(ssh, ssh_option, ssh_config)[1], remote_port or port, lines, follow
        )
        return
    found = registry.alive(port) or registry.noted(port)
    if len(found) != 1:
        found = [registry.only(port)]
    log = found[0].log
    if not log.exists():
        raise DflashError(f"{log} is not there any more")
    size = log.stat().st_size
    for line in tail(log).splitlines()[-lines:] if lines else []:
        output.text(line)
    if follow:
        for line in files.follow(log, start=size, over=lambda: not found[0].running):
            output.text(line)
