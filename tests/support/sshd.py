"""A real sshd on loopback: its own config, keys, port, and a HOME for the far side of its own."""

from __future__ import annotations

import contextlib
import getpass
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from dflashcpp.remote.command import Ssh

_SSHD = shutil.which("sshd") or "/usr/sbin/sshd"


def _key(path: Path) -> str:
    command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "", "-f", str(path)]
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL)
    return path.with_name(f"{path.name}.pub").read_text().strip()


def _free_port(address: str) -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1" if address != "127.0.0.1" else address, 0))
        return int(probe.getsockname()[1])


class Sshd:
    """The server in `folder`. `ssh()` is how a client reaches it as the host `far`."""

    def __init__(
        self, folder: Path, *lines: str, address: str = "127.0.0.1", before: tuple[str, ...] = ()
    ) -> None:
        self.folder, self.address, self._before = folder, address, before
        folder.mkdir(parents=True, exist_ok=True)
        self.home = folder / "far home"
        self.home.mkdir(exist_ok=True)
        self.port = _free_port(address)
        self.host_key = _key(folder / "host")
        (folder / "authorized").write_text(_key(folder / "user") + "\n")
        _key(folder / "stranger")
        self.known = folder / "known"
        self.known.write_text(f"[{address}]:{self.port} {self.host_key}\n")
        self.write(*lines)
        self._process: subprocess.Popen[bytes] | None = None

    def write(self, *lines: str, environment: str = "") -> None:
        """Write sshd_config; `lines` come first, and sshd takes the first value of each keyword."""
        folder = self.folder
        text = [
            *lines,
            f"Port {self.port}",
            f"ListenAddress {self.address}",
            f'HostKey "{folder}/host"',
            f'AuthorizedKeysFile "{folder}/authorized"',
            f'PidFile "{folder}/sshd.pid"',
            f'SetEnv "HOME={self.home}" {environment}',
            "StrictModes no",
            "UsePAM no",
            "PasswordAuthentication no",
            "KbdInteractiveAuthentication no",
            "PermitRootLogin yes",
            "MaxStartups 100",
        ]
        (folder / "sshd_config").write_text("\n".join(text) + "\n")

    def ssh(self, *lines: str, key: str = "user", known: Path | None = None) -> Ssh:
        """A client's view; `lines` go first into its ssh_config."""
        config = self.folder / f"client-{abs(hash((lines, key, known)))}"
        text = [
            "Host far",
            *lines,
            f"HostName {self.address}",
            f"Port {self.port}",
            f"User {getpass.getuser()}",
            f'IdentityFile "{self.folder}/{key}"',
            "IdentitiesOnly yes",
            "IdentityAgent none",
            f'UserKnownHostsFile "{known or self.known}"',
            "GlobalKnownHostsFile none",
        ]
        config.write_text("\n  ".join(text) + "\n")
        return Ssh("far", ("-F", str(config)))

    def start(self) -> None:
        """Listen."""
        if os.getuid() == 0:
            Path("/run/sshd").mkdir(exist_ok=True)
        command = [*self._before, _SSHD, "-D", "-e", "-f", str(self.folder / "sshd_config")]
        with (self.folder / "sshd.log").open("ab") as log:
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        until = time.monotonic() + 20
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"sshd did not start: {(self.folder / 'sshd.log').read_text()[-500:]}")
            time.sleep(0.05)

    def _answers(self) -> bool:
        try:
            with socket.create_connection((self.address, self.port), 1.0) as peer:
                return peer.recv(4) == b"SSH-"
        except OSError:
            return False

    def sessions(self) -> list[psutil.Process]:
        """The sshd processes of the connections that stand."""
        assert self._process is not None
        with contextlib.suppress(psutil.NoSuchProcess):
            below = psutil.Process(self._process.pid).children(recursive=True)
            return [one for one in below if _name(one).startswith("sshd")]
        return []

    def clients(self) -> list[psutil.Process]:
        """The ssh processes that were started with a config of `ssh`."""
        return [one for one in mentioning(f"{self.folder}/client-") if _name(one) == "ssh"]

    def kill_clients(self) -> int:
        """Kill every `clients`; how many there were."""
        clients = self.clients()
        for one in clients:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
        return len(clients)

    def signal_sessions(self, number: signal.Signals) -> int:
        """Signal every connection's sshd; how many there were."""
        sessions = self.sessions()
        for one in sessions:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.send_signal(number)
        return len(sessions)

    def stop(self) -> None:
        """End the listener and all connections."""
        if self._process is None:
            return
        sessions = self.sessions()
        self._process.kill()
        self._process.wait()
        for one in sessions:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
        self._process = None


def require_sshd() -> None:
    """Skip where OpenSSH's server is not installed (`apt install openssh-server`)."""
    if not Path(_SSHD).exists() or shutil.which("ssh") is None:
        pytest.skip("OpenSSH's server or client is not installed")


@contextlib.contextmanager
def running(folder: Path, *lines: str) -> Iterator[Sshd]:
    """A started Sshd for a `with` block."""
    require_sshd()
    made = Sshd(folder, *lines)
    made.start()
    try:
        yield made
    finally:
        made.stop()


def _name(process: psutil.Process) -> str:
    """Empty when it has ended meanwhile."""
    try:
        return process.name()
    except psutil.NoSuchProcess:
        return ""


def mentioning(word: str) -> list[psutil.Process]:
    """Living processes that have `word` in their command line, this one aside."""
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        words = " ".join(process.info["cmdline"] or [])
        if word in words and process.info["status"] != psutil.STATUS_ZOMBIE and process.pid != os.getpid():
            found.append(process)
    return found
