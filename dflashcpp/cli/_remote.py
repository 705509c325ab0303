"""What commands with `--ssh HOST` share: options, and the far side's serve, status, logs, stop."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dflashcpp.errors import DflashError

if TYPE_CHECKING:
    from dflashcpp.cli._output import Output
    from dflashcpp.config import Profile
    from dflashcpp.remote.command import Ssh
    from dflashcpp.remote.server import RemoteProcess
    from dflashcpp.remote.serving import Prepared, RemoteServer, Wanted
    from dflashcpp.remote.tunnel import Report

SshOption = Annotated[
    str | None,
    typer.Option(
        "--ssh", metavar="HOST", help="On this host: as in ~/.ssh/config, or a profile of the config."
    ),
]
SshWordsOption = Annotated[
    list[str] | None,
    typer.Option("--ssh-option", metavar="KEY=VALUE", help="Passed to ssh as -o KEY=VALUE; may be repeated."),
]
SshConfigOption = Annotated[
    str | None, typer.Option("--ssh-config", metavar="FILE", help="Another ssh_config, as ssh -F.")
]
RemotePortOption = Annotated[
    int | None, typer.Option("--remote-port", min=1, max=65535, help="llama-server's port over there.")
]


def ssh_words(options: list[str] | None, config_file: str | None) -> list[str]:
    """`--ssh-option` and `--ssh-config` as words for ssh."""
    words = [word for option in options or [] for word in ("-o", option)]
    return [*(["-F", config_file] if config_file else []), *words]


def reach(host: str, options: list[str] | None, config_file: str | None) -> tuple[Profile, Ssh]:
    """The profile of `host` and how ssh reaches it."""
    from dflashcpp import config
    from dflashcpp.remote.command import Ssh

    profile = config.profile(host)
    return profile, Ssh.of(profile, ssh_words(options, config_file))


def key_file(given: Path | None, profile: Profile) -> Path | None:
    """The API key's file: the one that was given, else the profile's."""
    return given or (Path(profile.api_key_file) if profile.api_key_file else None)


def serve(
    output: Output,
    profile: Profile,
    ssh: Ssh,
    wanted: Wanted,
    *,
    show: Callable[[Output, dict[str, Any]], None],
    dry_run: bool,
    detach: bool,
    restart: bool,
    verbose: bool,
) -> None:
    """Prepare the far side, start or adopt the server there, stay with it until Ctrl-C."""
    from dflashcpp.remote import serving

    prepared = serving.prepare(profile, ssh, wanted, output.progress())
    _say(output, prepared)
    if dry_run:
        _intend(output, prepared)
        return
    server = serving.RemoteServer(
        prepared,
        on_change=lambda report: _tell(output, report),
        on_log=output.status if verbose else None,
        progress=output.progress(),
    )
    _stay(output, server, show, detach=detach, restart=restart)


def _stay(
    output: Output,
    server: RemoteServer,
    show: Callable[[Output, dict[str, Any]], None],
    *,
    detach: bool,
    restart: bool,
) -> None:
    from dflashcpp.server import supervise

    host = server.host.name
    server.start()
    try:
        if server.adopted:
            output.status(f"the server that ran on {host} already was adopted")
        show(output, server.report())
        if detach:
            server.close()
            output.status(f"it runs on; see: dflashcpp tunnel {host}, status --ssh {host}, stop --ssh {host}")
            return
        output.status(f"Ctrl-C ends the server on {host}; --detach leaves it")
        server.watch(restart=restart, say=output.status)
    except supervise.Told:
        server.stop()
        output.status(f"the server on {host} was ended")
    except BaseException:
        server.close()
        raise


def _tell(output: Output, report: Report) -> None:
    if not report.final:
        output.status(f"tunnel: {report.text()}")


def _say(output: Output, prepared: Prepared) -> None:
    launch, plan = prepared.launch, prepared.plan
    for note in launch.notes:
        output.status(f"note: {note}")
    for warning in launch.warnings:
        output.warning(warning)
    if plan is None or prepared.room_mib is None:
        return
    where = ", ".join(gpu.name for gpu in prepared.facts.gpus) or "main memory"
    told = f"{plan.total:.0f} MiB planned, {prepared.room_mib:.0f} MiB free on {prepared.host.name} ({where})"
    if plan.fits is False:
        savings = "; ".join(f"{row.flags} frees {row.mib:.0f} MiB" for row in plan.savings[:3])
        output.warning(f"{told}: {plan.short:.0f} MiB too much; {savings}")
    else:
        output.status(told)


def _intend(output: Output, prepared: Prepared) -> None:
    from dflashcpp.memory import as_dict
    from dflashcpp.remote.command import tunnel_argv

    launch = prepared.launch
    tunnel = tunnel_argv(prepared.host.ssh, prepared.local_port, launch.port)
    data = {"argv": launch.argv, "tunnel": tunnel, "host": prepared.host.name, "spec_type": launch.spec_type}
    plan = as_dict(prepared.plan) if prepared.plan else None
    text = f"# on {prepared.host.name}:\n{shlex.join(launch.argv)}\n# here:\n{shlex.join(tunnel)}"
    output.result({**data, "url": f"http://127.0.0.1:{prepared.local_port}", "plan": plan}, text)


def status(output: Output, ssh: Ssh) -> None:
    """Every server noted on the far side."""
    from dflashcpp.remote import server
    from dflashcpp.remote.host import Host

    found = server.servers(Host(ssh))
    if output.as_json:
        output.result(
            {"host": ssh.host, "servers": [{**vars(one), "returncode": one.returncode} for one in found]}
        )
        return
    if not found:
        output.text(f"no server of ours on {ssh.host}")
        return
    rows = [
        [one.port, _state(one), one.pid or "-", _name(one.facts.get("draft")), _name(one.facts.get("model"))]
        for one in found
    ]
    output.table(["port", "state", "pid", "drafter", "model"], rows)


def _state(one: RemoteProcess) -> str:
    if one.running:
        return "running"
    return "ended" if one.exit is None else f"ended ({one.returncode})"


def _name(path: object) -> str:
    return str(path).rsplit("/", 1)[-1] if path and str(path) != "None" else "none"


def logs(output: Output, ssh: Ssh, port: int | None, lines: int, follow: bool) -> None:
    """The last lines of the log over there; with `follow` go on until the server ends or Ctrl-C."""
    from dflashcpp.remote import server
    from dflashcpp.remote.host import Host

    host = Host(ssh)
    found = server.only(host, port)
    raw = server.log_bytes(host, found.port)
    for line in raw.decode("utf-8", errors="replace").splitlines()[-lines:] if lines else []:
        output.text(line)
    if not follow:
        return
    stream = server.LogStream(
        host, found.port, lambda piece: output.stream(piece.decode("utf-8", errors="replace")), len(raw) + 1
    )
    try:
        stream.start().wait()
    finally:
        stream.close()


def stop(output: Output, ssh: Ssh, port: int | None, every: bool, dry_run: bool) -> None:
    """End the server over there, and only it."""
    from dflashcpp.remote import server
    from dflashcpp.remote.host import Host

    host = Host(ssh)
    chosen = [one for one in server.servers(host) if one.running] if every else [server.only(host, port)]
    names = [f"{ssh.host} port {one.port} (pid {one.pid})" for one in chosen]
    if dry_run:
        listed = "\n".join(f"would end {name}" for name in names) or "nothing runs"
        output.result({"would_stop": names}, listed)
        return
    ended = []
    for one, name in zip(chosen, names, strict=True):
        found = server.stop(host, one.port)
        if found and found.running:
            ended.append(name)
    output.result({"stopped": ended}, "\n".join(f"ended {name}" for name in ended) or "nothing runs")


@contextlib.contextmanager
def tunnelled(output: Output, profile: Profile, ssh: Ssh, port: int | None) -> Iterator[str]:
    """The URL of llama-server on the far side through a tunnel that lives as long as the block."""
    from dflashcpp.remote.tunnel import Tunnel

    with Tunnel(ssh, 0, port or profile.remote_port, lambda report: _tell(output, report)) as tunnel:
        report = tunnel.wait_settled()
        if report.state in ("tunnel up, nothing listening", "not llama-server"):
            raise DflashError(f"{report.state}: {report.message}", hint=report.hint or None)
        tunnel.wait_ready(600.0)
        yield tunnel.url
