"""LlamaServer, its supervision and its pidfiles, with a fake llama-server (S1)."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dflashcpp.conversion import convert
from dflashcpp.errors import DflashError
from dflashcpp.server import LlamaServer, registry, supervise
from dflashcpp.server.ports import free_port
from dflashcpp.server.process import Identity, read_pidfile, write_pidfile
from tests.support import checkpoints
from tests.support import fake_llama_server as fake
from tests.support.fake_http import fake_server

pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("a pair")
    target = checkpoints.write_target(folder / "target.gguf")
    source = checkpoints.write_checkpoint(folder / "v1", checkpoints.t1())
    return target, convert(source, target=target, type="F16", output=folder / "draft.gguf").file


class Made:
    """Makes servers on a fake llama-server, and ends them after the test."""

    def __init__(self, folder: Path, pair: tuple[Path, Path]) -> None:
        self.folder, self.pair = folder, pair
        self.starts = folder / "starts"
        self.servers: list[LlamaServer] = []

    def __call__(
        self, *, draft: bool = True, options: dict[str, Any] | None = None, **plan: Any
    ) -> LlamaServer:
        program = fake.make(self.folder / "a build", starts=str(self.starts), **plan)
        target, drafter = self.pair
        server = LlamaServer(target, drafter if draft else None, build=program, **(options or {}))
        self.servers.append(server)
        return server


@pytest.fixture
def made(tmp_path: Path, pair: tuple[Path, Path]) -> Any:
    making = Made(tmp_path, pair)
    yield making
    for server in making.servers:
        server.stop(grace=1)


def wait_for(what: Callable[[], bool], seconds: float = 15.0) -> None:
    until = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < until, "it did not happen"
        time.sleep(0.02)


# -- ready, or why not -----------------------------------------------------------------------------


def test_a_server_is_ready_after_a_token_and_a_draft_and_ends_with_the_block(made: Made) -> None:
    with made(log=["I srv load_model: loading model"]) as server:
        assert server.proof is not None
        assert (server.proof.attached, server.proof.drafted, server.proof.accepted) == (True, 8, 4)
        assert server.client().chat("Hi").text == "Hello"
        noted = read_pidfile(server.pidfile)
        assert noted is not None
        assert (noted[0].pid, noted[1]["ready"]) == (server.pid, True)
    assert server.returncode == 0
    assert not server.pidfile.exists()
    assert fake.starts(made.starts)[0][:4] == [
        "--model",
        str(made.pair[0]),
        "--model-draft",
        str(made.pair[1]),
    ]


def test_loading_is_waited_for_as_long_as_it_shows_progress(made: Made) -> None:
    with made(health=[503] * 80 + [200], options={"stall": 3}) as server:
        assert server.client().health() == "ready"
    with made(log=["."] * 15, slow_log=0.3, options={"stall": 3}) as server:
        assert server.client().health() == "ready"


def test_silence_is_not_waited_for(made: Made) -> None:
    server = made(log=["I srv load_model: loading model 'x'"], then="hang", options={"stall": 3})
    with pytest.raises(DflashError, match=r"no sign of life for 3 s; its last line: I srv load_model"):
        server.start()
    assert server.returncode is not None


def test_a_frozen_server_is_silence_too(made: Made) -> None:
    server = made(health=[503] * 10000, options={"stall": 2.5})

    def freeze() -> None:
        wait_for(lambda: server._child is not None and server.client(retries=0).health() == "loading")
        os.kill(server.pid, signal.SIGSTOP)

    threading.Thread(target=freeze, daemon=True).start()
    with pytest.raises(DflashError, match="no sign of life"):
        server.start()
    assert server.returncode is not None


@pytest.mark.parametrize(
    ("plan", "text"),
    [
        (
            {
                "log": ["E ggml_aligned_malloc: insufficient memory (attempted to allocate 9.5 MB)"],
                "then": "exit 1",
            },
            "the machine has no 9.5 MB left",
        ),
        (
            {
                "log": ["vector::_M_range_check: __n (which is 1) >= this->size() (which is 1)"],
                "then": "exit 1",
            },
            "no device memory was left for the drafter",
        ),
        ({"then": "signal 11"}, "crashed .*SIGSEGV"),
        ({"then": "signal 9"}, "was killed"),
        ({"log": ["something new"], "then": "exit 3"}, "exit code 3.: something new"),
    ],
)
def test_a_server_that_dies_while_loading_is_explained(made: Made, plan: dict[str, Any], text: str) -> None:
    server = made(**plan)
    server.supervisor = Identity.of_this()
    with pytest.raises(DflashError, match=text) as caught:
        server.start()
    assert str(server.log) in str(caught.value.hint)
    assert not server.pidfile.exists()


def test_a_server_that_answers_health_and_dies_at_the_first_token_was_never_ready(made: Made) -> None:
    words = (
        'llama-graph.cpp:1384: GGML_ASSERT(t_layer_inp[il] != nullptr && "layer input tensor is null") failed'
    )
    with pytest.raises(DflashError, match="does not expose the layers"):
        made(die_at=1, death="signal 6", last_words=words).start()


def test_an_error_line_that_is_none_does_not_fail_the_start(made: Made) -> None:
    line = "E dflash requires ctx_other to be set (this warning is normal during memory fitting)"
    with made(log=[line]) as server:
        assert server.returncode is None


def test_a_drafter_that_is_not_attached_or_never_drafts_is_no_success(made: Made) -> None:
    with pytest.raises(DflashError, match="runs without the drafter"):
        made(speculative=False).start()
    with pytest.raises(DflashError, match="made no draft"):
        made(drafted=0).start()


def test_a_server_without_a_drafter_needs_no_proof(made: Made) -> None:
    with made(draft=False) as server:
        assert server.proof is None
        assert server.report()["spec_type"] == "none"


def test_another_program_on_the_port_is_not_taken_for_ours(made: Made) -> None:
    with pytest.raises(DflashError, match="answered by another server"):
        made(alias="somebody-else").start()


def test_a_port_in_use_is_told_before_anything_is_started(made: Made) -> None:
    with fake_server() as other:
        server = made(options={"port": other.port})
        with pytest.raises(DflashError, match=f"port {other.port} on 127.0.0.1 is taken"):
            server.start()
    assert fake.starts(made.starts) == []


def test_only_its_own_note_is_taken_away(made: Made) -> None:
    with made() as first:
        second = made(options={"port": first.launch.port})
        with pytest.raises(DflashError, match="is taken"):
            second.start()
        assert first.pidfile.exists()
        later = Identity.of_this()
        write_pidfile(first.pidfile, later, port=first.launch.port)
    noted = read_pidfile(first.pidfile)
    assert noted is not None and noted[0] == later


def test_an_error_inside_the_block_ends_the_child(made: Made) -> None:
    with pytest.raises(ZeroDivisionError), made() as server:
        raise ZeroDivisionError
    assert server.returncode == 0


def test_an_interrupt_while_loading_ends_the_child(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    server = made(health=[503] * 10000)

    def interrupt() -> None:
        wait_for(lambda: server._child is not None and server.client(retries=0).health() == "loading")
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        server.start()
    assert server.returncode is not None


# -- staying with it -------------------------------------------------------------------------------


def test_a_server_that_dies_under_load_is_told_apart_from_one_that_never_came_up(made: Made) -> None:
    with made(die_at=4, death="exit 1", last_words="CUDA error: out of memory") as server:
        threading.Timer(0.2, lambda: _try_chat(server)).start()
        with pytest.raises(DflashError, match=r"ended while serving .exit code 1.: the memory is not enough"):
            supervise.watch(server)


def _try_chat(server: LlamaServer) -> None:
    for _ in range(3):
        try:
            server.client(retries=0).complete("x")
        except DflashError:
            return


def test_it_is_started_again_and_the_reason_is_kept(made: Made) -> None:
    said: list[str] = []
    server = made(fail_starts=0)
    server.supervisor = Identity.of_this()
    with server:
        first = server.pid
        threading.Timer(0.1, lambda: os.kill(first, signal.SIGKILL)).start()
        thread = threading.Thread(
            target=lambda: _watch(server, said, restart=True, first_wait=0.05), daemon=True
        )
        thread.start()
        wait_for(
            lambda: server.returncode is None and server.pid != first and server.client().health() == "ready"
        )
        wait_for(lambda: (read_pidfile(server.pidfile) or (0, {}))[1].get("ready") is True)
        noted = read_pidfile(server.pidfile)
        assert noted is not None
        assert "SIGKILL" in str(noted[1]["restarts"])
        assert "starting it again in 0.05 s" in said[0]
    thread.join(10)
    assert not thread.is_alive()
    assert server.returncode is not None  # stopped on purpose: not started a third time
    assert len(fake.starts(made.starts)) == 2


def test_clients_that_came_first_may_have_found_after_a_restart_that_drafting_does_not_pay(
    made: Made,
) -> None:
    server = made(rests_after=1).start()
    os.kill(server.pid, signal.SIGKILL)
    wait_for(lambda: server.returncode is not None)
    server.start_again()
    assert server.proof is not None and server.proof.drafted == 0
    server.stop()
    with pytest.raises(DflashError, match="made no draft"):
        server.start()


def _watch(server: LlamaServer, said: list[str], **options: Any) -> None:
    try:
        supervise.watch(server, say=said.append, **options)
    except DflashError as error:
        said.append(error.message)


def test_starts_that_fail_again_and_again_end_it_with_growing_waits(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []
    server = made()
    server.supervisor = Identity.of_this()
    with server:
        fake.make(
            made.folder / "a build",
            starts=str(made.starts),
            then="exit 1",
            log=["error: invalid argument: --x"],
        )
        os.kill(server.pid, signal.SIGKILL)
        monkeypatch.setattr(supervise.time, "sleep", _recorded(waits))
        with pytest.raises(DflashError, match=r"could not be started again 5 times: .*does not know --x"):
            supervise.watch(server, restart=True, first_wait=1.0)
        assert server.pidfile.exists()  # it was looked after until now
    assert [wait for wait in waits if wait >= 1] == [1, 2, 4, 8, 16]
    assert len(server.reasons) == 5


def _recorded(waits: list[float]) -> Callable[[float], None]:
    real = time.sleep

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        real(min(seconds, 0.02))

    return sleep


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_a_signal_ends_the_child_and_only_the_first_one_counts(made: Made, name: str) -> None:
    number = getattr(signal, name)
    before = signal.getsignal(number)
    server = made()
    twice = threading.Timer(0.1, lambda: (os.kill(os.getpid(), number), os.kill(os.getpid(), number)))
    with supervise.Signals():
        with pytest.raises(supervise.Told) as caught, server:
            twice.start()
            supervise.watch(server)
        twice.join()
    assert caught.value.number == number
    assert server.returncode == 0
    assert signal.getsignal(number) is before


def test_the_log_can_be_watched(made: Made) -> None:
    seen: list[str] = []
    with made(log=["one", "two"]) as server:
        supervise.show_log(server, seen.append)
        wait_for(lambda: seen[:2] == ["one", "two"])


# -- servers that were noted -----------------------------------------------------------------------


def test_servers_are_found_and_ended_by_what_was_noted(made: Made) -> None:
    with made() as server:
        found = registry.only()
        assert (found.url, found.state()) == (server.url, "ready")
        assert found.client().chat("Hi").text == "Hello"
        assert registry.stop(found)
        wait_for(lambda: server.returncode == 0)
        assert registry.alive() == []
    with pytest.raises(DflashError, match="no server of ours runs on port 1"):
        registry.only(1)


def test_two_servers_must_be_told_apart(made: Made) -> None:
    with made() as one, made() as other:
        with pytest.raises(DflashError, match="several servers of ours run") as caught:
            registry.only()
        assert "--port" in str(caught.value.hint)
        assert registry.only(other.launch.port).url == other.url != one.url
        assert registry.stop(registry.only(other.launch.port))
        assert one.returncode is None


def test_a_note_that_names_a_foreign_process_never_ends_it(made: Made) -> None:
    with made() as server:
        noted = read_pidfile(server.pidfile)
        assert noted is not None
        text = server.pidfile.read_text().replace(noted[0].started, "ticks 7")
        server.pidfile.write_text(text)
        found = registry.noted()[0]
        assert found.state() == "ended"
        assert registry.stop(found)
        assert server.returncode is None


def test_notes_of_servers_that_are_gone_are_forgotten(made: Made) -> None:
    server = made()
    server.start()
    os.kill(server.pid, signal.SIGKILL)
    wait_for(lambda: server.returncode is not None)
    assert [one.state() for one in registry.noted()] == ["ended"]
    assert len(registry.forget_ended()) == 1
    assert registry.noted() == []


def test_a_server_that_shows_nothing_is_not_answering(made: Made) -> None:
    with made() as server:
        os.kill(server.pid, signal.SIGSTOP)
        assert registry.only().state() == "not answering"
        os.kill(server.pid, signal.SIGCONT)


def test_free_ports_differ_from_those_in_use() -> None:
    with fake_server() as server:
        assert free_port() != server.port
