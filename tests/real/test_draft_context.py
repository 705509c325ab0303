"""`--spec-draft-ctx-size`: a smaller draft cache changes what is drafted, never what is said."""

from __future__ import annotations

import json

import pytest

from dflashcpp import knowledge
from dflashcpp.llamacpp import Build
from dflashcpp.pairs import ensure_drafter, ensure_target, load_pair
from dflashcpp.server import LlamaServer

pytestmark = [pytest.mark.real, pytest.mark.slow]

# Batches of other widths round otherwise, and the target is in doubt between two tokens here: so a fixed
# length (the adaptive one goes by the clock), and no prompt read again for the drafter.
FLAGS = {
    "parallel": 1,
    "ctx_size": 2048,
    "threads": 1,
    "cache_ram": 0,
    "spec_draft_adaptive": False,
    "spec_draft_reread": False,
}


@pytest.fixture(scope="module")
def prompt() -> str:
    """About 500 tokens."""
    path = knowledge.folder("models") / "smollm2-135m-dflash2" / "held-out-prompts.json"
    questions = [text for _, text in json.loads(path.read_text())][:36]
    return "<|im_start|>user\n" + " ".join(questions) + "<|im_end|>\n<|im_start|>assistant\n"


def _answers(build: Build, prompt: str, size: int | None, turns: int = 1, **flags: int) -> tuple[list, float]:
    """Text, drafted and accepted of `turns` requests, each longer than the last, and the draft KV in MiB."""
    pair = load_pair()
    target = ensure_target(pair)
    extra = () if size is None else ("--spec-draft-ctx-size", str(size))
    found = []
    with LlamaServer(
        target, ensure_drafter(pair, target=target), build=build, extra=extra, **FLAGS | flags
    ) as server:
        assert server.memory is not None
        for turn in range(turns):
            text = prompt + " and" * turn
            answer = server.client().complete(text, n_predict=48, temperature=0.0)
            assert answer.timings is not None
            found.append((answer.text, answer.timings.drafted, answer.timings.accepted))
        return found, server.memory.mib("draft", "kv")


def test_a_bound_that_holds_everything_changes_nothing(build_patched: Build, prompt: str) -> None:
    whole, large = _answers(build_patched, prompt, None)
    bounded, small = _answers(build_patched, prompt, 1024)
    assert bounded == whole
    assert small == pytest.approx(large / 2)


@pytest.mark.parametrize("size", [1, 256])
def test_past_the_bound_the_text_is_the_same_and_drafting_goes_on(
    size: int, build_patched: Build, prompt: str
) -> None:
    whole, _ = _answers(build_patched, prompt, None, turns=3)
    bounded, _ = _answers(build_patched, prompt, size, turns=3)
    assert [row[0] for row in bounded] == [row[0] for row in whole]
    assert all(drafted > 0 for _, drafted, _ in bounded)


def test_a_bound_above_the_context_is_the_context(build_patched: Build, prompt: str) -> None:
    assert _answers(build_patched, prompt, 100000) == _answers(build_patched, prompt, None)
