"""`dflashcpp stop`: end a server of ours, and only it."""

from __future__ import annotations

from typing import Annotated

import typer

from dflashcpp.cli import _remote
from dflashcpp.cli._options import DryRunOption, JsonOption
from dflashcpp.cli._output import Output


def stop(
    port: Annotated[int | None, typer.Option("--port", help="Which server [default: the only one].")] = None,
    every: Annotated[bool, typer.Option("--all", help="All servers of ours.")] = False,
    ssh: _remote.SshOption = None,
    remote_port: _remote.RemotePortOption = None,
    ssh_option: _remote.SshWordsOption = None,
    ssh_config: _remote.SshConfigOption = None,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
) -> None:
    """End the server that was started on this port (or the only one), found by its pidfile."""
    from dflashcpp.errors import DflashError
    from dflashcpp.server import registry

    output = Output(as_json=as_json)
    if ssh is not None:
        _remote.stop(
            output, _remote.reach(ssh, ssh_option, ssh_config)[1], remote_port or port, every, dry_run
        )
        return
    found = registry.alive(port) if every else [registry.only(port)]
    names = [f"{one.url} (pid {one.process.pid})" for one in found]
    if dry_run:
        output.result(
            {"would_stop": names}, "\n".join(f"would end {name}" for name in names) or "nothing runs"
        )
        return
    left = [name for one, name in zip(found, names, strict=True) if not registry.stop(one)]
    registry.forget_ended()
    if left:
        raise DflashError(f"still running: {', '.join(left)}", hint="do you have the right to end it?")
    output.result({"stopped": names}, "\n".join(f"ended {name}" for name in names) or "nothing runs")
