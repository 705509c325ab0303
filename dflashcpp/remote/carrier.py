"""What carries a forward: an ssh of our own, or the user's running ControlMaster."""

from __future__ import annotations

import os
import subprocess
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from dflashcpp.errors import DflashError
from dflashcpp.remote import command, faults
from dflashcpp.remote.command import Ssh
from dflashcpp.remote.faults import Fault, FaultError
from dflashcpp.server.process import Child

_LOG_LIMIT = 1 << 20
_MASTER_SECONDS = 20.0


class Carrier(Protocol):
    """Carries `127.0.0.1:local` here to `127.0.0.1:remote` there."""

    def open(self) -> None:
        """Begin; returns at once or raises DflashError when ssh cannot be run at all."""

    def listens(self) -> bool:
        """Whether the local end is open, and open by this carrier, not by a stranger."""

    def fault(self) -> Fault | None:
        """What is wrong, or None while it works."""

    def refused(self) -> bool:
        """Whether the far side has refused a connection since the last call."""

    def close(self) -> None:
        """End it and leave nothing."""


class OwnConnection:
    """An `ssh -N -L` child of ours; its stderr goes to a file that is read for its words."""

    def __init__(self, ssh: Ssh, local_port: int, remote_port: int) -> None:
        self._ssh, self._ports = ssh, {"local_port": local_port, "remote_port": remote_port}
        handle, name = tempfile.mkstemp(prefix="dflashcpp-ssh-")
        os.close(handle)
        self._said = Path(name)
        self._child = Child(command.tunnel_argv(ssh, local_port, remote_port), self._said)
        self._connected = False
        self._read = 0

    def open(self) -> None:
        _start(self._child)

    @property
    def pid(self) -> int:
        """The ssh process."""
        return self._child.pid

    def listens(self) -> bool:
        self._connected = self._connected or _listens(self.pid, self._ports["local_port"])
        return self._connected

    def fault(self) -> Fault | None:
        status = self._child.returncode
        lines = self._lines()
        if status is not None:
            return faults.of_exit(
                lines, status, host=self._ssh.host, connected=self._connected, **self._ports
            )
        if _frozen(self.pid):
            return Fault(
                "connection lost", "the ssh process here was stopped (SIGSTOP)", "it is replaced", False
            )
        found = faults.classify(lines, host=self._ssh.host, connected=self._connected, **self._ports)
        return found if found and found.lasting else None

    def refused(self) -> bool:
        lines = self._lines()
        if self._said.stat().st_size > _LOG_LIMIT:
            os.truncate(self._said, 0)  # ssh appends: its next line goes to the start
        fresh, self._read = lines[self._read :], len(lines)
        return any(faults.nothing_listens(line) for line in fresh)

    def close(self) -> None:
        with suppress(FileNotFoundError):
            self._child.stop(grace=3.0)
            self._said.unlink()

    def _lines(self) -> list[str]:
        lines = self._said.read_text(errors="replace").splitlines()
        self._read = min(self._read, len(lines))
        return lines


class SharedMaster:
    """A forward asked of the user's own master (`ssh -O forward`), and taken back at the end."""

    def __init__(self, ssh: Ssh, local_port: int, remote_port: int) -> None:
        self._ssh, self._ports = ssh, (local_port, remote_port)
        self._open = False

    @staticmethod
    def runs(ssh: Ssh) -> bool:
        """Whether the user has a master connection to this host open."""
        return _control(command.master_argv(ssh, "check")).returncode == 0

    def open(self) -> None:
        answer = _control(command.master_argv(self._ssh, "forward", *self._ports))
        if answer.returncode != 0:
            local, remote = self._ports
            lines = answer.stderr.splitlines()
            found = faults.classify(lines, host=self._ssh.host, local_port=local, remote_port=remote)
            raise FaultError(found or faults.of_exit(lines, 255, host=self._ssh.host, connected=False))
        self._open = True

    def listens(self) -> bool:
        return self._open

    def fault(self) -> Fault | None:
        if self.runs(self._ssh):
            return None
        return Fault(
            "connection lost", f"the shared ssh connection to {self._ssh.host} ended", "open it again", False
        )

    def refused(self) -> bool:
        return False  # the reason goes to the master's own stderr

    def close(self) -> None:
        if self._open:
            _control(command.master_argv(self._ssh, "cancel", *self._ports))
            self._open = False


def _control(argv: list[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            argv,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_MASTER_SECONDS,
        )
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(argv, 255, "", "the shared connection timed out")
    except OSError as error:
        raise no_ssh(argv[0], error) from None


def _start(child: Child) -> None:
    try:
        child.start()
    except DflashError as error:
        raise no_ssh(child.argv[0], error) from None


def no_ssh(program: str, error: Exception) -> FaultError:
    """The error when OpenSSH's client itself cannot be run."""
    reason = getattr(error, "strerror", None) or getattr(error, "message", None) or str(error)
    reason = reason.removeprefix(f"{program} cannot be run: ")
    hint = "install OpenSSH's client, for example: apt install openssh-client"
    return FaultError(Fault("ssh missing", f"{program} cannot be run: {reason}", hint, True))


def _listens(pid: int, port: int) -> bool:
    """Whether this process listens on the port; its children count (a wrapper around ssh)."""
    import psutil

    try:
        process = psutil.Process(pid)
        family = [process, *process.children(recursive=True)]
        return any(
            one.status == psutil.CONN_LISTEN and one.laddr.port == port
            for member in family
            for one in member.net_connections("tcp")
        )
    except psutil.Error:
        return False


def _frozen(pid: int) -> bool:
    import psutil

    try:
        return psutil.Process(pid).status() == psutil.STATUS_STOPPED
    except psutil.Error:
        return False
