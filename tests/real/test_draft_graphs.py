"""What `DFLASHCPP_OFF` turns off costs time only: same drafts, same text; and the draft graphs are reused."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from benchmarks.draft_files import bf16_target
from dflashcpp.llamacpp import Build
from dflashcpp.pairs import ensure_drafter, ensure_target, load_pair
from dflashcpp.progress import SILENT
from dflashcpp.server import LlamaServer

pytestmark = [pytest.mark.real, pytest.mark.slow]

SWITCHES = ("top-k", "injection-graph")
PROMPT = "<|im_start|>user\nWrite a function that sorts a list.<|im_end|>\n<|im_start|>assistant\n"


@dataclass(frozen=True)
class Run:
    """One answer: its text, the blocks drafted for it, passes of the drafter and how many reused a graph."""

    text: str
    drafts: list[list[int]]
    passes: int
    reused: int


@pytest.fixture
def run(build_patched: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Answers PROMPT with some switches off."""

    def answer(off: str, bf16: bool = False) -> Run:
        trace, log = tmp_path / f"trace {off}", tmp_path / f"log {off}"
        monkeypatch.setenv("DFLASHCPP_TRACE", str(trace))
        monkeypatch.setenv("DFLASHCPP_OFF", off)
        pair = load_pair()
        small = ensure_target(pair)
        target = bf16_target(small, build_patched, SILENT) if bf16 else small
        flags = {"threads": 1, "parallel": 1, "ctx_size": 1024, "spec_draft_n_max": 4}
        flags["spec_draft_adaptive"] = False  # how much is drafted then depends on the machine
        with LlamaServer(
            target,
            ensure_drafter(pair, target=small),
            build=build_patched,
            log=log,
            extra=("-lv", "5"),
            **flags,
        ) as server:
            text = server.client().complete(PROMPT, n_predict=64, temperature=0.0).text
        events = [json.loads(line) for line in trace.read_text(encoding="utf-8").splitlines()]
        said = re.findall(r"draft graphs reused = +(\d+)", log.read_text(encoding="utf-8", errors="replace"))
        drafts = [event["drafted"] for event in events if event["event"] == "draft"]
        return Run(text, drafts, len(events), int(said[-1]))

    return answer


def test_every_switch_leaves_drafts_and_text_alone(run) -> None:
    expected = run("")
    assert len(expected.drafts) > 10
    for name in SWITCHES:
        found = run(name)
        assert (found.text, found.drafts) == (expected.text, expected.drafts), name


def test_few_rows_of_bf16_leave_the_text_alone(run) -> None:
    """The products are summed in another order, so a draft may differ at a near tie; the text does not."""
    ours, upstream = run("", bf16=True), run("few-rows", bf16=True)
    assert ours.text == upstream.text
    assert len(ours.drafts) == pytest.approx(len(upstream.drafts), abs=2)


def test_drafting_reuses_its_graph_between_injections(run) -> None:
    shared, apart = run("injection-graph"), run("")
    assert apart.passes == shared.passes
    # only what changes the shape of a pass is built anew: the prompt, the injected width
    assert apart.reused > len(apart.drafts) * 0.9
    assert shared.reused < apart.reused / 2


def test_a_context_shift_leaves_the_compute_buffer_of_the_drafter_as_it_was(
    build_patched: Build, tmp_path: Path
) -> None:
    """The engine says at its end whether each compute buffer is still as large as it was reserved."""
    pair, log = load_pair(), tmp_path / "log"
    target = ensure_target(pair)
    drafter = ensure_drafter(pair, target=target)
    flags = {"threads": 1, "parallel": 1, "ctx_size": 256, "spec_draft_adaptive": False}
    extra = ("-lv", "5", "--context-shift")
    with LlamaServer(target, drafter, build=build_patched, log=log, extra=extra, **flags) as server:
        answer = server.client().complete(PROMPT, n_predict=300, temperature=0.0, ignore_eos=True)
    said = log.read_text(encoding="utf-8", errors="replace")
    assert answer.timings.predicted_n == 300, "longer than the context: it was shifted"
    assert "matches expectation" in said and "does not match expectation" not in said
