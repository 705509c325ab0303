"""One llama-server on the far side: started on its loopback, known by pid, start time and program.

Its pidfile, facts, log and exit status are in `~/.local/state/dflashcpp/remote/PORT/` over there
(`$XDG_STATE_HOME` where it is set). It lives on when the link breaks; `stop` ends exactly this process.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from dflashcpp.errors import DflashError
from dflashcpp.remote.faults import FaultError
from dflashcpp.remote.host import Host, Outcome
from dflashcpp.remote.tunnel import backoff

_NOTHING, _RUNNING, _ALREADY_OVER, _ENDED = 25, 22, 26, 30


@dataclass(frozen=True)
class RemoteProcess:
    """A server over there as its notes and the process table tell it. `exit`: status as a shell has it."""

    port: int
    pid: int | None
    started: str
    program: str
    running: bool
    exit: int | None
    log: str
    facts: dict[str, Any]

    @property
    def returncode(self) -> int | None:
        """The exit status as `subprocess` has it: negative for a signal."""
        if self.exit is None:
            return None
        return 128 - self.exit if self.exit > 128 else self.exit

    @property
    def argv(self) -> list[str]:
        """Its command line."""
        return list(self.facts.get("argv", []))


def start(host: Host, port: int, argv: Sequence[str], facts: dict[str, Any]) -> tuple[RemoteProcess, bool]:
    """Start a server, or find that the same one runs already; the second value says that it was adopted.

    `facts` must hold `work`: what is compared to tell whether a running server does what is wanted.
    Raises DflashError naming what differs when another one of ours runs on this port.
    """
    line = json.dumps({**facts, "argv": list(argv)}, ensure_ascii=True, default=str)
    outcome = host.run("start", str(port), line, *argv)
    if outcome.status not in (0, _RUNNING):
        raise DflashError(
            f"{host.name}: {outcome.last_words or 'the server did not start'}", hint=_hint(outcome)
        )
    found = _process(port, outcome)
    if outcome.status == 0:
        return found, False
    differs = differences(found.facts.get("work", []), facts.get("work", []))
    if differs:
        raise DflashError(
            f"a server runs on {host.name} port {port} already (pid {found.pid})"
            f" and differs: {'; '.join(differs)}",
            hint=f"end it first: dflashcpp stop --ssh {host.name}; or choose another --remote-port",
        )
    return found, True


def _hint(outcome: Outcome) -> str | None:
    if outcome.status == 20:
        return "its disk is full or read-only; see: df -h"
    if outcome.status == 23:
        return "name the llama-server over there with --remote-server PATH, or build one"
    return None


def differences(running: Sequence[str], wanted: Sequence[str]) -> list[str]:
    """What differs between two command lines, flag by flag, in words."""
    have, want = _by_flag(running), _by_flag(wanted)
    told = []
    for flag in dict.fromkeys([*have, *want]):
        if have.get(flag) != want.get(flag):
            told.append(f"{flag} is {_said(have.get(flag))} there, {_said(want.get(flag))} wanted")
    return told


def _by_flag(argv: Sequence[str]) -> dict[str, str]:
    flags: dict[str, str] = {}
    name = "program"
    for word in argv:
        if word.startswith("-") and not word[1:2].isdigit():
            name = word
            flags[name] = ""
        else:
            flags[name] = f"{flags.get(name, '')} {word}".strip()
    return flags


def _said(value: str | None) -> str:
    return "absent" if value is None else value or "set"


def status(host: Host, port: int) -> RemoteProcess | None:
    """The server noted for this port, running or ended; None when there was none."""
    outcome = host.run("status", str(port))
    return None if outcome.status == _NOTHING else _process(port, outcome)


def servers(host: Host) -> list[RemoteProcess]:
    """Every server noted on the far side."""
    ports = [int(name) for name in host.ask("list").text.split() if name.isdigit()]
    return [found for found in (status(host, port) for port in sorted(ports)) if found]


def only(host: Host, port: int | None = None) -> RemoteProcess:
    """The server on this port, else the one that runs, else the one that was noted last and alone."""
    noted = servers(host)
    found = [one for one in noted if port in (None, one.port)]
    running = [one for one in found if one.running] or found
    if len(running) == 1:
        return running[0]
    if not running:
        where = f" on port {port}" if port else ""
        raise DflashError(
            f"no server of ours is noted on {host.name}{where}",
            hint=f"start one: dflashcpp serve --ssh {host.name}",
        )
    ports = ", ".join(str(one.port) for one in running)
    raise DflashError(
        f"{host.name} has several servers (ports {ports})", hint="choose one with --remote-port"
    )


def stop(host: Host, port: int, grace: int = 10) -> RemoteProcess | None:
    """End the server noted for this port; None when there was none, else how it was and ended.

    Asked first, killed after `grace` seconds. `running` in the result tells whether it ran before.
    """
    outcome = host.run("stop", str(port), str(grace), timeout=grace + 60.0)
    if outcome.status == _NOTHING:
        return None
    if outcome.status not in (0, _ALREADY_OVER):
        raise DflashError(f"{host.name}: {outcome.last_words or 'the server could not be stopped'}")
    found = _process(port, outcome)
    return RemoteProcess(**{**vars(found), "running": outcome.status == 0})


def log_text(host: Host, port: int) -> str:
    """The log over there as text."""
    return log_bytes(host, port).decode("utf-8", errors="replace")


def log_bytes(host: Host, port: int, first: int = 1) -> bytes:
    """The log over there, from byte `first` (counted from 1)."""
    outcome = host.run("log", str(port), str(first), "show")
    if outcome.status == _NOTHING:
        raise DflashError(f"{host.name} has no log of a server on port {port}")
    return outcome.out


def _process(port: int, outcome: Outcome) -> RemoteProcess:
    values = outcome.values()
    try:
        facts = json.loads(values.get("facts") or "{}")
    except ValueError:
        facts = {}
    pid, ended = values.get("pid", ""), values.get("exit", "")
    return RemoteProcess(
        port=port,
        pid=int(pid) if pid.isdigit() else None,
        started=values.get("started", ""),
        program=values.get("program", ""),
        running=values.get("running") == "yes",
        exit=int(ended) if ended.isdigit() else None,
        log=values.get("log", ""),
        facts=facts if isinstance(facts, dict) else {},
    )


class LogStream:
    """Follows the log of a server over there from a thread, over broken links, losing and doubling nothing.

    `sink` gets the bytes in order. `ended` is set once the server itself has ended; `process` is then how.
    `trouble` holds the present fault of the link, None while it works.
    """

    def __init__(self, host: Host, port: int, sink: Callable[[bytes], None], first: int = 1) -> None:
        self.host, self.port = host, port
        self.ended = threading.Event()
        self.process: RemoteProcess | None = None
        self.trouble: DflashError | None = None
        self._sink, self._next = sink, first
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="remote-log", daemon=True)

    def start(self) -> LogStream:
        """Begin to follow."""
        self._thread.start()
        return self

    def wait(self) -> None:
        """Wait until the server has ended. Raises the fault of a link that nothing here can mend."""
        while self._thread.is_alive():
            self._thread.join(0.5)
        if not self.ended.is_set() and self.trouble is not None:
            raise self.trouble

    def close(self) -> None:
        """Stop following; the server goes on."""
        self._stop.set()
        self._thread.join(10.0)

    def _take(self, piece: bytes) -> None:
        self._next += len(piece)
        self.trouble = None
        self._sink(piece)

    def _run(self) -> None:
        attempt = 0
        while not self._stop.is_set():
            before = self._next
            try:
                if self._follow():
                    return
                attempt = 0
            except DflashError as error:
                self.trouble = error
                attempt = 0 if self._next > before else attempt + 1
                if isinstance(error, FaultError) and error.fault.lasting and attempt > 3:
                    return
            self._stop.wait(backoff(attempt))

    def _follow(self) -> bool:
        """One connection's worth of log; True once the server has ended."""
        outcome = self.host.run(
            "log", str(self.port), str(self._next), "follow", timeout=None, sink=self._take, stop=self._stop
        )
        if outcome.status not in (_ENDED, _NOTHING):
            return False
        self.process = status(self.host, self.port)
        self.ended.set()
        return True
