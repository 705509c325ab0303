"""The servers of ours that run on this machine: listed, found and ended by their pidfiles, never by name."""

from __future__ import annotations

import signal
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dflashcpp import paths
from dflashcpp.client import Client
from dflashcpp.errors import DflashError
from dflashcpp.server.launch import read_api_key
from dflashcpp.server.process import Identity, read_pidfile


@dataclass(frozen=True)
class Noted:
    """One server as its pidfile has it. `supervisor`: the `dflashcpp serve` that looks after it."""

    port: int
    url: str
    process: Identity
    folder: Path
    supervisor: Identity | None = None
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def running(self) -> bool:
        """Whether that very process runs."""
        return self.process.alive()

    @property
    def log(self) -> Path:
        """Its log file."""
        return Path(str(self.facts.get("log") or self.folder / "server.log"))

    def client(self) -> Client:
        """A client for it, with its key if it has one."""
        key_file = self.facts.get("api_key_file")
        return Client(self.url, read_api_key(Path(key_file) if key_file else None), retries=0)

    def state(self) -> str:
        """`ready`, `loading`, `not answering`, `restarting`, or `ended`."""
        if not self.running:
            return "restarting" if self.supervisor is not None and self.supervisor.alive() else "ended"
        health = self.client().health()
        return {"unreachable": "not answering"}.get(health, health)


def noted(port: int | None = None) -> list[Noted]:
    """The servers that were noted and not stopped in good order, by port; those that are long gone too."""
    found = []
    for path in sorted(paths.state_dir("servers").glob("*/server.json")):
        one = _read(path)
        if one is not None and port in (None, one.port):
            found.append(one)
    return sorted(found, key=lambda one: one.port)


def _read(path: Path) -> Noted | None:
    read = read_pidfile(path)
    if read is None:
        return None
    identity, facts = read
    try:
        supervisor = Identity(**facts["supervisor"]) if facts.get("supervisor") else None  # type: ignore[arg-type]
        return Noted(int(str(facts["port"])), str(facts["url"]), identity, path.parent, supervisor, facts)
    except (KeyError, TypeError, ValueError):
        return None


def alive(port: int | None = None) -> list[Noted]:
    """Those that run, or are being started again."""
    return [
        one for one in noted(port) if one.running or (one.supervisor is not None and one.supervisor.alive())
    ]


def only(port: int | None = None) -> Noted:
    """The one server of ours that runs (on this port). Raises DflashError when there is none or several."""
    found = alive(port)
    if len(found) == 1:
        return found[0]
    where = f" on port {port}" if port is not None else ""
    if not found:
        raise DflashError(f"no server of ours runs{where}", hint="start one with: dflashcpp serve")
    ports = ", ".join(str(one.port) for one in found)
    raise DflashError(f"several servers of ours run: on ports {ports}", hint="say which with --port")


def stop(one: Noted, grace: float = 15.0) -> bool:
    """End this server and only it; True when it runs no more.

    Its `dflashcpp serve` is asked first, which ends its child; a server without one is asked itself. What has
    not ended after `grace` seconds is killed. A pid that now belongs to something else is left alone.
    """
    for process in (one.supervisor, one.process):
        if process is None or not process.send(signal.SIGTERM):
            continue
        process.send(signal.SIGCONT)
        if not _gone(process, grace):
            process.send(signal.SIGKILL)
            _gone(process, 5.0)
    if not one.running:
        (one.folder / "server.json").unlink(missing_ok=True)
    return not one.running


def _gone(process: Identity, seconds: float) -> bool:
    until = time.monotonic() + seconds
    while process.alive():
        if time.monotonic() > until:
            return False
        time.sleep(0.05)
    return True


def forget_ended() -> list[Noted]:
    """Remove the notes of servers that are gone; returns them."""
    gone = [one for one in noted() if one.state() == "ended"]
    for one in gone:
        (one.folder / "server.json").unlink(missing_ok=True)
    return gone
