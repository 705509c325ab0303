"""The drafting loop of a real llama-server: what reaches the draft cache, and that the text stays."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from dflashcpp import LlamaServer, pairs
from dflashcpp.conversion import convert
from dflashcpp.llamacpp import Build
from tests.support.acceptance import held_out
from tests.support.asking import ask_together
from tests.support.checkpoints import SLIDING, WINDOW, t1, t1_v2, write_checkpoint, write_target

pytestmark = [pytest.mark.real, pytest.mark.slow]

DRAFTERS = {
    "v1, windowed": t1(**SLIDING),
    "v2, windowed": t1_v2(**SLIDING),
    "v1, one layer windowed": t1(**{**SLIDING, "layer_types": ["sliding_attention", "full_attention"]}),
    "v2": t1_v2(),
}
FIRST = [7, 300, 12, 45, 99] * 40
SECOND = [*FIRST, *range(30, 150), 7, 300]
FLAGS: dict[str, Any] = {
    "threads": 1,
    "ctx_size": 1024,
    "cache_ram": 0,
    "spec_draft_adaptive": False,  # how much is drafted then depends on the machine
}

Drafts = list[tuple[int, int, list[int]]]


@dataclass(frozen=True)
class Traced:
    """Answers of a server, what it drafted (position, anchor, tokens), and every injected position."""

    texts: list[str]
    drafts: Drafts
    injected: list[int]


@pytest.fixture
def traced(tmp_path: Path, build_patched: Build, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Traced]:
    def run(target: Path, drafter: Path, prompts: Sequence[Any], name: str, *extra: str) -> Traced:
        trace = tmp_path / f"{name} trace"
        monkeypatch.setenv("DFLASHCPP_TRACE", str(trace))
        with LlamaServer(
            target, drafter, build=build_patched, extra=extra, spec_draft_n_max=4, flash_attn="off", **FLAGS
        ) as server:
            client = server.client()
            texts = [client.complete(p, n_predict=32, temperature=0.0, ignore_eos=True).text for p in prompts]
        events = [json.loads(line) for line in trace.read_text(encoding="utf-8").splitlines()]
        drafts = [(e["pos0"], e["anchor"], e["drafted"]) for e in events if e["event"] == "draft"]
        return Traced(texts, drafts, [p for e in events if e["event"] == "inject" for p in e["pos"]])

    return run


@pytest.mark.parametrize("name", DRAFTERS)
def test_rows_held_back_or_skipped_do_not_change_a_draft(
    name: str, tmp_path: Path, traced: Callable[..., Traced]
) -> None:
    target, gguf = write_target(tmp_path / "target.gguf"), tmp_path / "drafter.gguf"
    convert(
        write_checkpoint(tmp_path / "source", DRAFTERS[name], dtype="F32"),
        target=target,
        type="F32",
        output=gguf,
    )
    prompts = [FIRST, SECOND]  # the second goes on where the first one ended
    eager = traced(target, gguf, prompts, "eager", "--spec-draft-inject", "eager")
    lazy = traced(target, gguf, prompts, "lazy")
    assert lazy.texts == eager.texts
    assert lazy.drafts == eager.drafts
    assert len(lazy.drafts) > 30
    assert len(lazy.injected) < len(eager.injected)
    if name.endswith(", windowed"):  # behind what the start of the server asked
        assert not set(range(130, len(FIRST) - WINDOW + 1)) & set(lazy.injected)
        assert set(range(len(FIRST) - WINDOW + 1, len(FIRST))) <= set(lazy.injected)


def test_each_accepted_token_reaches_the_draft_cache_once(traced: Callable[..., Traced]) -> None:
    target = pairs.ensure_target(pairs.load_pair())
    drafter = pairs.ensure_drafter(pairs.load_pair(), target=target)
    prompt = f"<|im_start|>user\n{held_out('code', 1)[0]}<|im_end|>\n<|im_start|>assistant\n"
    found = traced(target, drafter, [prompt], "once")
    starts = [i for i, position in enumerate(found.injected) if position == 0]
    last = found.injected[starts[-1] :]  # behind what the start of the server asked
    assert last == list(range(len(last)))
    assert len(last) > found.drafts[-1][0]


QUESTIONS = [
    f"<|im_start|>user\n{request}<|im_end|>\n<|im_start|>assistant\n"
    for kind in ("code", "explain", "list", "rewrite")
    for request in held_out(kind, 4)
]


def _answers(server: LlamaServer) -> tuple[str, ...]:
    return ask_together(server.url, QUESTIONS, n_predict=24, temperature=0.0).texts


@pytest.fixture(scope="module")
def plain_answers(build_patched: Build) -> tuple[str, ...]:
    """Of one slot, without a drafter."""
    with LlamaServer(
        pairs.ensure_target(pairs.load_pair()), build=build_patched, parallel=1, **FLAGS
    ) as server:
        return _answers(server)


@pytest.mark.parametrize("slots", [1, 2, 4, 16])
def test_slots_write_what_one_slot_writes(
    slots: int, build_patched: Build, plain_answers: tuple[str, ...]
) -> None:
    """A draft context made for 8 rows a pass; 16 slots of 8 rows go through it."""
    target = pairs.ensure_target(pairs.load_pair())
    drafter = pairs.ensure_drafter(pairs.load_pair(), target=target)
    flags = FLAGS | {"ctx_size": 256 * slots, "parallel": slots, "spec_draft_n_max": 7}
    narrow = ("--spec-draft-ubatch-size", "8")
    with LlamaServer(target, drafter, build=build_patched, extra=narrow, **flags) as server:
        assert _answers(server) == plain_answers
