"""Drafting with the real llama-server at a temperature above 0: the text keeps the target's distribution.

Tiny random pairs with a vocabulary of 20: drafter and target agree on a third of their probability, so a
wrong rule shows within a thousand short answers.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import requests

from dflashcpp import Client, LlamaServer
from dflashcpp.conversion import convert
from dflashcpp.llamacpp import Build
from dflashcpp.stats import Timings
from tests.support.checkpoints import t1, t1_v2, write_checkpoint, write_target
from tests.support.hybrid_target import write_hybrid_target

pytestmark = [pytest.mark.real, pytest.mark.slow]

VOCAB = 20
SMALL = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
CONFIG = {**SMALL, "head_dim": 32, "vocab_size": VOCAB}
V2 = {"mask_token_id": 19, "selector_rank": 32, "selector_top_k": 7}
PROMPT = [7, 3, 12, 4, 9, 2, 1, 5] * 4
ANSWERS = 1000
SLOTS = 4
CHAIN = ["penalties", "top_k", "top_p", "min_p", "temperature"]
BASE = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "n_predict": 5, "samplers": CHAIN}
GRAMMAR = r"root ::= [\x01-\x08] [\x03-\x0a] [\x01-\x10] [\x01-\x13]+"
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "temperature 0.6, top-k": {"temperature": 0.6, "top_k": 6},
    "top-p": {"top_p": 0.7},
    "penalties": {"repeat_penalty": 1.8, "presence_penalty": 1.0},
    "grammar": {"grammar": GRAMMAR},
    "logit bias, no end": {"logit_bias": [[3, -100], [4, 2.0]], "ignore_eos": True},
    "xtc": {"xtc_probability": 0.5, "xtc_threshold": 0.1, "samplers": ["xtc", "temperature"]},
    "mirostat": {"mirostat": 2},
}
CASES = [
    *(("v2", setting) for setting in SETTINGS),
    *(("v1", setting) for setting in ("plain", "grammar")),
    *(("replaying", setting) for setting in ("plain", "grammar")),
    ("greedy drafts", "plain"),
    ("adaptive", "plain"),
]
# How far a chi-square may be from what chance gives, in standard deviations.
LIMIT = 4.0


class Servers:
    """llama-servers on the tiny pairs, each started when first asked for, and what they answered."""

    def __init__(self, folder: Path, build: Build, stack: ExitStack) -> None:
        self.folder, self._build, self._stack = folder, build, stack
        self._running: dict[str, LlamaServer] = {}
        self._answers: dict[tuple[str, str], list[dict[str, Any]]] = {}
        write_target(folder / "target", hidden=64, vocab=VOCAB, ffn=64, heads=2, kv_heads=1, head_dim=32)
        write_hybrid_target(folder / "hybrid", vocab=VOCAB)
        v1 = t1(**CONFIG, block_size=8, dflash_config={"mask_token_id": 19})
        for name, config in {"v1": v1, "v2": t1_v2(**CONFIG, dflash_config=V2)}.items():
            source = write_checkpoint(folder / f"source of {name}", config, dtype="F32")
            convert(source, target=folder / "target", type="F32", output=folder / name)

    def url(self, name: str) -> str:
        """The address of the server `name`: with a drafter, or of the target alone (`... alone`)."""
        if name not in self._running:
            target = self.folder / ("hybrid" if "replaying" in name else "target")
            draft = None if "alone" in name else self.folder / ("v1" if name == "v1" else "v2")
            flags: dict[str, Any] = {"threads": 1, "ctx_size": 1024, "parallel": SLOTS}
            if draft:
                flags |= {"spec_draft_n_max": 3, "spec_draft_adaptive": name == "adaptive"}
            if name == "greedy drafts":
                flags["spec_draft_sampling"] = "greedy"
            if name == "accepts all":
                flags["spec_synth_rates"] = "1,1,1"
            server = LlamaServer(target, draft, build=self._build, log=self.folder / f"{name}.log", **flags)
            self._running[name] = self._stack.enter_context(server)
        return self._running[name].url

    def client(self, name: str) -> Client:
        """A client of that server."""
        return Client(self.url(name))

    def answers(self, name: str, setting: str) -> list[dict[str, Any]]:
        """`ANSWERS` answers of the server `name` under `setting`, other seeds with than without a drafter."""
        if (name, setting) not in self._answers:
            first = 0 if "alone" in name else 100_000
            options = {**BASE, **SETTINGS[setting]}
            self._answers[name, setting] = ask(self.url(name), range(first, first + ANSWERS), options, SLOTS)
        return self._answers[name, setting]


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory, build_patched: Build) -> Iterator[Servers]:
    with ExitStack() as stack:
        yield Servers(tmp_path_factory.mktemp("sampled drafts"), build_patched, stack)


def ask(url: str, seeds: Sequence[int], options: dict[str, Any], at_once: int = 1) -> list[dict[str, Any]]:
    """One answer to the prompt for each seed, `at_once` of them at a time."""
    body = {"prompt": PROMPT, "return_tokens": True, **options}
    with requests.Session() as session, ThreadPoolExecutor(at_once) as pool:
        bodies = ({**body, "seed": seed} for seed in seeds)
        found = list(pool.map(lambda one: session.post(f"{url}/completion", json=one).json(), bodies))
    assert all("tokens" in answer for answer in found), found[0]
    return found


def difference(one: Sequence[Any], other: Sequence[Any]) -> float:
    """How unlike two samples are: chi-square in standard deviations (Wilson and Hilferty's cube root).

    Values seen less than 12 times in all are taken together.
    """
    left, right = Counter(one), Counter(other)
    cells = [(left[value], right[value]) for value in {*left, *right}]
    rare = [cell for cell in cells if sum(cell) < 12]
    cells = [cell for cell in cells if sum(cell) >= 12]
    if rare:
        cells.append((sum(cell[0] for cell in rare), sum(cell[1] for cell in rare)))
    freedom = max(len(cells) - 1, 1)
    total = sum((a - b) ** 2 / (a + b) for a, b in cells)
    spread = 2 / (9 * freedom)
    return ((total / freedom) ** (1 / 3) - (1 - spread)) / math.sqrt(spread)


def worst(one: Sequence[dict[str, Any]], other: Sequence[dict[str, Any]]) -> float:
    """The largest difference in any position, and in the first two tokens that may be drafted together."""
    tokens = [[tuple(answer["tokens"]) for answer in side] for side in (one, other)]
    parts = [slice(at, at + 1) for at in range(5)] + [slice(1, 3)]
    return max(difference(*([answer[part] for answer in side] for side in tokens)) for part in parts)


def total(answers: Sequence[dict[str, Any]], key: str) -> int:
    return sum(answer["timings"][key] for answer in answers)


@pytest.mark.parametrize(("name", "setting"), CASES)
def test_the_text_is_distributed_as_without_a_drafter(servers: Servers, name: str, setting: str) -> None:
    alone = "replaying alone" if name == "replaying" else "alone"
    drafted = servers.answers(name, setting)
    assert name == "adaptive" or total(drafted, "draft_n_accepted") > 20  # it hardly pays to draft here
    assert worst(servers.answers(alone, setting), drafted) < LIMIT


def test_a_wrong_rule_would_be_seen(servers: Servers) -> None:
    assert worst(servers.answers("alone", "plain"), servers.answers("accepts all", "plain")) > 3 * LIMIT


def test_a_draft_is_accepted_as_often_as_both_distributions_overlap(
    servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One drafted token an answer: sum min(p, q), q from the trace's lattice, p as the target alone says."""
    trace = servers.folder / "a trace"
    monkeypatch.setenv("DFLASHCPP_TRACE", str(trace))
    url = servers.url("traced")
    before = sum(1 for _ in drafts(trace))
    answers = ask(url, range(ANSWERS), {**BASE, "n_predict": 3}, SLOTS)
    rows = [draft for draft in list(drafts(trace))[before:] if draft["lattice"]]
    assert len(rows) == total(answers, "draft_n_verif_steps") > 0.9 * ANSWERS
    p = {anchor: probabilities(servers.url("alone"), anchor) for anchor in {row["anchor"] for row in rows}}
    shares = [overlap(p[row["anchor"]], row["lattice"][0]) for row in rows]
    spread = math.sqrt(sum(share * (1 - share) for share in shares))
    assert abs(total(answers, "draft_n_accepted") - sum(shares)) < LIMIT * spread
    assert 0.2 < sum(shares) / len(shares) < 0.6


def drafts(trace: Path) -> Iterator[dict[str, Any]]:
    for line in trace.read_text().splitlines():
        event = json.loads(line)
        if event["event"] == "draft":
            yield event


def probabilities(url: str, anchor: int) -> dict[int, float]:
    """The target's p of the token behind the prompt and `anchor`."""
    body = {**BASE, "n_predict": 1, "n_probs": VOCAB, "prompt": [*PROMPT, anchor]}
    answer = requests.post(f"{url}/completion", json=body).json()
    return {
        row["id"]: math.exp(row["logprob"]) for row in answer["completion_probabilities"][0]["top_logprobs"]
    }


def overlap(p: dict[int, float], candidates: dict[str, Any]) -> float:
    weights = [math.exp(score - max(candidates["scores"])) for score in candidates["scores"]]
    pairs = zip(candidates["ids"], weights, strict=True)
    return sum(min(p[token], weight / sum(weights)) for token, weight in pairs)


def test_the_same_seed_gives_the_same_text(servers: Servers) -> None:
    options = {**BASE, "n_predict": 40, "ignore_eos": True}
    one, two = (ask(servers.url("v2"), range(20), options) for _ in range(2))
    texts = [tuple(answer["tokens"]) for answer in one]
    assert texts == [tuple(answer["tokens"]) for answer in two]
    assert len(set(texts)) == len(texts)


@pytest.mark.parametrize("name", ["v1", "v2", "replaying"])
def test_at_temperature_0_the_text_is_that_of_the_target_alone(servers: Servers, name: str) -> None:
    alone = "replaying alone" if name == "replaying" else "alone"
    options = {"temperature": 0.0, "n_predict": 200, "ignore_eos": True}
    texts = [ask(servers.url(which), [1], options)[0]["tokens"] for which in (alone, name)]
    assert texts[0] == texts[1]


@pytest.mark.parametrize("name", ["v2", "replaying", "adaptive"])
def test_the_numbers_of_an_answer_add_up(servers: Servers, name: str) -> None:
    for answer in ask(servers.url(name), range(20), {**BASE, "n_predict": 30, "ignore_eos": True}):
        row = answer["timings"]
        timings = Timings.from_json(row)
        assert timings is not None and timings.accepted is not None and timings.drafted is not None
        assert timings.predicted_n == 30 == 1 + timings.accepted + sum(timings.steps_of_length)
        assert timings.verify_steps == sum(timings.steps_of_length[1:])
        assert timings.drafted == sum(n * steps for n, steps in enumerate(timings.steps_of_length))
        assert timings.accepted == sum(timings.accepted_at)
        if timings.verify_steps:
            assert timings.mean_accepted_length == pytest.approx(1 + timings.accepted / timings.verify_steps)


def test_a_stream_tells_the_same_numbers_in_its_last_event(servers: Servers) -> None:
    options: dict[str, Any] = {**BASE, "n_predict": 30, "ignore_eos": True, "seed": 3}
    timings = servers.client("v2").complete(PROMPT, **options).timings
    assert timings is not None
    plain = Timings.from_json(ask(servers.url("v2"), [3], options)[0]["timings"])
    assert plain is not None
    assert (timings.accepted_at, timings.steps_of_length, timings.verify_steps) == (
        plain.accepted_at,
        plain.steps_of_length,
        plain.verify_steps,
    )


def test_an_answer_too_short_for_a_draft_says_that_nothing_was_drafted(servers: Servers) -> None:
    row = ask(servers.url("v2"), [1], {**BASE, "n_predict": 2, "ignore_eos": True})[0]["timings"]
    timings = Timings.from_json(row)
    assert timings is not None
    assert (timings.drafted, timings.accepted, timings.verify_steps) == (0, 0, 0)
    assert (timings.steps_of_length, timings.mean_accepted_length) == ((1,), None)


def test_without_a_drafter_timings_do_not_speak_of_drafts(servers: Servers) -> None:
    row = ask(servers.url("alone"), [1], BASE)[0]["timings"]
    assert not [key for key in row if key.startswith("draft")]
