"""serve on a far side: a real sshd, the real pair, a real llama-server; killed, frozen, full, taken."""

from __future__ import annotations

import json
import os
import shutil
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

from dflashcpp import Client, DflashError, pairs
from dflashcpp.client import ClientError
from dflashcpp.config import Profile
from dflashcpp.llamacpp import Build
from dflashcpp.progress import Progress, Task
from dflashcpp.remote import files, server, tunnel
from dflashcpp.remote.host import Host
from dflashcpp.remote.serving import Prepared, RemoteServer, Wanted, prepare
from dflashcpp.server.ports import free_port
from tests.support.sshd import Sshd, mentioning, running

pytestmark = [pytest.mark.real, pytest.mark.slow]
PROMPT = "The quick brown fox jumps over the lazy dog. The quick brown fox"


@pytest.fixture(scope="module")
def sshd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sshd]:
    with running(tmp_path_factory.mktemp("ssh d")) as made:
        yield made


@pytest.fixture(scope="module")
def pair() -> tuple[Path, Path]:
    known = pairs.load_pair()
    target = pairs.ensure_target(known)
    return target, pairs.ensure_drafter(known, target=target)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look every third of a second, and lose no time between tries."""
    monkeypatch.setattr(tunnel, "_EVERY", {"ready": 0.3, "connecting": 0.1})
    monkeypatch.setattr(tunnel, "backoff", lambda attempt: 0.3)
    monkeypatch.setattr(server, "backoff", lambda attempt: 0.3)


@pytest.fixture
def port(sshd: Sshd) -> Iterator[int]:
    """A free port over there; afterwards nothing may be left that belongs to it."""
    chosen = free_port()
    yield chosen
    server.stop(Host(sshd.ssh()), chosen, 3)

    def left() -> list[psutil.Process]:
        found = mentioning(f"--port {chosen}") + mentioning("dflashcpp-wait")
        return [one for one in found if _ours(one, sshd)]

    assert eventually(lambda: not left()), [one.cmdline() for one in left()]
    assert eventually(lambda: not mentioning(f"{sshd.folder}/client-")), "an ssh was left"
    assert eventually(lambda: not [one for one in mentioning("tail -c") if _ours(one, sshd)])


def _ours(process: psutil.Process, sshd: Sshd) -> bool:
    try:
        return process.environ().get("HOME") == str(sshd.home)
    except psutil.Error:
        return False


def eventually(condition: Callable[[], bool], seconds: float = 30.0) -> bool:
    until = time.monotonic() + seconds
    while not condition() and time.monotonic() < until:
        time.sleep(0.05)
    return condition()


def made_ready(
    sshd: Sshd, build: Build, pair: tuple[Path, Path], port: int, *more: str, context: str = "1024"
) -> Prepared:
    words = ("-m", str(pair[0]), "-md", str(pair[1]), "-t", "1", "-c", context, *more)
    profile = Profile("far", "far", local_port=free_port(), remote_port=port)
    return prepare(profile, sshd.ssh(), Wanted(words=words, server=str(build.binary("llama-server"))))


def test_it_serves_the_pair_proves_drafting_and_stops_without_a_trace(
    sshd: Sshd, build_patched: Build, pair: tuple[Path, Path], port: int
) -> None:
    # the length is fixed: how many rows go together must not go by the clock where two texts are compared
    prepared = made_ready(sshd, build_patched, pair, port, "--no-spec-draft-adaptive")
    assert prepared.plan is not None and prepared.plan.fits
    with RemoteServer(prepared) as served:
        assert served.proof is not None and served.proof.drafted > 0
        assert served.memory is not None and served.memory.as_dict()["draft"]["weights"] > 0
        near = served.client().complete(PROMPT, n_predict=24, temperature=0)
        over_there = Client(f"http://127.0.0.1:{port}").complete(PROMPT, n_predict=24, temperature=0)
        assert near.text == over_there.text and near.timings is not None
        assert near.timings.drafted
        pid = served.report()["pid"]
        assert psutil.Process(pid).environ()["HOME"] == str(sshd.home)
    assert not psutil.pid_exists(pid)
    found = server.status(Host(sshd.ssh()), port)
    assert found is not None and not found.running and found.returncode == 0
    assert served.log.read_bytes() == server.log_bytes(Host(sshd.ssh()), port)


def test_a_pair_that_does_not_fit_over_there_is_warned_about_before_the_start(
    sshd: Sshd, build_patched: Build, pair: tuple[Path, Path], port: int
) -> None:
    prepared = made_ready(sshd, build_patched, pair, port, context="100000000")
    assert prepared.plan is not None and prepared.plan.fits is False
    assert any("trained for" in text for text in prepared.launch.warnings)


def test_a_key_is_asked_for_through_the_tunnel_and_the_profile_gives_it(
    sshd: Sshd, build_patched: Build, pair: tuple[Path, Path], port: int, tmp_path: Path
) -> None:
    key, config = tmp_path / "a key", tmp_path / "config.toml"
    key.write_text("s3cret-7\n")
    key.chmod(0o600)
    config.write_text(f"[remote.far]\nremote_port = {port}\napi_key_file = {json.dumps(str(key))}\n")
    words = ["-m", str(pair[0]), "-md", str(pair[1]), "-t", "1", "-c", "1024", "--port", "0", "--detach"]
    words += ["--remote-server", str(build_patched.binary("llama-server")), "--json"]
    own = {"DFLASHCPP_CONFIG": str(config)}
    started = _run(sshd, "serve", *words, environment=own)
    assert started.returncode == 0, started.stderr
    over_there = sshd.home / f".local/state/dflashcpp/remote/{port}.key"
    assert over_there.stat().st_mode & 0o077 == 0
    answered = _run(sshd, "chat", "Say hi", "-n", "4", "--json", environment=own)
    assert answered.returncode == 0, answered.stderr
    assert json.loads(answered.stdout)["timings"]["predicted_n"] == 4
    with pytest.raises(ClientError, match="API"):
        Client(f"http://127.0.0.1:{port}").chat("Hi")
    shown = " ".join(word for one in psutil.process_iter(["cmdline"]) for word in one.info["cmdline"] or [])
    assert "s3cret-7" not in shown + started.stdout + started.stderr
    assert b"s3cret-7" not in server.log_bytes(Host(sshd.ssh()), port)
    assert _run(sshd, "stop", environment=own).returncode == 0
    assert not over_there.exists()


def test_a_second_serve_adopts_the_server_and_another_wish_is_refused(
    sshd: Sshd, build_patched: Build, pair: tuple[Path, Path], port: int
) -> None:
    first = RemoteServer(made_ready(sshd, build_patched, pair, port)).start()
    first.close()
    second = RemoteServer(made_ready(sshd, build_patched, pair, port)).start()
    try:
        assert second.adopted and second.report()["pid"] == first.report()["pid"] and second.proof
        third = RemoteServer(made_ready(sshd, build_patched, pair, port, context="2048"))
        with pytest.raises(DflashError, match="-c is 1024 there, 2048 wanted"):
            third.start()
        assert second.client().complete(PROMPT, n_predict=4)
    finally:
        second.stop()


@pytest.mark.parametrize("victim", ["ssh", "sshd"])
def test_a_link_cut_in_mid_stream_loses_no_answer_unnoticed(
    sshd: Sshd, build_patched: Build, pair: tuple[Path, Path], port: int, victim: str
) -> None:
    # how many rows go together must not go by the clock where two texts are compared
    fixed = "--no-spec-draft-adaptive"
    with RemoteServer(made_ready(sshd, build_patched, pair, port, fixed)) as served:
        asked = {"n_predict": 400, "temperature": 0, "ignore_eos": True}
        reference = served.client().complete(PROMPT, **asked)
        stream = served.client(retries=0).complete(PROMPT, True, **asked)
        text = ""
        with pytest.raises(ClientError):
            for index, piece in enumerate(stream):
                text += piece.text
                if index == 3:
                    if victim == "ssh":
                        assert sshd.kill_clients()
                    else:
                        assert sshd.signal_sessions(signal.SIGKILL)
        assert text and reference.text.startswith(text) and len(text) < len(reference.text)
        served.tunnel.wait_ready(60)
        again = served.client().complete(PROMPT, **asked)
        assert again.text == reference.text
        assert served.failure() is None
        whole = server.log_bytes(Host(sshd.ssh()), port)
        assert eventually(lambda: served.log.read_bytes().startswith(whole)), "the log lost or doubled lines"


def test_a_killed_server_is_told_with_its_reason_and_restarted_when_asked(
    sshd: Sshd, build_patched: Build, pair: tuple[Path, Path], port: int
) -> None:
    served = RemoteServer(made_ready(sshd, build_patched, pair, port)).start()
    said: list[str] = []
    try:
        pid = served.report()["pid"]
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(DflashError, match=r"SIGKILL|killed|signal 9"):
            served.watch()
        assert eventually(lambda: served.tunnel.report.state == tunnel.NOTHING)
        threading.Thread(target=_watched, args=(served, said), daemon=True).start()
        assert eventually(lambda: any("up again" in text for text in said), 90), said
        assert served.client().complete(PROMPT, n_predict=4) and served.report()["pid"] != pid
    finally:
        served.stop()


def _watched(served: RemoteServer, said: list[str]) -> None:
    try:
        served.watch(restart=True, say=said.append)
    except DflashError as error:
        said.append(error.message)


def test_a_frozen_server_is_half_open_and_can_still_be_stopped(
    sshd: Sshd, build_patched: Build, pair: tuple[Path, Path], port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tunnel, "_PROBE_SECONDS", 1.0)
    served = RemoteServer(made_ready(sshd, build_patched, pair, port)).start()
    process = psutil.Process(served.report()["pid"])
    process.suspend()
    assert eventually(lambda: served.tunnel.report.state == tunnel.HALF_OPEN)
    process.resume()
    served.tunnel.wait_ready(60)
    process.suspend()
    served.stop()
    assert not psutil.pid_exists(process.pid)


def test_a_taken_remote_port_is_said_and_nothing_is_left(
    sshd: Sshd, build_patched: Build, pair: tuple[Path, Path], port: int
) -> None:
    with socket.create_server(("127.0.0.1", port)), pytest.raises(DflashError, match=f"{port}") as caught:
        RemoteServer(made_ready(sshd, build_patched, pair, port)).start()
    assert "far" in caught.value.message
    assert not mentioning(f"--port {port}")


def test_a_target_that_cannot_be_loaded_is_said_with_its_cause(
    sshd: Sshd, build_patched: Build, pair: tuple[Path, Path], port: int, tmp_path: Path
) -> None:
    short = tmp_path / "short.gguf"
    shutil.copy(pair[0], short)
    os.truncate(short, short.stat().st_size - 30_000_000)
    with pytest.raises(DflashError, match=r"bytes|truncated|cut|incomplete|ends"):
        RemoteServer(made_ready(sshd, build_patched, (short, pair[1]), port)).start()
    assert not mentioning(f"--port {port}")


def test_files_that_are_missing_or_unfit_are_said_before_anything_starts(
    sshd: Sshd, build_patched: Build, pair: tuple[Path, Path], port: int
) -> None:
    with pytest.raises(DflashError, match="far has no"):
        made_ready(sshd, build_patched, (Path("/nowhere/x.gguf"), pair[1]), port)
    with pytest.raises(DflashError, match="drafter"):
        made_ready(sshd, build_patched, (pair[1], pair[1]), port)
    with pytest.raises(DflashError, match="frobnicate"):
        made_ready(sshd, build_patched, pair, port, "--frobnicate")


def test_a_drafter_is_pushed_over_a_link_that_breaks(
    sshd: Sshd, pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "backoff", lambda attempt: 0.3)
    local, goal = pair[0], sshd.home / "pushed over" / pair[0].name
    done = threading.Event()

    def arrived() -> int:
        return sum(one.stat().st_size for one in goal.parent.glob(".*.part"))

    def cut() -> None:
        for _ in range(3):
            before = arrived()
            eventually(lambda before=before: done.is_set() or arrived() > before + (4 << 20))
            if not done.is_set():
                sshd.signal_sessions(signal.SIGKILL)

    cutter = threading.Thread(target=cut)
    cutter.start()
    files.push(Host(sshd.ssh()), local, str(goal))
    done.set()
    cutter.join()
    assert goal.stat().st_size == local.stat().st_size
    assert files.digest(Host(sshd.ssh()), str(goal)) == pairs.file_sha256(local)
    assert [one.name for one in goal.parent.iterdir()] == [goal.name]
    goal.unlink()


def test_a_disk_that_fills_up_over_there_is_said_and_the_push_goes_on_later(
    sshd: Sshd, pair: tuple[Path, Path], tmp_path: Path
) -> None:
    small = tmp_path / "small"
    small.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", small], capture_output=True
    ).returncode:
        pytest.skip("tmpfs cannot be mounted here")
    try:
        filler, goal = small / "filler", small / "drafter.gguf"
        with pytest.raises(DflashError, match="MiB free"):
            files.push(Host(sshd.ssh()), pair[0], str(goal))
        with pytest.raises(DflashError, match=r"cannot be written.*No space left|MiB free"):
            files.push(Host(sshd.ssh()), pair[1], str(goal), _FillMeanwhile(filler))
        assert filler.exists()
        assert not goal.exists()
        filler.unlink()
        files.push(Host(sshd.ssh()), pair[1], str(goal))
        assert goal.stat().st_size == pair[1].stat().st_size
    finally:
        subprocess.run(["umount", small], check=True)


class _FillMeanwhile(Progress, Task):
    """Takes the room away after the first block of a copy."""

    def __init__(self, filler: Path) -> None:
        self.filler = filler

    def task(self, label: str, total: int | None = None, unit: str = "steps") -> Task:
        return self if label.startswith("copying") else Task()

    def advance(self, amount: int = 1) -> None:
        if amount and not self.filler.exists():
            subprocess.run(f"cat /dev/zero > '{self.filler}'", shell=True, capture_output=True)


# -- the commands ----------------------------------------------------------------------------------------


def _run(
    sshd: Sshd, *words: str, environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    config = sshd.ssh().options[1]
    command = [sys.executable, "-m", "dflashcpp", *words, "--ssh", "far", "--ssh-config", config]
    own = {**os.environ, **(environment or {})}
    return subprocess.run(
        command, capture_output=True, text=True, timeout=240, env=own, stdin=subprocess.DEVNULL
    )


def test_the_commands_do_it_all(sshd: Sshd, build_patched: Build, pair: tuple[Path, Path], port: int) -> None:
    words = ["-m", str(pair[0]), "-md", str(pair[1]), "-t", "1", "-c", "1024", "--port", "0"]
    words += ["--remote-port", str(port), "--remote-server", str(build_patched.binary("llama-server"))]
    words.append("--no-spec-draft-adaptive")  # how much is drafted then depends on the machine
    planned = _run(sshd, "serve", *words, "--dry-run", "--json")
    told = json.loads(planned.stdout)
    assert told["tunnel"][0] == "ssh" and "draft-dflash" in told["argv"] and not mentioning(f"--port {port}")
    started = _run(sshd, "serve", *words, "--detach", "--json")
    assert started.returncode == 0, started.stderr
    told = json.loads(started.stdout)
    assert told["proof"]["drafted"] > 0 and told["plan"]["fits"] and told["host"] == "far"
    listed = json.loads(_run(sshd, "status", "--json").stdout)["servers"]
    assert [one["pid"] for one in listed if one["running"]] == [told["pid"]]
    answered = _run(sshd, "chat", "Say hi", "-n", "8", "--temp", "0", "--remote-port", str(port), "--json")
    assert json.loads(answered.stdout)["timings"]["predicted_n"] == 8, answered.stderr
    checked = _run(sshd, "doctor", "--remote-port", str(port), "--port", str(free_port()), "--json")
    states = {one["name"]: one["state"] for one in json.loads(checked.stdout)["checks"]}
    asked = ("answers", "drafting", "two requests", "json schema")
    assert [states[name] for name in asked] == ["ok"] * 4, checked.stdout
    assert "slots are idle" in _run(sshd, "logs", "-n", "5", "--remote-port", str(port)).stdout
    assert json.loads(_run(sshd, "stop", "--remote-port", str(port), "--json").stdout)["stopped"]
    assert not psutil.pid_exists(told["pid"])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_the_command_ends_its_server_when_it_is_ended(
    sshd: Sshd, build_patched: Build, pair: tuple[Path, Path], port: int, number: signal.Signals
) -> None:
    config = sshd.ssh().options[1]
    words = [
        "serve",
        "-m",
        str(pair[0]),
        "-md",
        str(pair[1]),
        "-t",
        "1",
        "-c",
        "1024",
        "--port",
        "0",
        "--json",
    ]
    words += ["--remote-port", str(port), "--remote-server", str(build_patched.binary("llama-server"))]
    command = [sys.executable, "-m", "dflashcpp", *words, "--ssh", "far", "--ssh-config", config]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    told = json.loads(process.stdout.readline())
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 0 and "was ended" in err
    assert not psutil.pid_exists(told["pid"])
