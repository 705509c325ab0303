from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from dflashcpp.errors import DflashError
from dflashcpp.server import logs, ports
from dflashcpp.server.process import Child, Identity, read_pidfile, write_pidfile


def eventually(what: Callable[[], bool], seconds: float = 10.0) -> bool:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if what():
            return True
        time.sleep(0.02)
    return what()


def sleeper(tmp_path: Path, code: str = "import time; time.sleep(600)") -> Child:
    child = Child([sys.executable, "-c", code], tmp_path / "a log")
    child.start()
    return child


def test_a_child_has_a_session_of_its_own_and_writes_its_log(tmp_path: Path) -> None:
    child = sleeper(
        tmp_path,
        "import os, time; os.write(1, b'out '); os.write(2, b'err '); time.sleep(600)",
    )
    try:
        assert os.getsid(child.pid) == child.pid != os.getsid(0)
        assert eventually(lambda: set((tmp_path / "a log").read_text().split()) == {"out", "err"})
        assert child.identity is not None
        assert child.identity.alive()
    finally:
        assert child.stop() == -signal.SIGTERM


def test_a_program_that_cannot_be_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(DflashError, match="no such program cannot be run"):
        Child([str(tmp_path / "no such program")], tmp_path / "log").start()


def test_a_child_that_does_not_listen_is_killed_after_the_grace(tmp_path: Path) -> None:
    child = sleeper(
        tmp_path,
        "import signal, time; signal.signal(15, signal.SIG_IGN); print(1, flush=True); time.sleep(600)",
    )
    assert eventually(lambda: (tmp_path / "a log").read_text() != "")
    assert child.stop(grace=0.2) == -signal.SIGKILL


def test_a_frozen_child_is_ended_too(tmp_path: Path) -> None:
    child = sleeper(tmp_path)
    os.kill(child.pid, signal.SIGSTOP)
    assert child.stop(grace=5) == -signal.SIGTERM


def test_what_the_child_started_ends_with_it(tmp_path: Path) -> None:
    inner = "import time; time.sleep(600)"
    code = f"""
import subprocess, sys
inner = subprocess.Popen([sys.executable, "-c", "{inner}"])
print(inner.pid, flush=True)
inner.wait()
"""
    child = sleeper(tmp_path, code)
    assert eventually(lambda: (tmp_path / "a log").read_text().strip().isdigit())
    grandchild = Identity.of(int((tmp_path / "a log").read_text()))
    assert grandchild is not None
    child.stop()
    assert eventually(lambda: not grandchild.alive())


def test_stopping_twice_or_before_the_start_is_harmless(tmp_path: Path) -> None:
    assert Child(["x"], tmp_path / "log").stop() is None
    child = sleeper(tmp_path)
    assert child.stop() == child.stop() == -signal.SIGTERM


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="prctl is Linux")
@pytest.mark.parametrize("from_thread", [False, True])
def test_the_child_dies_when_its_parent_is_killed_but_not_with_the_thread_that_started_it(
    tmp_path: Path, from_thread: bool
) -> None:
    script = tmp_path / "parent.py"
    script.write_text(
        textwrap.dedent(
            f"""
            import sys, threading, time
            from pathlib import Path
            from dflashcpp.server.process import Child
            log = Path({str(tmp_path / "log")!r})
            child = Child([sys.executable, "-c", "import time; time.sleep(600)"], log)
            if {from_thread}:
                thread = threading.Thread(target=child.start)
                thread.start()
                thread.join()
                time.sleep(0.5)
            else:
                child.start()
            print(child.pid, child.returncode, flush=True)
            time.sleep(600)
            """
        )
    )
    parent = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid, code = parent.stdout.readline().split()
    child = Identity.of(int(pid))
    assert (child is not None, code) == (True, "None")
    parent.kill()
    parent.wait()
    assert child is not None
    assert eventually(lambda: not child.alive())


def test_an_interpreter_that_ends_without_stopping_takes_its_child_along(tmp_path: Path) -> None:
    code = f"""
import sys
from pathlib import Path
from dflashcpp.server.process import Child
child = Child([sys.executable, "-c", "import time; time.sleep(600)"], Path({str(tmp_path / "log")!r}))
child.start()
print(child.pid)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert eventually(lambda: Identity.of(int(done.stdout)) is None)


# -- identity and pidfiles -------------------------------------------------------------------------


def test_a_pid_that_was_used_again_is_another_process_and_is_never_signalled(tmp_path: Path) -> None:
    child = sleeper(tmp_path)
    try:
        assert child.identity is not None
        foreign = Identity(child.pid, "ticks 1", child.identity.exe)
        other_program = Identity(child.pid, child.identity.started, "/usr/bin/other")
        for one in (foreign, other_program):
            assert not one.alive()
            assert one.send(signal.SIGKILL) is False
        assert child.returncode is None
    finally:
        child.stop()


def test_a_process_that_is_gone_or_a_zombie_has_no_identity() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    assert eventually(lambda: Identity.of(process.pid) is None)
    process.wait()
    assert Identity.of(process.pid) is None


def test_a_pidfile_keeps_who_and_what(tmp_path: Path) -> None:
    me = Identity.of_this()
    assert me is not None
    write_pidfile(tmp_path / "p.json", me, port=8001, model=Path("/a b"))
    found = read_pidfile(tmp_path / "p.json")
    assert found is not None
    assert found[0] == me
    assert found[1] == {"port": 8001, "model": "/a b"}
    assert (tmp_path / "p.json").stat().st_mode & 0o077 == 0
    assert list(tmp_path.iterdir()) == [tmp_path / "p.json"]


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "{}", '{"process": {"pid": 1}}', '{"process": 3}', "\x00"]
)
def test_a_pidfile_that_holds_something_else_is_none(tmp_path: Path, content: str) -> None:
    (tmp_path / "p.json").write_text(content)
    assert read_pidfile(tmp_path / "p.json") is None
    assert read_pidfile(tmp_path / "missing.json") is None


# -- ports -----------------------------------------------------------------------------------------


def test_a_port_in_use_is_told_with_its_holder() -> None:
    import socket

    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        with pytest.raises(
            DflashError, match=f"port {port} on 127.0.0.1 is taken by .*pid {os.getpid()}"
        ) as caught:
            ports.check_port("127.0.0.1", port)
        assert "--port" in str(caught.value.hint)
    ports.check_port("127.0.0.1", port)


@pytest.mark.parametrize(
    ("host", "port", "text"),
    [
        ("127.0.0.1", 0, "is no port"),
        ("127.0.0.1", 70000, "is no port"),
        ("203.0.113.7", 8080, "no address of this machine"),
        ("no.such.host.invalid", 8080, "no address"),
    ],
)
def test_an_address_that_cannot_be_listened_on_is_told(host: str, port: int, text: str) -> None:
    with pytest.raises(DflashError, match=text):
        ports.check_port(host, port)


# -- logs ------------------------------------------------------------------------------------------


def test_rotation_keeps_the_last_few(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    for number in range(6):
        log.write_text(str(number))
        logs.rotate(log, keep=3)
    assert [(tmp_path / f"server.log.{index}").read_text() for index in (1, 2, 3)] == ["5", "4", "3"]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "server.log.1",
        "server.log.2",
        "server.log.3",
    ]
    logs.rotate(log)


def test_a_live_log_is_cut_while_the_child_goes_on_writing_and_the_reader_goes_on_reading(
    tmp_path: Path,
) -> None:
    log = tmp_path / "server.log"
    code = "import time\nfor i in range(400): print('line', i, 'x' * 50, flush=True); time.sleep(0.005)"
    child = Child([sys.executable, "-c", code], log)
    child.start()
    seen, cut = [], 0
    for line in logs.follow(log, over=lambda: child.returncode is not None, every=0.005):
        seen.append(line)
        if len(seen) % 20 == 0:
            cut += logs.rotate_live(log, limit=4000)
    assert cut >= 2
    assert child.returncode == 0
    assert log.stat().st_size < 12000
    assert seen[0].startswith("line 0 ")
    assert seen[-1].startswith("line 399 ")
    assert len(seen) > 150  # lines that a cut took before they were read are gone, that is what a cut is


def test_a_small_log_is_left_alone(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    log.write_text("x")
    assert logs.rotate_live(log, limit=10) is False
    assert logs.rotate_live(tmp_path / "missing", limit=10) is False
