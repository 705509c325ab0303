"""The memory of a server that runs: planned, told by it, held by its process; how it grew."""

from __future__ import annotations

import itertools
import json
import time
from pathlib import Path
from typing import Any

import pytest

from dflashcpp.conversion import convert
from dflashcpp.memory import account as accounts
from dflashcpp.memory import residuals
from dflashcpp.memory.account import Sample
from dflashcpp.progress import Progress
from dflashcpp.server import LlamaServer
from tests.support import checkpoints
from tests.support import fake_llama_server as fake

pytestmark = pytest.mark.usefixtures("own_cache")

LOG = (Path(__file__).parent / "memory_logs" / "patched-dflash2.log").read_text().splitlines()
LOADED = LOG[: next(i for i, line in enumerate(LOG) if "listening on" in line)]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("a pair")
    target = checkpoints.write_target(folder / "target.gguf")
    source = checkpoints.write_checkpoint(folder / "v1", checkpoints.t1())
    return target, convert(source, target=target, type="F16", output=folder / "draft.gguf").file


def _server(folder: Path, pair: tuple[Path, Path], told: Any = None, **more: Any) -> LlamaServer:
    answer = {"model_path": str(pair[0]), "memory": told}
    program = fake.make(folder / "a build", log=LOADED, refuse={"/props": [200, json.dumps(answer)]})
    return LlamaServer(*pair, build=program, **more)


def _bytes(mib: float) -> dict[str, object]:
    return {"device": "Host", "model": 0, "context": 0, "compute": int(mib * 2**20)}


def test_the_three_are_there_with_what_the_server_tells_before_what_its_log_tells(
    tmp_path: Path, pair: tuple[Path, Path]
) -> None:
    with _server(tmp_path, pair, {"target": [_bytes(20.5)], "draft": [_bytes(1.125)]}) as server:
        memory = server.memory
        report = server.report()
    assert memory is not None and memory.plan is not None and memory.process
    assert memory.mib("target", "compute") == 20.5
    assert memory.mib("target", "weights") == pytest.approx(92.1)
    row = next(row for row in memory.rows() if row[:2] == ("target", "kv"))
    assert row[2] is not None and row[3] is not None
    assert report["memory"]["target"]["compute"] == 20.5
    assert report["memory"]["growth"]["peak"] > 0


def test_without_an_answer_the_log_is_taken(tmp_path: Path, pair: tuple[Path, Path]) -> None:
    with _server(tmp_path, pair) as server:
        assert server.memory is not None
        assert server.memory.mib("draft", "compute") == pytest.approx(1.13)


class _Talk(Progress):
    def __init__(self) -> None:
        self.said: list[str] = []

    def say(self, text: str) -> None:
        self.said.append(text)


def test_samples_are_taken_while_it_runs_and_its_end_says_once_how_it_grew(
    tmp_path: Path, pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = itertools.count()

    def look(pid: int) -> Sample:
        at = next(seen)
        return Sample(float(at), 0, 300.0 if at == 4 else 100.0)

    monkeypatch.setattr(accounts, "sample", look)
    monkeypatch.setattr(LlamaServer, "memory_seconds", 0.01)
    talk = _Talk()
    with _server(tmp_path, pair, progress=talk) as server:
        until = time.monotonic() + 30
        while next(seen) < 20 and time.monotonic() < until:
            time.sleep(0.02)
        assert "grew by 200 MiB" in (server.growth_note() or "")
        assert server.growth_note() is None
    server.stop()
    assert [text for text in talk.said if "its memory" in text] == [
        "its memory: 100 MiB after the start, 300 at most, 100 at the end"
    ]
    assert server.memory is not None and server.memory.as_dict()["growth"]["peak"] == 300.0


def test_what_the_device_held_beyond_the_buffers_is_learned(
    tmp_path: Path, pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    learned: list[tuple[float | None, str]] = []
    monkeypatch.setattr(residuals, "learn", lambda mib, build: learned.append((mib, build)))
    monkeypatch.setattr(accounts, "sample", lambda pid: Sample(1.0, 500.0, 300.0, 700.0))
    with _server(tmp_path, pair) as server:
        binary = server.launch.binary
    assert learned and learned[0] == (700.0, str(binary.resolve().parent))
