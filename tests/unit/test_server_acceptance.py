from __future__ import annotations

from pathlib import Path

from dflashcpp.client import Client
from dflashcpp.server.acceptance import AcceptanceWatch
from tests.support.fake_http import Script, fake_server, metrics

QUANTISED = (
    "- gpu_layers=-1, cache_k=q8_0, cache_v=q8_0\ndraft acceptance = 0.00667 (2 accepted / 300 generated)\n"
)


def watched(tmp_path: Path, log: str, drafted: int, accepted: int, looks: int = 1) -> list[str | None]:
    (tmp_path / "server.log").write_text(log)
    watch = AcceptanceWatch(tmp_path / "server.log", every=0.0)
    with fake_server(Script(metrics=lambda: metrics(drafted, accepted, 60, 100))) as server:
        return [watch.look(Client(server.url)) for _ in range(looks)]


def test_hardly_any_accepted_draft_is_told_once_with_its_likely_cause(tmp_path: Path) -> None:
    first, second = watched(tmp_path, QUANTISED, 300, 2, looks=2)
    assert first is not None and "2 of 300" in first and "quantised (q8_0)" in first
    assert second is None
    (unknown,) = watched(tmp_path, "", 300, 0)
    assert unknown is not None and "dflashcpp verify" in unknown


def test_a_working_drafter_and_few_drafts_are_no_reason_to_speak(tmp_path: Path) -> None:
    assert watched(tmp_path, QUANTISED, 300, 30) == [None]
    assert watched(tmp_path, QUANTISED, 20, 0) == [None]


def test_a_server_without_counters_or_gone_is_none_either(tmp_path: Path) -> None:
    watch = AcceptanceWatch(tmp_path / "server.log", every=0.0)
    with fake_server(Script()) as server:
        client = Client(server.url, retries=0)
        assert watch.look(client) is None
    assert watch.look(client) is None


def test_it_looks_now_and_then_only(tmp_path: Path) -> None:
    watch = AcceptanceWatch(tmp_path / "server.log", every=60.0)
    with fake_server(Script(metrics=lambda: metrics(300, 0, 60, 100))) as server:
        assert watch.look(Client(server.url)) is None
        assert server.requests == []
