from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflashcpp.stats import Counters, Timings, summary, with_verify_steps
from tests.support.fake_http import TIMINGS, metrics


def test_rates_come_from_counts_and_times_not_from_the_server() -> None:
    timings = Timings.from_json({**TIMINGS, "predicted_per_second": 1e9})
    assert timings is not None
    assert timings.predicted_per_second == pytest.approx(50.0)  # 10 steps in 200 ms
    assert timings.prompt_per_second == pytest.approx(100.0)


def test_a_single_token_has_no_rate() -> None:
    timings = Timings(1, 10.0, 1, 0.0)
    assert timings.predicted_per_second is None


def test_mean_accepted_length_is_never_guessed() -> None:
    timings = Timings.from_json(TIMINGS)
    assert timings is not None
    assert timings.verify_steps is None
    assert timings.mean_accepted_length is None
    assert "mean accepted length n/a" in summary(timings)


def test_mean_accepted_length_counts_the_targets_own_token() -> None:
    timings = Timings(10, 1.0, 162, 2.0, drafted=115, accepted=45, verify_steps=17)
    assert timings.mean_accepted_length == pytest.approx(1 + 45 / 17)
    assert timings.acceptance == pytest.approx(45 / 115)


def test_the_engine_tells_the_mean_accepted_length_of_one_request() -> None:
    told = {"draft_n_verif_steps": 4, "draft_n_accepted_per_pos": [4, 2], "draft_n_steps_per_len": [1, 0, 4]}
    timings = Timings.from_json({**TIMINGS, **told})
    assert timings is not None
    assert timings.mean_accepted_length == pytest.approx(1 + 6 / 4)
    assert (timings.accepted_at, timings.steps_of_length) == ((4, 2), (1, 0, 4))
    assert "mean accepted length 2.50" in summary(timings)
    assert timings.as_json()["accepted_at"] == [4, 2]


def test_a_drafter_that_was_off_all_the_time_has_no_mean_accepted_length() -> None:
    told = {"draft_n": 0, "draft_n_accepted": 0, "draft_n_verif_steps": 0, "draft_n_steps_per_len": [10]}
    timings = Timings.from_json({**TIMINGS, **told})
    assert timings is not None
    assert (timings.verify_steps, timings.mean_accepted_length, timings.acceptance) == (0, None, None)
    assert "nothing drafted: it does not pay" in summary(timings)


def test_timings_without_drafts_say_so() -> None:
    row = {key: value for key, value in TIMINGS.items() if not key.startswith("draft")}
    timings = Timings.from_json(row)
    assert timings is not None
    assert timings.drafted is None
    assert timings.acceptance is None
    assert summary(timings).endswith("nothing drafted")


@pytest.mark.parametrize(
    "edit",
    [
        {"predicted_ms": None},
        {"predicted_ms": "nan"},
        {"prompt_n": -1},
        {"prompt_ms": "much"},
        {"draft_n": "x"},
        {"draft_n_accepted_per_pos": ["x"]},
        {"draft_n_steps_per_len": 3},
    ],
)
def test_timings_that_make_no_sense_are_void_not_zero(edit: dict[str, object]) -> None:
    assert Timings.from_json({**TIMINGS, **edit}) is None


def test_timings_that_lack_a_key_are_void() -> None:
    for key in ("prompt_n", "prompt_ms", "predicted_n", "predicted_ms"):
        assert Timings.from_json({name: value for name, value in TIMINGS.items() if name != key}) is None


def test_no_statistics_is_a_sentence() -> None:
    assert "no statistics" in summary(None)


def test_counters_of_metrics_are_read_with_their_positions() -> None:
    text = (
        metrics(115, 45, 17, 62)
        + '\nllamacpp:spec_decode_num_accepted_tokens_per_pos_total{position="2"} 3\n'
    )
    counters = Counters.from_metrics(text)
    assert (counters.drafted, counters.accepted, counters.verify_steps, counters.predicted) == (
        115,
        45,
        17,
        62,
    )
    assert counters.accepted_at == (45, 0, 3)


def test_a_build_without_the_counters_gives_none() -> None:
    counters = Counters.from_metrics("llamacpp:tokens_predicted_total 5\n")
    assert (counters.predicted, counters.verify_steps) == (5, None)
    assert counters.since(Counters(predicted=2)).verify_steps is None


def test_verify_steps_are_taken_only_when_the_counters_moved_by_this_request_alone() -> None:
    timings = Timings(1, 1.0, 11, 200.0, drafted=8, accepted=6)
    before = Counters(100, 50, 20, 30)
    alone = Counters(111, 58, 26, 33).since(before)
    assert with_verify_steps(timings, alone).verify_steps == 3
    for other in (
        Counters(112, 58, 26, 33),
        Counters(111, 60, 26, 33),
        Counters(111, 58, 27, 33),
        Counters(11, 8, 6, 3),
    ):
        assert with_verify_steps(timings, other.since(before)).verify_steps is None


@given(st.text(max_size=400))
def test_any_text_of_metrics_is_read(text: str) -> None:
    Counters.from_metrics(text)


@given(
    st.dictionaries(
        st.sampled_from([*TIMINGS, "draft_n_steps_per_len", "other"]),
        st.one_of(st.none(), st.floats(), st.text(), st.integers(), st.lists(st.integers())),
    )
)
def test_any_timings_are_read_or_void(row: dict[str, object]) -> None:
    timings = Timings.from_json(row)
    if timings is not None:
        summary(timings)
        timings.as_json()
