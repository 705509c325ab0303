"""Scripts, files and servers on a far side that is this machine behind S3, the fake ssh."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from dflashcpp.errors import DflashError
from dflashcpp.progress import Progress, Task
from dflashcpp.remote import command, files, host, server
from dflashcpp.remote.command import Ssh
from dflashcpp.remote.faults import FaultError
from dflashcpp.remote.host import Host
from tests.support.fake_ssh import FakeSsh

NASTY = [
    "plain",
    "two words",
    "it's",
    'a "quote"',
    "$HOME `id` $(id)",
    "line\nbreak",
    "*",
    "-n",
    "\\",
    "ü\t!",
    "",
]


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSsh:
    made = FakeSsh(tmp_path / "fake bin", motd="Welcome to far!\nrunning=maybe\nhave=7")
    monkeypatch.setenv("PATH", f"{made.folder}:{os.environ['PATH']}")
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    monkeypatch.setenv("DFLASHCPP_CACHE", str(tmp_path / "cache"))
    return made


@pytest.fixture
def far(fake: FakeSsh, monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    monkeypatch.setattr(files, "backoff", lambda attempt: 0.01)
    monkeypatch.setattr(server, "backoff", lambda attempt: 0.05)
    made = Host(Ssh("far"))
    yield made
    for found in server.servers(made):
        server.stop(made, found.port, 1)


@pytest.fixture
def own_script(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """Give a script of the test's own, under the name it returns."""
    texts: dict[str, str] = {}
    real = host.script
    monkeypatch.setattr(host, "script", lambda name: texts.get(name) or real(name))

    def add(text: str) -> str:
        texts[f"own{len(texts)}"] = text
        return f"own{len(texts) - 1}"

    return add


def _eventually(condition: Callable[[], bool], seconds: float = 10.0) -> bool:
    until = time.monotonic() + seconds
    while not condition() and time.monotonic() < until:
        time.sleep(0.05)
    return condition()


def _named(word: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        if word in " ".join(process.info["cmdline"] or []) and process.info["status"] != psutil.STATUS_ZOMBIE:
            found.append(process)
    return found


def _home_of(process: psutil.Process) -> Path | None:
    """Where it was started: what runs for a test starts in that test's home, a stranger's does not."""
    try:
        return Path(process.cwd())
    except psutil.Error:
        return None


# -- scripts -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("shell", ["dash", "bash", "busybox", "zsh"])
def test_arguments_arrive_as_they_are(
    far: Host, fake: FakeSsh, own_script: Callable[[str], str], shell: str
) -> None:
    path = shutil.which(shell)
    if path is None:
        pytest.skip(f"{shell} is not installed here")
    (fake.folder / "sh").symlink_to(path)
    name = own_script("for word; do printf '%s\\0' \"$word\"; done")
    assert far.run(name, *NASTY).out == b"".join(word.encode() + b"\0" for word in NASTY)


def test_arguments_of_a_data_command_arrive_as_they_are(fake: FakeSsh) -> None:
    argv = command.data_argv(Ssh("far"), "for word; do printf '%s\\0' \"$word\"; done", NASTY)
    done = subprocess.run(argv, capture_output=True, check=True)
    assert done.stdout.partition(b"have=7\n")[2] == b"".join(word.encode() + b"\0" for word in NASTY)


def test_what_the_login_shell_prints_is_no_answer(far: Host, own_script: Callable[[str], str]) -> None:
    assert far.run(own_script("echo running=yes")).values() == {"running": "yes"}


def test_status_and_last_words_come_back(far: Host, own_script: Callable[[str], str]) -> None:
    outcome = far.run(own_script("echo first >&2; echo 'no room' >&2; exit 255"))
    assert (outcome.status, outcome.last_words) == (255, "no room")
    with pytest.raises(DflashError, match="far: no room"):
        far.ask(own_script("echo no room >&2; exit 3"))


def test_any_bytes_pass_through_in_order(far: Host, own_script: Callable[[str], str]) -> None:
    name = own_script(
        "i=0; while [ $i -lt 300 ]; do printf '\\n\\ndflashcpp-%s end 0\\n\\0' $i; i=$((i+1)); done"
    )
    pieces: list[bytes] = []
    assert far.run(name, sink=pieces.append).status == 0
    assert b"".join(pieces) == b"".join(b"\n\ndflashcpp-%d end 0\n\0" % i for i in range(300))


def test_an_end_mark_that_arrives_in_pieces_is_never_passed_on() -> None:
    end = b"dflashcpp-d0dd end "
    for text in (b"", b"some d", b"dflashcpp-d0dd en", b"\n"):
        for count in range(len(end)):
            held = host._held_back(text + end[:count], end)
            assert held >= count and end.startswith((text + end[:count])[len(text) + count - held :])
    assert host._held_back(b"line\n", end) == 0


def test_a_script_that_hangs_ends_with_our_patience(far: Host, own_script: Callable[[str], str]) -> None:
    with pytest.raises(DflashError, match="did not answer within 1 s"):
        far.run(own_script("exec sleep 4711.25"), timeout=1.0)
    assert _eventually(lambda: not _named("sleep 4711.25"))


def test_a_script_on_the_far_side_ends_when_our_end_is_killed(fake: FakeSsh, tmp_path: Path) -> None:
    code = (
        "from dflashcpp.remote import host; from dflashcpp.remote.command import Ssh\n"
        "host.script = lambda name: 'exec sleep 4712' + '.25'\n"
        "host.Host(Ssh('far')).run('x', timeout=None)"
    )
    process = subprocess.Popen([sys.executable, "-c", code], env=fake.environment())
    assert _eventually(lambda: bool(_named("sleep 4712.25")))
    process.kill()
    process.wait()
    assert _eventually(lambda: not _named("sleep 4712.25"))


@pytest.mark.parametrize(
    ("refusal", "state"), [("denied", "authentication"), ("timeout", "host unreachable")]
)
def test_a_fault_of_the_connection_is_told_as_one(fake: FakeSsh, far: Host, refusal: str, state: str) -> None:
    fake.set(refusal)
    with pytest.raises(FaultError, match=state):
        far.facts()
    fake.set("relay")


def test_facts_tell_system_disk_and_gpus(fake: FakeSsh, far: Host, tmp_path: Path) -> None:
    smi = fake.folder / "nvidia-smi"
    smi.write_text("#!/bin/sh\necho '0, NVIDIA RTX A4000, 16376, 15990, 580.65.06'\necho 'odd line'\n")
    smi.chmod(0o755)
    facts = far.facts()
    assert facts.home == str(fake.home) and "Linux" in facts.system and facts.free_disk
    assert facts.gpus == (host.Gpu(0, "NVIDIA RTX A4000", 16376, 15990, "580.65.06"),)
    assert facts.gpu_problem == "odd line"


# -- files -------------------------------------------------------------------------------------------


class Seen(Progress):
    """Adds up what a copy tells."""

    def __init__(self) -> None:
        self.bytes = 0

    def task(self, label: str, total: int | None = None, unit: str = "steps") -> Task:
        seen = self

        class Counting(Task):
            def advance(self, amount: int = 1) -> None:
                seen.bytes += amount if unit == "bytes" and label.startswith("copying") else 0

        return Counting()


@pytest.fixture
def payload(tmp_path: Path) -> Path:
    path = tmp_path / "a drafter $x.gguf"
    path.write_bytes(os.urandom(5_300_000))
    return path


def test_push_makes_the_same_bytes_and_tells_how_many(far: Host, fake: FakeSsh, payload: Path) -> None:
    seen = Seen()
    target = fake.home / "it's a folder" / payload.name
    pushed = files.push(far, payload, str(target), seen)
    assert target.read_bytes() == payload.read_bytes() and pushed.size == 5_300_000 == seen.bytes
    assert [path.name for path in target.parent.iterdir()] == [payload.name]


def test_a_broken_push_goes_on_where_it_stopped(far: Host, fake: FakeSsh, payload: Path) -> None:
    fake.set("relay", cut_stdin=1_500_000)
    seen = Seen()
    files.push(far, payload, str(fake.home / "x.gguf"), seen)
    assert (fake.home / "x.gguf").read_bytes() == payload.read_bytes() and seen.bytes == 5_300_000
    sends = [call for call in fake.calls() if "dd of=" in call[-1]]
    assert len(sends) == 5  # 1.5 MB each from a whole MiB on: four breaks, and the rest


def test_a_push_that_never_gets_on_gives_up_and_keeps_what_arrived(
    far: Host, fake: FakeSsh, payload: Path
) -> None:
    fake.set("relay", cut_stdin=1000)
    with pytest.raises(FaultError, match="connection lost"):
        files.push(far, payload, str(fake.home / "x.gguf"))
    (part,) = fake.home.glob(".x.gguf.*.part")
    assert part.stat().st_size == 1000 and not (fake.home / "x.gguf").exists()
    fake.set("relay")
    files.push(far, payload, str(fake.home / "x.gguf"))
    assert not part.exists() and (fake.home / "x.gguf").stat().st_size == 5_300_000


def test_a_file_that_is_there_already_is_not_sent(far: Host, fake: FakeSsh, payload: Path) -> None:
    (fake.home / "x.gguf").write_bytes(payload.read_bytes())
    files.push(far, payload, str(fake.home / "x.gguf"))
    assert not [call for call in fake.calls() if "dd of=" in call[-1]]


def test_another_file_of_the_same_size_is_replaced(far: Host, fake: FakeSsh, payload: Path) -> None:
    (fake.home / "x.gguf").write_bytes(bytes(5_300_000))
    files.push(far, payload, str(fake.home / "x.gguf"))
    assert (fake.home / "x.gguf").read_bytes() == payload.read_bytes()


def test_a_damaged_partial_file_is_found_out_and_removed(far: Host, fake: FakeSsh, payload: Path) -> None:
    digest = hashlib.sha256(payload.read_bytes()).hexdigest()
    part = fake.home / f".x.gguf.{digest[:16]}.part"
    part.write_bytes(bytes(2_000_000))
    with pytest.raises(DflashError, match="another sha256"):
        files.push(far, payload, str(fake.home / "x.gguf"))
    assert not part.exists() and not (fake.home / "x.gguf").exists()


def test_no_room_over_there_is_said_before_anything_is_sent(far: Host, fake: FakeSsh, payload: Path) -> None:
    df = fake.folder / "df"
    df.write_text("#!/bin/sh\necho head\necho '/dev/x 1 1 1024 99% /'\n")
    df.chmod(0o755)
    with pytest.raises(DflashError, match=r"has 1 MiB free.*needs 5 MiB"):
        files.push(far, payload, str(fake.home / "x.gguf"))


def test_a_digest_is_remembered_until_the_file_changes(far: Host, fake: FakeSsh, payload: Path) -> None:
    path = fake.home / "y"
    path.write_bytes(b"one")
    assert files.digest(far, str(path)) == hashlib.sha256(b"one").hexdigest()
    (note,) = (fake.home / ".local/state/dflashcpp/digests").iterdir()
    note.write_text(note.read_text().replace(hashlib.sha256(b"one").hexdigest(), "remembered"))
    assert files.digest(far, str(path)) == "remembered"
    path.write_bytes(b"three")
    assert files.digest(far, str(path)) == hashlib.sha256(b"three").hexdigest()


def test_looking_tells_missing_folder_and_size_apart(far: Host, fake: FakeSsh) -> None:
    (fake.home / "f f").write_bytes(b"12345")
    found = files.look(far, str(fake.home / "f f"))
    assert found is not None and found.size == 5
    assert files.look(far, str(fake.home / "none")) is None
    with pytest.raises(DflashError, match="folder"):
        files.look(far, str(fake.home))


def test_paths_over_there_are_below_home_unless_absolute() -> None:
    assert files.absolute("~/m/x", "/home/u") == files.absolute("m/x", "/home/u") == "/home/u/m/x"
    assert files.absolute("/m", "/home/u") == "/m" and files.absolute("~", "/h") == "/h"


# -- servers -----------------------------------------------------------------------------------------


def _program(folder: Path, text: str) -> str:
    path = folder / "a server.sh"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def _facts(*work: str) -> dict[str, object]:
    return {"work": list(work), "alias": "it's $x"}


def test_a_started_server_is_known_logged_and_stopped(far: Host, fake: FakeSsh) -> None:
    program = _program(fake.home, 'printf "%s\\n" "$@"; exec sleep 4713.25')
    argv = [program, *NASTY]
    started, adopted = server.start(far, 9001, argv, _facts("a"))
    assert not adopted and started.running and started.argv == argv and started.facts["alias"] == "it's $x"
    assert started.pid is not None and psutil.Process(started.pid).cmdline()[-1] == "4713.25"
    assert _eventually(lambda: server.log_text(far, 9001) == "".join(f"{word}\n" for word in NASTY))
    assert server.only(far).pid == started.pid
    stopped = server.stop(far, 9001)
    assert stopped is not None and stopped.running and stopped.returncode == -signal.SIGTERM
    assert not psutil.pid_exists(started.pid) and not _named("dflashcpp-wait")
    again = server.stop(far, 9001)
    assert again is not None and not again.running


def test_a_second_start_adopts_the_same_and_names_what_differs(far: Host, fake: FakeSsh) -> None:
    program = _program(fake.home, "exec sleep 4714.25")
    work = [program, "-c", "4096", "--jinja"]
    first, _ = server.start(far, 9001, work, _facts(*work))
    second, adopted = server.start(far, 9001, work, _facts(*work))
    assert adopted and second.pid == first.pid
    other = [program, "-c", "8192", "-fa", "on"]
    with pytest.raises(
        DflashError, match=r"-c is 4096 there, 8192 wanted.*--jinja is set there.*-fa is absent"
    ):
        server.start(far, 9001, other, _facts(*other))


def test_two_starts_at_once_make_one_server(far: Host, fake: FakeSsh) -> None:
    work = [_program(fake.home, "exec sleep 4715.25")]
    found: list[tuple[server.RemoteProcess, bool]] = []
    threads = [
        threading.Thread(target=lambda: found.append(server.start(far, 9001, work, _facts(*work))))
        for _ in range(3)
    ]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert len({one.pid for one, _ in found}) == 1 and sorted(adopted for _, adopted in found) == [
        False,
        True,
        True,
    ]


def test_a_server_that_ends_at_once_leaves_its_reason(far: Host, fake: FakeSsh) -> None:
    started, _ = server.start(far, 9001, [_program(fake.home, "echo broken >&2; exit 3")], _facts())
    assert _eventually(lambda: not server.status(far, 9001).running)  # type: ignore[union-attr]
    found = server.status(far, 9001)
    assert found is not None and found.returncode == 3 and "broken" in server.log_text(far, 9001)
    assert started.port == 9001


def test_a_program_that_is_not_there_is_said(far: Host) -> None:
    with pytest.raises(DflashError, match="is not there or is no program"):
        server.start(far, 9001, ["/nowhere/llama-server"], _facts())


def test_a_stranger_that_took_the_pid_is_never_touched(far: Host, fake: FakeSsh) -> None:
    server.start(far, 9001, [_program(fake.home, "exec sleep 4716.25")], _facts())
    server.stop(far, 9001)
    stranger = subprocess.Popen(["sleep", "4717.25"])
    try:
        folder = fake.home / ".local/state/dflashcpp/remote/9001"
        (folder / "pid").write_text(f"{stranger.pid}\nticks 1\n/usr/bin/sleep\n")
        found = server.stop(far, 9001)
        assert found is not None and not found.running and stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()


def test_a_frozen_server_is_ended_too(far: Host, fake: FakeSsh) -> None:
    started, _ = server.start(far, 9001, [_program(fake.home, "trap '' TERM; sleep 4718.25")], _facts())
    assert started.pid is not None
    os.kill(started.pid, signal.SIGSTOP)
    found = server.stop(far, 9001, 1)
    assert found is not None and found.returncode == -signal.SIGKILL
    [process.kill() for process in _named("sleep 4718.25")]


def test_a_full_disk_over_there_is_said_and_no_server_is_left(
    far: Host, fake: FakeSsh, tmp_path: Path
) -> None:
    small = tmp_path / "small disk"
    small.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", small], capture_output=True
    ).returncode:
        pytest.skip("tmpfs cannot be mounted here")
    try:
        fake.set("relay", environment={"XDG_STATE_HOME": str(small)})
        far.run("status", "1")
        subprocess.run(f"cat /dev/zero > '{small}/filler'", shell=True, capture_output=True)
        with pytest.raises(
            DflashError, match=r"nothing can be written|No space left|cannot be made"
        ) as caught:
            server.start(far, 9001, [_program(fake.home, "exec sleep 4719.25")], _facts())
        assert "df -h" in (caught.value.hint or "")
        assert not _named("sleep 4719.25")
    finally:
        fake.set("relay")
        subprocess.run(["umount", small], check=True)


def test_the_log_is_followed_over_broken_links_to_the_servers_end(far: Host, fake: FakeSsh) -> None:
    text = 'i=0; while [ $i -lt 40 ]; do echo "line $i"; i=$((i+1)); sleep 0.1; done; kill -9 $$'
    server.start(far, 9001, [_program(fake.home, text)], _facts())
    pieces: list[bytes] = []
    stream = server.LogStream(far, 9001, pieces.append).start()
    cut = 0
    while cut < 3 and not stream.ended.is_set():
        time.sleep(0.5)
        for process in psutil.Process().children():
            if _home_of(process) == fake.home:
                process.kill()
                cut += 1
    assert cut
    assert stream.ended.wait(20)
    assert b"".join(pieces).decode().splitlines() == [f"line {i}" for i in range(40)]
    assert stream.process is not None and stream.process.returncode == -signal.SIGKILL
    stream.close()
    assert _eventually(lambda: not [one for one in _named("tail") if _home_of(one) == fake.home])


def test_a_start_that_is_given_up_leaves_no_server_and_no_lock(far: Host, fake: FakeSsh) -> None:
    """Ctrl-C while the far side starts: the leash breaks before anybody knows the server."""
    program = _program(fake.home, "exec sleep 4719.25")
    slow = fake.home / ".bin"
    slow.mkdir()
    (slow / "readlink").write_text(
        "#!/bin/sh\nsleep 1\necho same\n"
    )  # holds the script up once it has forked
    (slow / "readlink").chmod(0o755)
    fake.set("relay", environment={"PATH": f"{slow}:{os.environ['PATH']}"})
    stop = threading.Event()

    def begin() -> None:
        with contextlib.suppress(DflashError):
            far.run("start", "9001", "{}", program, stop=stop)

    starting = threading.Thread(target=begin)
    starting.start()
    assert _eventually(lambda: bool(_named("4719.25")))
    stop.set()
    starting.join()
    assert _eventually(lambda: not _named("4719.25") and not _named("dflashcpp-wait"))
    state = fake.home / ".local/state/dflashcpp/remote/9001"
    assert _eventually(lambda: not (state / "lock").exists())
    assert not (state / "pid").exists()


def test_following_a_log_ends_with_the_fault_that_nothing_can_mend(far: Host, fake: FakeSsh) -> None:
    fake.set("denied")
    stream = server.LogStream(far, 9001, lambda piece: None).start()
    with pytest.raises(DflashError, match="authentication"):
        stream.wait()
    fake.set("relay")
