"""`serve` and its relatives when they are told to end at odd moments: a terminal that closes, a long wait."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dflashcpp.server.process import Identity
from tests.support import checkpoints
from tests.support import fake_llama_server as fake


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.write_target(tmp_path_factory.mktemp("a target") / "target.gguf")


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    own = {"DFLASHCPP_CACHE": str(tmp_path / "a cache"), "DFLASHCPP_CONFIG": str(tmp_path / "config.toml")}
    return {**os.environ, **own}


def serve(target: Path, program: Path, *words: str) -> list[str]:
    command = [sys.executable, "-m", "dflashcpp", "serve", "--build", str(program), "-m", str(target)]
    return [*command, "--port", "0", *words]


def noted(tmp_path: Path) -> Identity | None:
    for path in (tmp_path / "a cache" / "state" / "servers").glob("*/server.json"):
        return Identity(**json.loads(path.read_text())["process"])
    return None


def eventually(what: object, seconds: float = 30.0) -> bool:
    until = time.monotonic() + seconds
    while not what() and time.monotonic() < until:  # type: ignore[operator]
        time.sleep(0.05)
    return bool(what())  # type: ignore[operator]


def test_a_terminal_that_closes_ends_the_server(
    tmp_path: Path, target: Path, environment: dict[str, str]
) -> None:
    program = fake.make(tmp_path / "a build")
    pid, terminal = pty.fork()
    if pid == 0:
        os.execve(sys.executable, serve(target, program), environment)
    try:
        said = b""
        while b"ready: " not in said:
            said += os.read(terminal, 4096)
        child = noted(tmp_path)
        assert child is not None and child.alive()
    finally:
        os.close(terminal)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) in (0, 1)
    assert eventually(lambda: not child.alive())


@pytest.mark.parametrize("words", [(), ("--detach",)])
def test_being_told_to_end_while_the_model_loads_leaves_nothing(
    tmp_path: Path, target: Path, environment: dict[str, str], words: tuple[str, ...]
) -> None:
    program = fake.make(tmp_path / "slow", health=[503] * 10000)
    process = subprocess.Popen(
        serve(target, program, *words), env=environment, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    assert eventually(lambda: noted(tmp_path) is not None)
    child = noted(tmp_path)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 130
    assert b"Traceback" not in errors
    assert child is not None and eventually(lambda: not child.alive())


def test_a_server_that_dies_later_does_not_add_a_second_object(
    tmp_path: Path, target: Path, environment: dict[str, str]
) -> None:
    program = fake.make(tmp_path / "a build")
    process = subprocess.Popen(
        serve(target, program, "--json"),
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    first = json.loads(process.stdout.readline())
    assert {"url", "pid", "spec_type", "memory", "argv"} <= set(first)
    os.kill(first["pid"], signal.SIGKILL)
    rest, errors = process.communicate(timeout=30)
    assert process.returncode == 1
    assert rest == b""
    assert b"killed (SIGKILL)" in errors
    taken = subprocess.run(
        serve(target, program, "--dry-run", "--json"), env=environment, capture_output=True, check=True
    )
    assert len(taken.stdout.splitlines()) == 1


def test_a_second_start_on_the_port_is_refused_while_the_first_runs(
    tmp_path: Path, target: Path, environment: dict[str, str]
) -> None:
    program = fake.make(tmp_path / "a build", starts=str(tmp_path / "starts"))
    first = subprocess.Popen(
        serve(target, program, "--json"), env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE
    )
    assert first.stdout is not None
    told = json.loads(first.stdout.readline())
    port = told["url"].rsplit(":", 1)[1]
    again = subprocess.run(
        serve(target, program, "--port", port, "--json"), env=environment, capture_output=True, text=True
    )
    assert again.returncode == 1
    assert f"port {port} on 127.0.0.1 is taken" in json.loads(again.stdout)["error"]
    assert len(fake.starts(tmp_path / "starts")) == 1
    assert Identity.of(told["pid"]) is not None
    ended = subprocess.run(
        [sys.executable, "-m", "dflashcpp", "stop", "--port", port, "--json"],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stderr  # the refused start has left the note of the first alone
    assert Identity.of(told["pid"]) is None
    first.communicate(timeout=30)
    assert first.returncode == 0
