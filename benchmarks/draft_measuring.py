"""Runs of benchmarks/drafting.py: one llama-server a setting, real requests, what they cost."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.draft_asking import Whole, ask
from benchmarks.draft_columns import BASE, SWITCH, Column
from benchmarks.draft_figures import Sample
from benchmarks.draft_workloads import Conversation, Workload
from benchmarks.machine import foreign
from dflashcpp.client import Client
from dflashcpp.errors import DflashError
from dflashcpp.llamacpp import Build
from dflashcpp.server import LlamaServer
from dflashcpp.stats import Timings

CONTEXT = 4096
FIRST_TOKENS = 16
READINGS = 4
WARM_UP = "Count from one to twenty in words."
_Item = TypeVar("_Item")
_STATISTICS = re.compile(
    r"statistics\s+draft-dflash: #calls\(b,g,a\) =\s*\d+\s+(\d+).*dur\(b,g,a\) = [\d.]+, ([\d.]+),"
)


@dataclass(frozen=True)
class Setup:
    """What is measured with: files, builds by name (pristine, ours), threads, a folder for logs. heads: the
    same drafter with a head of its own, by the head's type.
    """

    target: Path
    drafter: Path
    builds: dict[str, Build]
    threads: int
    scratch: Path
    context: int = CONTEXT
    heads: Mapping[str, Path] = field(default_factory=dict)


@dataclass(frozen=True)
class Text:
    """A greedy answer: where it stands (kind, conversation, turn), the prompt it answers, its tokens."""

    column: str
    round: int
    place: tuple[str, int, int]
    prompt: str
    tokens: tuple[int, ...]


@dataclass
class Told:
    """The sums over the answers of one kind."""

    amount: int = 0
    seconds: float = 0.0
    prompt_seconds: float = 0.0
    drafted: int = 0
    accepted: int = 0
    steps: int | None = 0
    lengths: tuple[int, ...] = ()
    texts: list[Text] = field(default_factory=list)

    def add(self, timings: Timings) -> None:
        """One answer. The first token comes out of the prompt's evaluation, so it counts there."""
        self.amount += max(0, timings.predicted_n - 1)
        self.seconds += timings.predicted_ms / 1e3
        self.prompt_seconds += timings.prompt_ms / 1e3
        self.drafted += timings.drafted or 0
        self.accepted += timings.accepted or 0
        both = zip_longest(self.lengths, timings.steps_of_length, fillvalue=0)
        self.lengths = tuple(one + other for one, other in both)
        if timings.drafted:
            known = self.steps is not None and timings.verify_steps is not None
            self.steps = (self.steps or 0) + (timings.verify_steps or 0) if known else None


@contextmanager
def serving(
    setup: Setup, column: Column, *, slots: int = 1, drafter: Path | None = None
) -> Iterator[LlamaServer]:
    """A server for this column, warmed up. Without a drafter it is asserted that none is loaded."""
    usual = setup.heads[column.head] if column.head else setup.drafter
    draft = None if column.n_max is None else (drafter or usual)
    flags: dict[str, Any] = {"parallel": slots, "ctx_size": setup.context * slots, "threads": setup.threads}
    flags |= {"spec_draft_n_max": column.n_max, "cache_ram": 0, "fit": "off"}
    log = setup.scratch / f"{column.name.replace(' ', '-')}.log"
    log.unlink(missing_ok=True)
    build = setup.builds["ours" if column.ours else "pristine"]
    extra = column.flags if draft else ()
    with _switched_off(column.off):
        server = LlamaServer(setup.target, draft, build=build, extra=extra, log=log, **flags)
        with server:
            client = server.client()
            if draft is None and client.speculative() is not False:
                raise DflashError("the baseline has a drafter loaded")
            timings = ask(client, client.apply_template(WARM_UP), 32).timings
            if draft is None and timings.drafted is not None:
                raise DflashError("the baseline drafts")
            yield server


@contextmanager
def _switched_off(names: Sequence[str]) -> Iterator[None]:
    before = os.environ.pop(SWITCH, None)
    if names:
        os.environ[SWITCH] = ",".join(names)
    try:
        yield
    finally:
        os.environ.pop(SWITCH, None)
        if before is not None:
            os.environ[SWITCH] = before


@contextmanager
def baseline(setup: Setup, column: Column, *, slots: int = 1) -> Iterator[LlamaServer | None]:
    """A second server, without a drafter, to be asked by turns with the column's; None beside the baseline.

    A server that is not asked sleeps, so the two do not disturb each other.
    """
    if column.name == BASE:
        yield None
        return
    with serving(setup, Column(BASE, False, None), slots=slots) as server:
        yield server


def generation(
    setup: Setup, column: Column, temperature: float, turn: int, workloads: Sequence[Workload]
) -> tuple[list[Sample], list[Text]]:
    """Every workload with this column, by turns with no drafter: a sample each, and the texts when they are
    greedy.

    The order of the workloads and of their conversations turns around from round to round; seeds are equal
    for all columns of a round.
    """
    samples, texts = [], []
    with baseline(setup, column) as other, serving(setup, column) as server:
        servers = [one for one in (server, other) if one is not None]
        clients = [one.client() for one in servers]
        for workload in _turned(workloads, turn):
            with foreign(*(one.pid for one in servers)) as away:
                told = _converse_all(clients, column.name, temperature, turn, workload)
            sample = _sample("generation", column, temperature, workload.kind, turn, told[0], away.share)
            samples.append(_beside(sample, told[1:]))
            texts += told[0].texts
    return samples, texts


def _beside(sample: Sample, others: Sequence[Told]) -> Sample:
    """With the speed of the other server that was asked by turns, if there was one."""
    if not others or not others[0].seconds:
        return sample
    told = others[0]
    whole = told.amount / (told.seconds + told.prompt_seconds)
    return replace(sample, beside=told.amount / told.seconds, whole_beside=whole)


def _turned(items: Sequence[_Item], turn: int) -> list[_Item]:
    return list(items) if turn % 2 == 0 else list(reversed(items))


def _converse_all(
    clients: Sequence[Client], column: str, temperature: float, turn: int, workload: Workload
) -> list[Told]:
    """Every conversation with each client, turn by turn; who begins changes. What each told."""
    told = [Told() for _ in clients]
    for index, conversation in _turned(list(enumerate(workload.conversations)), turn):
        seed = 1000 * (turn + 1) + 10 * index
        talks = [converse(one, conversation, workload.max_tokens, temperature, seed) for one in clients]
        for number in range(len(conversation.turns)):
            for who in _turned(range(len(clients)), index + number + turn):
                prompt, answer = next(talks[who])
                told[who].add(answer.timings)
                if temperature == 0:
                    place = (workload.kind, index, number)
                    told[who].texts.append(Text(column, turn, place, prompt, answer.tokens))
    return told


def converse(
    client: Client, conversation: Conversation, tokens: int, temperature: float, seed: int
) -> Iterator[tuple[str, Whole]]:
    """Say every turn, put the answer back into the conversation; prompts and answers."""
    messages: list[dict[str, str]] = []
    for number, said in enumerate(conversation.turns):
        messages.append({"role": "user", "content": said})
        prompt = client.apply_template(messages)
        answer = ask(client, prompt, tokens, temperature, seed + number)
        messages.append({"role": "assistant", "content": answer.text})
        yield prompt, answer


def _sample(
    part: str, column: Column, temperature: float, kind: str, turn: int, told: Told, other: float
) -> Sample:
    return Sample(
        part=part,
        column=column.name,
        temperature=temperature,
        kind=kind,
        round=turn,
        amount=told.amount,
        seconds=told.seconds,
        whole_seconds=told.seconds + told.prompt_seconds,
        drafted=told.drafted,
        accepted=told.accepted,
        verify_steps=told.steps,
        foreign=other,
        lengths=told.lengths,
    )


def reading(
    setup: Setup, column: Column, kind: str, turn: int, prompt: str, drafter: Path | None = None
) -> Sample:
    """A long prompt, read whole (another beginning each time), by turns with no drafter: prompt tokens per
    second.

    The first tokens generated are in the time: what the drafter puts off until its first draft counts too.
    """
    told = [Told(), Told()]
    with baseline(setup, column) as other, serving(setup, column, drafter=drafter) as server:
        servers = [one for one in (server, other) if one is not None]
        with foreign(*(one.pid for one in servers)) as away:
            for number in range(READINGS):
                said = f"Copy {number} of round {turn}. {prompt}"
                for who in _turned(range(len(servers)), number + turn):
                    client = servers[who].client()
                    timings = ask(client, client.apply_template(said), FIRST_TOKENS).timings
                    told[who].amount += timings.prompt_n
                    told[who].seconds += (timings.prompt_ms + timings.predicted_ms) / 1e3
    sample = _sample("reading", column, 0.0, kind, turn, told[0], away.share)
    return _beside(sample, told[1:])


def parallel(setup: Setup, column: Column, slots: int, turn: int, workloads: Sequence[Workload]) -> Sample:
    """The first turns of all workloads in `slots` slots at once: tokens per second of the wall's clock."""
    asked = _turned([(c.turns[0], w.max_tokens) for w in workloads for c in w.conversations], turn)
    with baseline(setup, column, slots=slots) as other, serving(setup, column, slots=slots) as server:
        servers = [one for one in (server, other) if one is not None]
        with foreign(*(one.pid for one in servers)) as away:
            told = [_at_once(one.client(), slots, asked) for one in servers]
    return _beside(_sample("slots", column, 0.0, f"{slots} slots", turn, told[0], away.share), told[1:])


def _at_once(client: Client, slots: int, asked: Sequence[tuple[str, int]]) -> Told:
    """All of it with `slots` requests at a time; seconds are the wall's."""

    def one(said: tuple[str, int]) -> Timings:
        return ask(client, client.apply_template(said[0]), said[1]).timings

    start = time.monotonic()
    with ThreadPoolExecutor(slots) as pool:
        answers = list(pool.map(one, asked))
    seconds = time.monotonic() - start
    told = Told()
    for timings in answers:
        told.add(timings)
    told.amount = sum(timings.predicted_n for timings in answers)
    told.seconds, told.prompt_seconds, told.steps = seconds, 0.0, None
    return told


def draft_calls(setup: Setup, column: Column, turn: int, workloads: Sequence[Workload]) -> Sample | None:
    """How long one draft call takes, by llama-server's own statistics; None when it tells none."""
    with serving(setup, column) as server, foreign(server.pid) as other:
        client = server.client()
        before = statistics_of(server.log.read_text(encoding="utf-8", errors="replace"))
        told = Told()
        for workload in workloads:
            for one in workload.conversations:
                told.add(ask(client, client.apply_template(one.turns[0]), workload.max_tokens).timings)
    after = statistics_of(server.log.read_text(encoding="utf-8", errors="replace"))
    if before is None or after is None or after[0] <= before[0]:
        return None
    told.amount, told.seconds = after[0] - before[0], (after[1] - before[1]) / 1e3
    rows = (column.n_max or 0) + 1
    return _sample("call", column, 0.0, f"{rows} rows", turn, told, other.share)


def statistics_of(log: str) -> tuple[int, float] | None:
    """Draft calls and the milliseconds they took since the start, by the last line of statistics."""
    found = _STATISTICS.findall(log)
    return (int(found[-1][0]), float(found[-1][1])) if found else None
