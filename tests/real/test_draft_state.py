"""What the drafter knows of a conversation survives what a server does with its slots.

After a prefix was reused, a prompt went back, a slot was saved or its state moved, the tokens that are
drafted are those of a context that read the whole prompt just now; and the answer is that of no drafter.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import requests

from dflashcpp import LlamaServer, pairs
from dflashcpp.conversion import convert
from dflashcpp.llamacpp import Build
from tests.support.acceptance import held_out
from tests.support.checkpoints import SLIDING, WINDOW, t1, t1_v2, write_checkpoint, write_target
from tests.support.hybrid_target import write_hybrid_target

pytestmark = [pytest.mark.real, pytest.mark.slow]

MIXED = {**SLIDING, "layer_types": ["sliding_attention", "full_attention"]}
DRAFTERS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "v2": (t1_v2(), ()),
    "v2, windowed": (t1_v2(**SLIDING), ()),
    "v1, one layer windowed": (t1(**MIXED), ()),
    "v1, bounded": (t1(), ("--spec-draft-ctx-size", "256")),
}
FLAGS: dict[str, Any] = {
    "threads": 1,
    "ctx_size": 1024,
    "parallel": 1,
    "flash_attn": "off",
    "spec_draft_n_max": 4,
    "cache_type_k_draft": "f32",
    "cache_type_v_draft": "f32",
}


def words(seed: int, count: int) -> list[int]:
    """Token ids in no order."""
    return [int(token) for token in np.random.default_rng(seed).integers(0, 500, count)]


PROMPT, OTHER = words(1, 300), words(2, 200)


@dataclass(frozen=True)
class Answer:
    """Tokens of an answer, what was drafted for it (position, anchor, tokens), how much prompt was read."""

    tokens: list[int]
    drafts: list[tuple[int, int, list[int]]]
    read: int


class Served:
    """A llama-server with its trace."""

    def __init__(self, server: LlamaServer, trace: Path) -> None:
        self.server, self.trace = server, trace

    def post(self, path: str, **body: Any) -> Any:
        response = requests.post(self.server.url + path, json=body, timeout=120)
        assert response.status_code == 200, response.text
        return response.json()

    def ask(self, prompt: list[int], **options: Any) -> Answer:
        """A greedy answer in slot 0, or `id_slot`."""
        return self.ask_all(prompt, **{"id_slot": 0, **options})[0]

    def ask_all(self, prompt: list[int], **options: Any) -> list[Answer]:
        """The answers of the slots that worked on this; without drafts where nothing is traced."""
        seen = self.trace.stat().st_size if self.trace.exists() else 0
        body = {"n_predict": 24, "temperature": 0.0, "ignore_eos": True, "return_tokens": True, **options}
        found = self.post("/completion", prompt=prompt, **body)
        answers = found if isinstance(found, list) else [found]
        drafts = [event for event in self._events(seen) if event["event"] == "draft"]
        return [
            Answer(
                answer["tokens"],
                [(e["pos0"], e["anchor"], e["drafted"]) for e in drafts if e["seq"] == answer["id_slot"]],
                answer["timings"]["prompt_n"],
            )
            for answer in answers
        ]

    def erase(self) -> None:
        """Empty slot 0."""
        self.post("/slots/0?action=erase")

    def save(self, name: str) -> None:
        """Slot 0 to a file."""
        self.post("/slots/0?action=save", filename=name)

    def restore(self, name: str) -> None:
        """Slot 0 from a file."""
        self.post("/slots/0?action=restore", filename=name)

    def _events(self, start: int) -> list[dict[str, Any]]:
        if not self.trace.exists():
            return []
        with self.trace.open("rb") as file:
            file.seek(start)
            return [json.loads(line) for line in file]


@dataclass
class Pair:
    """A target, a drafter, and how to start servers of them."""

    build: Build
    folder: Path
    target: Path
    drafter: Path
    extra: tuple[str, ...] = ()
    started: int = 0

    def serve(self, stack: ExitStack, *extra: str, drafter: bool = True, **flags: Any) -> Served:
        """A server with this pair, or with the target alone."""
        self.started += 1
        trace = self.folder / f"trace {self.started}"
        options = FLAGS | {"slot_save_path": str(self.folder)} | flags
        if not drafter:
            options = {name: value for name, value in options.items() if "draft" not in name}
        more = ("--no-spec-draft-adaptive", *self.extra, *extra) if drafter else extra
        model = self.drafter if drafter else None
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("DFLASHCPP_TRACE", str(trace))
            server = LlamaServer(self.target, model, build=self.build, extra=more, **options)
            return Served(stack.enter_context(server), trace)


def tiny(build: Build, folder: Path, config: dict[str, Any], extra: tuple[str, ...] = ()) -> Pair:
    """A tiny random pair."""
    target, drafter = write_target(folder / "target.gguf"), folder / "drafter.gguf"
    source = write_checkpoint(folder / "source", config, dtype="F32")
    convert(source, target=target, type="F32", output=drafter)
    return Pair(build, folder, target, drafter, extra)


@pytest.fixture(scope="module")
def pair_of(build_patched: Build, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Pair]:
    """The pair of a name, made once."""
    return cache(lambda name: tiny(build_patched, tmp_path_factory.mktemp("a pair"), *DRAFTERS[name]))


@dataclass
class Trio:
    """The server under test, one whose slot is emptied before each prompt, and one without a drafter."""

    pair: Pair
    used: Served
    fresh: Served
    plain: Served

    def same(self, prompt: list[int], answer: Answer) -> bool:
        """Whether the answer was drafted as by a fresh context, and is that of no drafter."""
        self.fresh.erase()
        expected = self.fresh.ask(prompt)
        assert len(expected.drafts) > 8
        assert self.plain.ask(prompt).tokens == expected.tokens == answer.tokens
        return answer.drafts == expected.drafts


@pytest.fixture(scope="module")
def plain(build_patched: Build, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("plain")
    with ExitStack() as stack:
        target = write_target(folder / "target.gguf")
        yield Pair(build_patched, folder, target, target).serve(stack, drafter=False, cache_ram=0)


@pytest.fixture(scope="module", params=DRAFTERS)
def trio(request: pytest.FixtureRequest, plain: Served, pair_of: Callable[[str], Pair]) -> Iterator[Trio]:
    pair = pair_of(request.param)
    with ExitStack() as stack:
        yield Trio(pair, pair.serve(stack), pair.serve(stack, cache_ram=0), plain)


Case = Callable[[Served], list[int]]


def longer(used: Served) -> list[int]:
    return PROMPT + used.ask(PROMPT).tokens + words(3, 20)


def again(used: Served) -> list[int]:
    used.ask(PROMPT)
    return PROMPT


def a_little_back(used: Served) -> list[int]:
    used.ask(PROMPT)
    return PROMPT[:-10] + words(4, 30)


def back_by_more_than_the_window(used: Served) -> list[int]:
    used.ask(PROMPT, n_predict=300)
    return PROMPT[:-70] + words(5, 10)


def back_to_the_start(used: Served) -> list[int]:
    used.ask(PROMPT)
    return PROMPT[:10] + words(6, 200)


def shorter(used: Served) -> list[int]:
    used.ask(PROMPT, n_predict=300)
    return PROMPT[:100]


def two_prompts_in_turn(used: Served) -> list[int]:
    answer = used.ask(PROMPT)
    used.ask(OTHER)
    return PROMPT + answer.tokens + words(7, 5)


def saved_and_restored(used: Served) -> list[int]:
    answer = used.ask(PROMPT)
    used.save("a slot")
    used.ask(OTHER)
    used.restore("a slot")
    return PROMPT + answer.tokens + words(8, 5)


def restored_and_back(used: Served) -> list[int]:
    return saved_and_restored(used)[:-20] + words(9, 3)


CASES: list[Case] = [
    longer,
    again,
    a_little_back,
    back_by_more_than_the_window,
    back_to_the_start,
    shorter,
    two_prompts_in_turn,
    saved_and_restored,
    restored_and_back,
]


@pytest.mark.parametrize("case", CASES)
def test_drafts_are_those_of_a_fresh_context(case: Case, trio: Trio) -> None:
    trio.used.erase()
    prompt = case(trio.used)
    answer = trio.used.ask(prompt)
    assert trio.same(prompt, answer)
    assert answer.read < len(prompt) or trio.pair.extra  # a bounded cache may have lost all it needs
    if case is back_by_more_than_the_window and not trio.pair.extra:
        assert answer.read <= 10 + WINDOW


def test_a_prompt_that_only_grows_is_not_read_again(trio: Trio) -> None:
    used = trio.used
    used.erase()
    grown, read = PROMPT, []
    for turn in range(3):
        answer = used.ask(grown)
        read.append(answer.read)
        grown = grown + answer.tokens + words(3, 20)
        if turn == 0:
            used.save("grown")
            other = OTHER + used.ask(OTHER).tokens
            used.restore("grown")
        else:
            used.ask(other)  # what is in the slot goes to the prompt cache in RAM
    assert read[0] == len(PROMPT) and max(read[1:]) <= 21


def test_a_slot_file_without_its_drafter_is_read_again_as_far_as_needed(trio: Trio) -> None:
    folder = trio.pair.folder
    trio.used.erase()
    prompt = PROMPT + trio.used.ask(PROMPT).tokens + words(8, 5)
    trio.used.save("alone")
    trio.used.ask(OTHER)
    trio.used.save("another")
    whole = (folder / "alone.draft").read_bytes()
    other = (folder / "another.draft").read_bytes()
    for content in (None, other, whole[:-1000], b"nothing"):
        (folder / "alone.draft").unlink(missing_ok=True)
        if content is not None:
            (folder / "alone.draft").write_bytes(content)
        trio.used.restore("alone")
        assert trio.same(prompt, trio.used.ask(prompt)), content and len(content)


def test_a_saved_slot_goes_on_in_another_server(trio: Trio) -> None:
    trio.used.erase()
    prompt = PROMPT + trio.used.ask(PROMPT).tokens + words(8, 5)
    trio.used.save("moved")
    trio.fresh.erase()
    trio.fresh.restore("moved")
    answer = trio.fresh.ask(prompt)
    assert answer.read <= 6
    assert trio.same(prompt, answer)
    assert not list(trio.pair.folder.glob("*.tmp"))


def test_reading_again_can_be_turned_off(plain: Served, pair_of: Callable[[str], Pair]) -> None:
    with ExitStack() as stack:
        used = pair_of("v2, windowed").serve(stack, "--no-spec-draft-reread")
        prompt = back_by_more_than_the_window(used)
        answer = used.ask(prompt)
        assert answer.read == 10
        assert answer.tokens == plain.ask(prompt).tokens
        assert len(answer.drafts) > 20


def test_the_draft_cache_of_another_drafter_is_not_used(
    build_patched: Build, plain: Served, tmp_path: Path, pair_of: Callable[[str], Pair]
) -> None:
    """The other one's cache has the same shape."""
    one, other = pair_of("v2"), tiny(build_patched, tmp_path, t1_v2(rms_norm_eps=1e-5))
    with ExitStack() as stack:
        first = one.serve(stack)
        prompt = PROMPT + first.ask(PROMPT).tokens
        first.save("a slot")
        second = other.serve(stack, slot_save_path=str(one.folder))
        second.restore("a slot")
        answer = second.ask(prompt)
        assert answer.read == len(prompt)
        assert Trio(other, second, second, plain).same(prompt, answer)


@pytest.mark.parametrize("name", ["v2", "v2, windowed"])
def test_slots_in_turn_and_copies_of_a_slot_draft_as_one(
    name: str, plain: Served, pair_of: Callable[[str], Pair]
) -> None:
    pair = pair_of(name)
    with ExitStack() as stack:
        used = pair.serve(stack, parallel=3, ctx_size=3072)
        trio = Trio(pair, used, used, plain)
        first, second = used.ask(PROMPT, id_slot=1), used.ask(OTHER, id_slot=2)
        longer, wider = PROMPT + first.tokens + [5], OTHER + second.tokens + [6]
        one, two = used.ask(longer, id_slot=1), used.ask(wider, id_slot=2)
        assert one.read <= 2 and two.read <= 2
        assert trio.same(longer, one)
        assert trio.same(wider, two)
        used.erase()
        copies = used.ask_all(PROMPT, n_cmpl=3)
        assert len(copies) == 3
        assert all(trio.same(PROMPT, copy) for copy in copies)


@pytest.mark.parametrize("name", ["v2", "v2, windowed", "v1, one layer windowed"])
def test_a_context_shift_moves_the_draft_cache_along(name: str, pair_of: Callable[[str], Pair]) -> None:
    """The target's own rows stay those of the longer context, so a fresh context is no measure here: what is
    drafted is what a drafter that is given every row at once drafts, at the positions where it is said."""
    pair = pair_of(name)
    flags: dict[str, Any] = {"ctx_size": 512, "context_shift": True, "cache_ram": 0}
    with ExitStack() as stack:
        lazy, eager, alone = (
            server.ask(PROMPT, n_predict=300, n_keep=8)
            for server in (
                pair.serve(stack, **flags),
                pair.serve(stack, "--spec-draft-inject", "eager", **flags),
                pair.serve(stack, drafter=False, **flags),
            )
        )
    assert lazy.tokens == eager.tokens == alone.tokens
    assert lazy.drafts == eager.drafts
    text, gone = PROMPT + alone.tokens, (511 - 8) // 2
    turn = next(i for i, (one, two) in enumerate(pairwise(lazy.drafts)) if two[0] < one[0]) + 1
    assert all(text[position] == anchor for position, anchor, _ in lazy.drafts[:turn])
    assert all(text[position + gone] == anchor for position, anchor, _ in lazy.drafts[turn:])
    assert min(turn, len(lazy.drafts) - turn) > 50
    assert max(position for position, _, _ in lazy.drafts) < 512


@pytest.fixture(scope="module")
def real(build_patched: Build, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trio]:
    """The small real pair, whose drafts are accepted."""
    target = pairs.ensure_target(pairs.load_pair())
    drafter = pairs.ensure_drafter(pairs.load_pair(), target=target)
    pair = Pair(build_patched, tmp_path_factory.mktemp("real"), target, drafter)
    with ExitStack() as stack:
        used, fresh = pair.serve(stack, ctx_size=256), pair.serve(stack, ctx_size=256, cache_ram=0)
        yield Trio(pair, used, fresh, pair.serve(stack, drafter=False, ctx_size=256, cache_ram=0))


def real_prompt(served: Served, kind: str) -> list[int]:
    """A held-out prompt of that kind, as token ids."""
    text = f"<|im_start|>user\n{held_out(kind, 1)[0]}<|im_end|>\n<|im_start|>assistant\n"
    return served.server.client().tokenize(text)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7])
def test_no_draft_goes_past_the_budget(count: int, real: Trio) -> None:
    prompt = real_prompt(real.used, "code")
    answer = real.used.ask(prompt, n_predict=count)
    assert answer.tokens == real.plain.ask(prompt, n_predict=count).tokens
    assert len(answer.tokens) == count
    assert bool(answer.drafts) == (count > 2)
    end = len(prompt) + count
    assert all(position + 1 + len(tokens) < end for position, _, tokens in answer.drafts)


@pytest.mark.parametrize("length", [233, 236])
def test_no_draft_goes_past_the_context(length: int, real: Trio) -> None:
    """And what was accepted there is said."""
    prompt = (real_prompt(real.used, "code") * 9)[:length]
    answer = real.used.ask(prompt, n_predict=-1)
    assert answer.tokens == real.plain.ask(prompt, n_predict=-1).tokens
    assert len(answer.tokens) == 256 - length
    assert all(position + 1 + len(tokens) < 256 for position, _, tokens in answer.drafts)


def test_a_real_conversation_drafts_on_as_a_fresh_one(real: Trio) -> None:
    """Here drafts are accepted, so the caches also hold what was drafted."""
    used = real.used
    code, explain = real_prompt(used, "code"), real_prompt(used, "explain")
    first = used.ask(code, n_predict=40)
    assert len(first.drafts) < 33  # some were accepted
    prompt = code + first.tokens[:-10]
    used.save("code")
    used.ask(explain, n_predict=8)
    used.restore("code")
    assert real.same(prompt, used.ask(prompt))


def test_a_target_that_cannot_go_back_takes_its_drafter_along(
    tmp_path: Path, pair_of: Callable[[str], Pair]
) -> None:
    """It goes back to a checkpoint, of which the windowed part of the draft cache is a part."""
    target = write_hybrid_target(tmp_path / "hybrid.gguf", heads=4, hidden=256, vocab=512)
    pair = replace(pair_of("v1, one layer windowed"), target=target, folder=tmp_path)
    with ExitStack() as stack:
        used, fresh = pair.serve(stack), pair.serve(stack, cache_ram=0)
        trio = Trio(pair, used, fresh, pair.serve(stack, drafter=False, cache_ram=0))
        for case in (longer, again, a_little_back, two_prompts_in_turn, saved_and_restored):
            used.erase()
            prompt = case(used)
            assert trio.same(prompt, used.ask(prompt)), case.__name__
