"""The tunnel over a real sshd: every way it can fail has its own state, and it recovers where it can."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dflashcpp.remote import command, tunnel
from dflashcpp.remote.command import Ssh
from dflashcpp.remote.tunnel import Report, Tunnel
from dflashcpp.server.ports import free_port
from tests.support.far_server import FarServer, far_server
from tests.support.sshd import Sshd, mentioning, running

pytestmark = [pytest.mark.real, pytest.mark.slow]


@pytest.fixture(scope="module")
def sshd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sshd]:
    with running(tmp_path_factory.mktemp("ssh d")) as made:
        yield made


@pytest.fixture
def far() -> Iterator[FarServer]:
    with far_server() as server:
        yield server


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep-alive of two seconds where a person has a minute."""
    monkeypatch.setattr(command, "_ALIVE", ("-o", "ServerAliveInterval=1", "-o", "ServerAliveCountMax=2"))
    monkeypatch.setattr(tunnel, "_EVERY", {"ready": 0.3, "connecting": 0.1})
    monkeypatch.setattr(tunnel, "_PROBE_SECONDS", 1.0)
    monkeypatch.setattr(tunnel, "backoff", lambda attempt: 0.3)


def eventually(condition: Callable[[], bool], seconds: float = 40.0) -> bool:
    until = time.monotonic() + seconds
    while not condition() and time.monotonic() < until:
        time.sleep(0.05)
    return condition()


def test_it_becomes_ready_and_leaves_nothing(sshd: Sshd, far: FarServer) -> None:
    with Tunnel(sshd.ssh(), 0, far.port) as made:
        assert made.wait_ready(60).model == "tiny"
        assert len(sshd.clients()) == 1
    assert not sshd.clients() and eventually(lambda: not sshd.sessions())


@pytest.mark.parametrize(
    ("lines", "key", "state"),
    [
        ((), "stranger", "authentication"),
        (("Port 1",), "user", "host unreachable"),
        (("HostName no-such-host.invalid",), "user", "host unreachable"),
        (("ProxyCommand false",), "user", "host unreachable"),
        (("Ciphers aes128-cbc",), "user", "no common cipher"),
        (("NoSuchOption yes",), "user", "ssh configuration"),
    ],
)
def test_each_fault_of_the_way_there_is_named(
    sshd: Sshd, far: FarServer, lines: tuple[str, ...], key: str, state: str
) -> None:
    with Tunnel(sshd.ssh(*lines, key=key), 0, far.port, patience=0) as made:
        report = made.wait_end(60)
    assert report is not None and report.state == state and report.hint, report
    assert not sshd.clients()


def test_an_unknown_host_key_is_neither_accepted_nor_written(
    sshd: Sshd, far: FarServer, tmp_path: Path
) -> None:
    known = tmp_path / "known hosts"
    known.write_text("")
    with Tunnel(sshd.ssh(known=known), 0, far.port) as made:
        report = made.wait_end(60)
    assert report is not None and report.state == "host key unknown" and known.read_text() == ""


def test_a_changed_host_key_ends_it(sshd: Sshd, far: FarServer, tmp_path: Path) -> None:
    known = tmp_path / "known hosts"
    other = (sshd.folder / "stranger.pub").read_text().strip()
    known.write_text(f"[{sshd.address}]:{sshd.port} {other}\n")
    with Tunnel(sshd.ssh(known=known), 0, far.port) as made:
        report = made.wait_end(60)
    assert report is not None and report.state == "host key changed" and far.served == 0


def test_forbidden_forwarding_is_told_from_a_server_that_is_not_there(tmp_path: Path, far: FarServer) -> None:
    with (
        running(tmp_path / "no forwarding", "AllowTcpForwarding no") as strict,
        Tunnel(strict.ssh(), 0, far.port) as made,
    ):
        report = made.wait_end(60)
    assert (
        report is not None and report.state == "forwarding forbidden" and "AllowTcpForwarding" in report.hint
    )


def test_nothing_listening_then_a_server_comes_and_goes(sshd: Sshd) -> None:
    port = free_port()
    seen: list[Report] = []
    with Tunnel(sshd.ssh(), 0, port, seen.append) as made:
        assert eventually(lambda: made.report.state == tunnel.NOTHING) and "refuses" in made.report.message
        server = FarServer("loading", port)
        assert eventually(lambda: made.report.state == tunnel.LOADING)
        server.state = "ready"
        made.wait_ready(30)
        server.close()
        assert eventually(lambda: made.report.state == tunnel.NOTHING)


def test_a_taken_local_port_is_named_while_and_after_it_is_taken(sshd: Sshd, far: FarServer) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with Tunnel(sshd.ssh(), port, far.port) as made:
            report = made.wait_end(30)
    assert report is not None and report.state == "local port taken"
    with Tunnel(sshd.ssh(), port, far.port) as made:
        assert made.wait_ready(60)


def test_a_port_that_ssh_finds_taken_is_named_too(
    sshd: Sshd, far: FarServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tunnel, "check_port", lambda host, port: None)
    with Tunnel(sshd.ssh(), far.port, far.port) as made:
        report = made.wait_end(60)
    assert report is not None and report.state == "local port taken" and "ssh: bind" in report.message


@pytest.mark.parametrize("victim", ["ssh", "sshd session", "ssh frozen", "sshd frozen", "sshd listener"])
def test_it_recovers_from_each_end_dying_or_freezing(sshd: Sshd, far: FarServer, victim: str) -> None:
    seen: list[Report] = []
    with Tunnel(sshd.ssh(), 0, far.port, seen.append) as made:
        made.wait_ready(60)
        (first,) = sshd.clients()
        frozen = []
        if victim == "ssh":
            first.kill()
        elif victim == "ssh frozen":
            first.suspend()
        elif victim == "sshd session":
            assert sshd.signal_sessions(signal.SIGKILL)
        elif victim == "sshd frozen":
            frozen = sshd.sessions()
            assert sshd.signal_sessions(signal.SIGSTOP)
        else:
            sshd.stop()
            assert eventually(lambda: made.report.state == "host unreachable")
            sshd.start()
        assert eventually(lambda: tunnel.LOST in [one.state for one in seen]), seen
        assert eventually(lambda: made.report.state == tunnel.READY), made.report
        (second,) = sshd.clients()
        assert second.pid != first.pid
        for one in frozen:
            one.resume()
    assert eventually(lambda: not sshd.clients() and not sshd.sessions())


def test_a_frozen_server_is_half_open_and_comes_back(sshd: Sshd, far: FarServer) -> None:
    with Tunnel(sshd.ssh(), 0, far.port) as made:
        made.wait_ready(60)
        far.state = "silent"
        assert eventually(lambda: made.report.state == tunnel.HALF_OPEN)
        (before,) = sshd.clients()
        far.state = "ready"
        made.wait_ready(30)
        assert sshd.clients() == [before], "a server that hangs is no reason to cut other streams"


def test_a_hung_server_is_told_from_a_dead_link(
    sshd: Sshd, far: FarServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tunnel, "_LINK_SECONDS", 4)
    far.state = "silent"
    with Tunnel(sshd.ssh(), 0, far.port) as made:
        assert eventually(lambda: "keep-alive is answered" in made.report.message)


def test_the_users_master_is_used_where_only_it_gets_in_and_left_alone(sshd: Sshd, far: FarServer) -> None:
    control = f'ControlPath "{sshd.folder}/cm"'
    opened = sshd.ssh(control)
    master = subprocess.Popen(["ssh", *opened.options, "-M", "-N", "far"], stdin=subprocess.DEVNULL)
    try:
        assert eventually(lambda: (sshd.folder / "cm").exists())
        with Tunnel(sshd.ssh(control, key="stranger"), 0, far.port) as made:
            made.wait_ready(60)
            port = made.local_port
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), 2.0)
        assert master.poll() is None
    finally:
        master.terminate()
        master.wait()


def test_a_jump_host_is_used(sshd: Sshd, far: FarServer, tmp_path: Path) -> None:
    inner = sshd.ssh()
    outer = inner.options[1]
    text = Path(outer).read_text()
    config = tmp_path / "jumping"
    config.write_text(
        f"{text}\n{text.replace('Host far', 'Host behind')}  ProxyCommand ssh -F '{outer}' -W %h:%p far\n"
    )
    with Tunnel(Ssh("behind", ("-F", str(config))), 0, far.port) as made:
        assert made.wait_ready(60)
    assert eventually(lambda: not mentioning(str(outer)))


# -- a link between two network namespaces -------------------------------------------------------------


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@pytest.fixture
def apart(tmp_path: Path) -> Iterator[Sshd]:
    """An sshd in a network namespace of its own; its link here is `dfh0`, over there `dff0`."""
    name = "dflashcpp-test"
    try:
        _ip("netns", "add", name)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("this user may not make network namespaces")
    inside = ("netns", "exec", name)
    try:
        _ip("link", "add", "dfh0", "type", "veth", "peer", "name", "dff0", "netns", name)
        _ip("addr", "add", "10.213.7.1/30", "dev", "dfh0")
        _ip("link", "set", "dfh0", "up")
        _ip(*inside, "ip", "addr", "add", "10.213.7.2/30", "dev", "dff0")
        _ip(*inside, "ip", "link", "set", "dff0", "up")
        _ip(*inside, "ip", "link", "set", "lo", "up")
        made = Sshd(tmp_path / "apart", address="10.213.7.2", before=("ip", *inside))
        made.start()
        try:
            yield made
        finally:
            made.stop()
    finally:
        subprocess.run(["ip", "netns", "del", name], capture_output=True)
        subprocess.run(["ip", "link", "del", "dfh0"], capture_output=True)


@pytest.fixture
def server_apart(apart: Sshd) -> Iterator[int]:
    """A llama-server's stand-in inside the namespace; its port."""
    code = (
        "import time; from tests.support.far_server import FarServer\n"
        "print(FarServer().port, flush=True)\ntime.sleep(600)"
    )
    root = Path(__file__).parents[2]
    command_line = ["ip", "netns", "exec", "dflashcpp-test", sys.executable, "-c", code]
    process = subprocess.Popen(command_line, stdout=subprocess.PIPE, cwd=root, text=True)
    assert process.stdout is not None
    try:
        yield int(process.stdout.readline())
    finally:
        process.kill()
        process.wait()


def test_a_cut_link_is_lost_and_found_again(apart: Sshd, server_apart: int) -> None:
    seen: list[Report] = []
    with Tunnel(apart.ssh(), 0, server_apart, seen.append) as made:
        made.wait_ready(60)
        _ip("link", "set", "dfh0", "down")
        assert eventually(lambda: made.report.state in (tunnel.LOST, "host unreachable"), 60), made.report
        _ip("link", "set", "dfh0", "up")
        assert eventually(lambda: made.report.state == tunnel.READY, 60), made.report
    assert tunnel.LOST in [one.state for one in seen]


def test_a_slow_link_is_ready_all_the_same(apart: Sshd, server_apart: int) -> None:
    slow = subprocess.run(
        ["tc", "qdisc", "add", "dev", "dfh0", "root", "netem", "delay", "150ms"], capture_output=True
    )
    if slow.returncode:
        pytest.skip("this kernel has no netem")
    with Tunnel(apart.ssh(), 0, server_apart) as made:
        assert made.wait_ready(60)
