"""When greedy texts part: tie or fault, decided by what the target itself says (a fake target here)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dflashcpp import demo
from dflashcpp.agreement import Agreement, compare, first_difference
from dflashcpp.client import Client
from dflashcpp.errors import DflashError
from dflashcpp.stats import Timings
from tests.support.fake_http import Script, completion_steps, event, fake_server

PLAIN = [1, 2, 3, 4, 5, 6, 7]


def target(
    plain: list[int], *, second: dict[int, float], together: float, alone: float = -0.7, late: bool = False
) -> Script:
    """A target whose greedy answer is `plain`; `second` are its other candidates where the texts part.

    Evaluated a few rows together, its log-probabilities move by `together`; `late`: behind its answer only.
    """

    def complete(body: dict[str, Any]) -> list[Any]:
        count = body["n_predict"]
        first = len(body["prompt"]) - 1
        moved = together if body["cache_prompt"] and (not late or first >= len(plain)) else 0.0
        ends = len(plain) + 1 - first
        count = count if body.get("ignore_eos") or body["cache_prompt"] else min(count, ends)
        rows = []
        for index in range(first, first + count):
            top = {plain[index] if index < len(plain) else 99: alone, **second}
            likely = [{"id": token, "logprob": value + moved} for token, value in top.items()]
            rows.append({"id": plain[index] if index < len(plain) else 99, "top_logprobs": likely})
        row = {
            "content": "",
            "tokens": [row["id"] for row in rows],
            "stop": False,
            "completion_probabilities": rows,
        }
        return [event(row), *completion_steps("", tokens=[])]

    return Script(
        completion=complete,
        json={
            "/detokenize": {"content": "word"},
            "/props": {"eos_token": "<end>"},
            "/tokenize": {"tokens": [99]},
        },
    )


def verdict(script: Script, drafted: list[int], plain: list[int] = PLAIN) -> Agreement:
    with fake_server(script) as server:
        return compare(Client(server.url), [0], plain, drafted)


def test_first_difference_counts_an_early_end() -> None:
    assert first_difference([1, 2], [1, 2]) is None
    assert first_difference([1, 2, 3], [1, 9, 3]) == 1
    assert first_difference([1, 2], [1, 2, 3]) == 2


def test_equal_answers_ask_the_target_nothing() -> None:
    with fake_server(target(PLAIN, second={}, together=0)) as server:
        assert compare(Client(server.url), [0], PLAIN, PLAIN).verdict == "identical"
        assert server.requests == []


def test_a_gap_within_the_measured_rounding_is_a_tie_with_both_log_probabilities() -> None:
    found = verdict(target(PLAIN, second={8: -0.71}, together=0.01), [1, 2, 8, 9])
    assert (found.verdict, found.at) == ("tie", 2)
    assert found.plain is not None
    assert found.drafted is not None
    assert (found.plain.token, found.plain.logprob) == (3, -0.7)
    assert (found.drafted.token, found.drafted.logprob) == (8, -0.71)
    assert found.gap == pytest.approx(0.01)
    assert found.rounding == pytest.approx(0.01)
    assert "a tie at token 2" in found.text()


def test_rounding_is_measured_at_enough_places_wherever_texts_part() -> None:
    for drafted in ([8], [1, 8], [1, 2, 3, 4, 5, 6, 8]):
        found = verdict(target(PLAIN, second={8: -0.71}, together=0.01, late=True), drafted)
        assert (found.verdict, found.positions) == ("tie", 9)


def test_a_gap_above_the_rounding_is_a_fault() -> None:
    found = verdict(target(PLAIN, second={8: -0.9}, together=0.01), [1, 2, 8, 9])
    assert (found.verdict, found.agrees) == ("different", False)
    assert "DIFFERENT at token 2" in found.text()


def test_without_any_rounding_no_gap_is_a_tie() -> None:
    assert verdict(target(PLAIN, second={8: -0.7001}, together=0.0), [1, 2, 8]).verdict == "different"
    assert verdict(target(PLAIN, second={8: -0.7}, together=0.0), [1, 2, 8]).verdict == "tie"


def test_a_token_the_target_does_not_even_consider_is_a_fault() -> None:
    found = verdict(target(PLAIN, second={8: -0.7}, together=5.0), [1, 2, 77])
    assert (found.verdict, found.gap) == ("different", None)
    assert "not among the likeliest" in found.text()


def test_an_answer_that_ends_early_is_judged_by_the_end_token() -> None:
    assert verdict(target(PLAIN, second={99: -0.7}, together=0.01), PLAIN[:4]).verdict == "tie"
    assert verdict(target(PLAIN, second={99: -3.0}, together=0.01), PLAIN[:4]).verdict == "different"


def test_a_target_that_does_not_repeat_itself_cannot_be_compared() -> None:
    with pytest.raises(DflashError, match="another greedy answer the second time"):
        verdict(target([1, 9, 3], second={}, together=0.0), [1, 2, 8], [1, 2, 3])


# -- what the demo calls a success -----------------------------------------------------------------


def asked(kind: str = "code", verdict: str = "identical", **drafted: Any) -> demo.Asked:
    plain = Timings(10, 100.0, 101, 1000.0)
    timings = {"drafted": 40, "accepted": 30, "verify_steps": 10, **drafted}
    with_drafter = Timings(10, 100.0, 101, 500.0, **timings)
    return demo.Asked(kind, "question", "text", Agreement(verdict, 1), plain, with_drafter)


def test_speed_is_shown_as_a_ratio_of_rates() -> None:
    assert asked().ratio == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("one", "text"),
    [
        (asked(accepted=5), "mean accepted length on code: 1.50"),
        (asked(verify_steps=None), "mean accepted length on code: n/a"),
    ],
)
def test_a_coding_answer_that_accepts_too_little_is_a_problem(one: demo.Asked, text: str) -> None:
    assert any(text in problem for problem in demo._problems([one]))


def test_prose_may_accept_little_but_no_text_may_differ() -> None:
    assert demo._problems([asked(), asked("prose", accepted=1)]) == []
    different = demo.Asked(
        "prose", "q", "t", Agreement("different", 3, *_candidates()), asked().plain, asked().drafted
    )
    assert any("changed the prose answer" in problem for problem in demo._problems([different]))


def _candidates() -> tuple[Any, Any]:
    from dflashcpp.agreement import Candidate

    return Candidate(1, "a", -0.1), Candidate(2, "b", None)


def test_the_result_is_plain_data() -> None:
    import json

    result = demo.DemoResult(Path("s"), "v", Path("t"), Path("d"), 1, 4, (asked(),), {}, (), ())
    data = json.loads(json.dumps(result.to_dict()))
    assert data["pass"] is True
    assert data["questions"][0]["with_drafter"]["mean_accepted_length"] == pytest.approx(4.0)
    headers, rows = demo.table(result)
    assert dict(zip(headers, rows[0], strict=True))["ratio"] == "2.00"
