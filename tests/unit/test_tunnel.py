"""The supervised forward against S3, a fake ssh that gives OpenSSH's own texts."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from dflashcpp.errors import DflashError, UsageError
from dflashcpp.remote import command, faults, probe, tunnel
from dflashcpp.remote.command import Ssh
from dflashcpp.remote.tunnel import Report, Tunnel
from dflashcpp.server.ports import free_port
from tests.support.fake_http import Script, fake_server
from tests.support.fake_ssh import REFUSALS, FakeSsh
from tests.support.far_server import FarServer, far_server

STATES = {
    "resolve": "host unreachable",
    "refused": "host unreachable",
    "timeout": "host unreachable",
    "hung-up": "host unreachable",
    "jump": "host unreachable",
    "denied": "authentication",
    "unknown-key": "host key unknown",
    "changed-key": "host key changed",
    "bad-option": "ssh configuration",
    "cipher": "no common cipher",
    "bind": "local port taken",
    "forward": "forwarding forbidden",
    "odd": "host unreachable",
}


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSsh:
    made = FakeSsh(tmp_path / "fake bin")
    monkeypatch.setenv("PATH", f"{made.folder}:{os.environ['PATH']}")
    return made


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waits of a second where a person has half a minute."""
    monkeypatch.setattr(tunnel, "_EVERY", {"ready": 0.2, "connecting": 0.05})
    monkeypatch.setattr(tunnel, "_PROBE_SECONDS", 3.0)
    monkeypatch.setattr(tunnel, "backoff", lambda attempt: 0.05)


@pytest.fixture
def far() -> Iterator[FarServer]:
    with far_server() as server:
        yield server


def _eventually(condition: Callable[[], bool], seconds: float = 60.0) -> bool:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if condition():
            return True
        time.sleep(0.05)
    return False


def _ssh_children() -> list[psutil.Process]:
    return [
        one for one in psutil.Process().children(recursive=True) if any("fake.py" in w for w in one.cmdline())
    ]


def _states(seen: list[Report]) -> list[str]:
    return [report.state for report in seen]


def test_the_table_of_refusals_is_tested_whole() -> None:
    assert set(STATES) == set(REFUSALS)


@pytest.mark.parametrize("refusal", sorted(REFUSALS))
def test_each_refusal_of_ssh_ends_in_its_own_state_with_advice(fake: FakeSsh, refusal: str) -> None:
    fake.set(refusal)
    with Tunnel(Ssh("far"), 0, 8001, patience=0) as made:
        report = made.wait_end(20)
    assert report is not None and report.state == STATES[refusal]
    assert report.message and report.hint
    assert REFUSALS[refusal].splitlines()[0].split(":")[0][:12] in report.message or "far" in report.message
    assert not _ssh_children()


@pytest.mark.parametrize("refusal", ["bind", "forward"])
def test_an_ssh_that_reports_a_failed_forward_and_lives_on_is_ended(fake: FakeSsh, refusal: str) -> None:
    fake.set(refusal, stay=True)
    with Tunnel(Ssh("far"), 0, 8001, patience=0) as made:
        report = made.wait_end(20)
        assert report is not None and report.state == STATES[refusal]
        assert not _ssh_children()


def test_ready_is_a_valid_answer_and_every_step_before_has_its_name(
    fake: FakeSsh, quick: None, far: FarServer
) -> None:
    seen: list[Report] = []
    far.state = "loading"
    with Tunnel(Ssh("far"), 0, far.port, seen.append) as made:
        assert _eventually(lambda: made.report.state == tunnel.LOADING)
        far.state = "ready"
        assert made.wait_ready(20).model == "tiny"
        far.state = "silent"
        assert _eventually(lambda: made.report.state == tunnel.HALF_OPEN)
        far.state = "half"
        assert _eventually(lambda: made.report.state == tunnel.OTHER)
        far.close()
        assert _eventually(lambda: made.report.state == tunnel.NOTHING)
        assert "refuses" in made.report.message
    assert _states(seen) == [
        tunnel.LOADING, tunnel.READY, tunnel.HALF_OPEN, tunnel.OTHER, tunnel.NOTHING, tunnel.CLOSED,
    ]  # fmt: skip
    assert not _ssh_children()


@pytest.mark.parametrize(
    ("mode", "state"),
    [("accept-close", tunnel.NOTHING), ("freeze", tunnel.HALF_OPEN), ("forbidden", "forwarding forbidden")],
)
def test_an_accepted_connection_alone_is_never_ready(
    fake: FakeSsh, quick: None, mode: str, state: str
) -> None:
    fake.set(mode)
    with Tunnel(Ssh("far"), 0, 8001) as made:
        assert _eventually(lambda: made.report.state == state), made.report
        assert made.report.final == (mode == "forbidden")


def test_a_dead_ssh_is_replaced_and_the_server_answers_again(
    fake: FakeSsh, quick: None, far: FarServer
) -> None:
    seen: list[Report] = []
    with Tunnel(Ssh("far"), 0, far.port, seen.append) as made:
        made.wait_ready(20)
        (first,) = _ssh_children()
        first.kill()
        assert _eventually(lambda: _states(seen)[-2:] == [tunnel.LOST, tunnel.READY]), _states(seen)
        (second,) = _ssh_children()
        assert second.pid != first.pid


def test_an_ssh_that_dies_of_a_silent_host_says_so_and_tries_again(
    fake: FakeSsh, quick: None, far: FarServer
) -> None:
    seen: list[Report] = []
    fake.set("die", after=5.0, times=1)
    with Tunnel(Ssh("far"), 0, far.port, seen.append):
        assert _eventually(lambda: _states(seen) == [tunnel.READY, tunnel.LOST, tunnel.READY])
    assert "keep-alive" in seen[1].message


def test_a_stopped_ssh_is_replaced(fake: FakeSsh, quick: None, far: FarServer) -> None:
    seen: list[Report] = []
    with Tunnel(Ssh("far"), 0, far.port, seen.append) as made:
        made.wait_ready(20)
        (first,) = _ssh_children()
        first.suspend()
        assert _eventually(lambda: _states(seen)[-2:] == [tunnel.LOST, tunnel.READY]), seen
        assert not first.is_running() or first.status() == psutil.STATUS_ZOMBIE


def test_an_unreachable_host_is_tried_again_until_it_is_there(
    fake: FakeSsh, quick: None, far: FarServer
) -> None:
    fake.set("timeout", times=2)
    with Tunnel(Ssh("far"), 0, far.port) as made:
        assert made.wait_ready(20).state == tunnel.READY
    assert len(fake.calls()) == 3


def test_authentication_is_tried_once_before_it_stood_and_again_afterwards(
    fake: FakeSsh, quick: None, far: FarServer
) -> None:
    fake.set("denied")
    with Tunnel(Ssh("far"), 0, far.port) as made:
        assert made.wait_end(20) is not None
    calls = [call for call in fake.calls() if "-N" in call]
    assert len(calls) == 1
    fake.set("relay")
    with Tunnel(Ssh("far"), 0, far.port) as made:
        made.wait_ready(20)
        fake.set("denied")
        _ssh_children()[0].kill()
        assert _eventually(lambda: made.report.state == "authentication") and not made.report.final
        fake.set("relay")
        assert made.wait_ready(20)


def test_a_taken_local_port_names_its_holder_and_starts_no_ssh(fake: FakeSsh) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with Tunnel(Ssh("far"), taken.getsockname()[1], 8001) as made:
            report = made.wait_end(10)
    assert report is not None and report.state == "local port taken" and str(os.getpid()) in report.message
    assert fake.calls() == []


def test_a_stranger_on_the_local_port_is_not_taken_for_the_tunnel(
    fake: FakeSsh, quick: None, far: FarServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It got the port between our look and ssh's: its answer is valid, but it is not the far side's."""
    fake.set("hang")
    monkeypatch.setattr(tunnel, "check_port", lambda host, port: None)
    with Tunnel(Ssh("far"), far.port, 8001) as made:
        time.sleep(1.0)
        assert made.report.state == tunnel.CONNECTING and far.served == 0


def test_waiting_has_an_end_and_says_what_the_state_was(fake: FakeSsh, quick: None) -> None:
    with Tunnel(Ssh("far"), 0, free_port()) as made:
        made.wait_up(30)
        with pytest.raises(DflashError, match=r"nothing listening.*after 1 s"):
            made.wait_ready(1)


def test_no_ssh_at_all_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with Tunnel(Ssh("far"), 0, 8001) as made, pytest.raises(DflashError, match="ssh cannot be run") as caught:
        made.wait_up(20)
    assert "openssh-client" in (caught.value.hint or "")


def test_the_command_line_is_what_ssh_needs_and_nothing_that_skips_host_keys() -> None:
    argv = command.tunnel_argv(Ssh("me@far", ("-F", "my config")), 8001, 9001)
    assert argv[0] == "ssh" and argv[-2:] == ["--", "me@far"] and "-N" in argv and "-T" in argv
    assert argv[argv.index("-L") + 1] == "127.0.0.1:8001:127.0.0.1:9001"
    options = {argv[i + 1] for i, word in enumerate(argv) if word == "-o"}
    assert {
        "BatchMode=yes", "ExitOnForwardFailure=yes", "ServerAliveInterval=15", "ServerAliveCountMax=3",
    } <= options  # fmt: skip
    assert not any("HostKey" in option for option in options)
    assert command.shown(argv).count("'my config'") == 1


@pytest.mark.parametrize("host", ["", "-oProxyCommand=x", "a b", "a;b", "$(x)", "a\nb", "a'b"])
def test_a_host_that_is_none_is_refused(host: str) -> None:
    with pytest.raises(UsageError):
        Ssh(host)


@pytest.mark.parametrize(
    "option",
    ["StrictHostKeyChecking=no", "stricthostkeychecking off", "UserKnownHostsFile=/dev/null",
     "StrictHostKeyChecking=accept-new"],
)  # fmt: skip
def test_options_that_skip_host_keys_are_refused(option: str) -> None:
    with pytest.raises(UsageError, match="host keys"):
        Ssh("far", ("-o", option))


def test_backoff_grows_to_half_a_minute_with_jitter() -> None:
    assert [tunnel.backoff(n, lambda: 0.0) for n in (0, 1, 2, 3, 9, 99)] == [1, 2, 4, 8, 30, 30]
    assert tunnel.backoff(3, lambda: 1.0) == 4.0


def test_a_closed_connection_after_the_login_is_lost_not_unreachable() -> None:
    lines = ["Connection to far closed by remote host."]
    found = faults.classify(lines, host="far", connected=True)
    assert found is not None and (found.state, found.lasting) == ("connection lost", False)


def test_ssh_ended_by_a_signal_is_told_in_words() -> None:
    assert "signal 9" in faults.of_exit([], -9, host="far", connected=True).message


def test_probe_tells_a_program_that_speaks_no_http() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]

        def greet() -> None:
            peer, _ = listener.accept()
            peer.sendall(b"SSH-2.0-OpenSSH_9.2\r\n")
            peer.close()

        threading.Thread(target=greet, daemon=True).start()
        assert probe.probe(port, 2.0).state == probe.OTHER


# -- the command -----------------------------------------------------------------------------------


def _tunnel(fake: FakeSsh, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "dflashcpp", "tunnel", *arguments],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=fake.environment(),
    )  # fmt: skip


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_command_prints_one_object_when_ready_and_leaves_nothing(
    fake: FakeSsh, far: FarServer, number: signal.Signals
) -> None:
    process = _tunnel(fake, "far", "--port", "0", "--remote-port", str(far.port), "--json")
    assert process.stdout is not None
    told = json.loads(process.stdout.readline())
    assert told["state"] == "ready" and told["remote"] == f"far:127.0.0.1:{far.port}"
    assert told["local"].startswith("http://127.0.0.1:")
    children = psutil.Process(process.pid).children(recursive=True)
    assert children
    process.send_signal(number)
    rest, _ = process.communicate(timeout=20)
    assert rest == "" and process.returncode == 0
    assert not psutil.wait_procs(children, timeout=5)[1]


def test_command_killed_outright_takes_its_ssh_along(fake: FakeSsh, far: FarServer) -> None:
    process = _tunnel(fake, "far", "--port", "0", "--remote-port", str(far.port))
    assert process.stdout is not None and "ready" in process.stdout.readline()
    children = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.communicate(timeout=20)
    assert children and not psutil.wait_procs(children, timeout=5)[1]


def test_command_fails_with_one_object_and_the_advice(fake: FakeSsh) -> None:
    fake.set("denied")
    process = _tunnel(fake, "far", "--port", "0", "--json")
    out, err = process.communicate(timeout=30)
    told = json.loads(out)
    assert process.returncode == 1 and told["state"] == "authentication" and told["hint"]
    assert "authentication" in err and "Traceback" not in err


def test_command_check_ends_with_the_state(fake: FakeSsh) -> None:
    process = _tunnel(fake, "far", "--port", "0", "--remote-port", str(free_port()), "--check", "--json")
    out, _ = process.communicate(timeout=30)
    assert json.loads(out)["state"] == tunnel.NOTHING and process.returncode == 1


def test_command_dry_run_prints_the_ssh_command_and_runs_nothing(fake: FakeSsh) -> None:
    process = _tunnel(fake, "far", "--port", "8001", "--dry-run", "-o", "Port=2222")
    out, _ = process.communicate(timeout=30)
    assert out.startswith("ssh -o BatchMode=yes") and "127.0.0.1:8001:127.0.0.1:8001" in out
    assert "Port=2222" in out and fake.calls() == [] and process.returncode == 0


def test_command_takes_host_and_ports_from_a_profile(fake: FakeSsh, tmp_path: Path) -> None:
    config = tmp_path / "config.toml"
    config.write_text('[remote.a4000]\nhost = "me@gpu"\nlocal_port = 8005\nremote_port = 9005\n')
    environment = {**fake.environment(), "DFLASHCPP_CONFIG": str(config)}
    command_line = [sys.executable, "-m", "dflashcpp", "tunnel", "a4000", "--dry-run", "--json"]
    done = subprocess.run(command_line, env=environment, capture_output=True, text=True, timeout=30)
    told = json.loads(done.stdout)
    assert (told["local"], told["remote"]) == ("http://127.0.0.1:8005", "me@gpu:127.0.0.1:9005")
    assert told["argv"][-1] == "me@gpu"


@pytest.mark.parametrize(
    ("kind", "state"), [("authentication_error", "ready"), ("nginx", "not llama-server")]
)
def test_a_server_that_wants_a_key_is_known_by_its_own_refusal(kind: str, state: str) -> None:
    refusal = json.dumps({"error": {"code": 401, "message": "Invalid API Key", "type": kind}}).encode()
    with fake_server(Script(refuse={"/v1/models": (401, refusal)})) as server:
        assert probe.probe(server.port, 5.0).state == state
