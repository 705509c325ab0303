from __future__ import annotations

import json
import threading
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflashcpp.client import Client, ClientError
from dflashcpp.errors import DflashError
from dflashcpp.sse import Event, events
from tests.support.fake_http import (
    CUT,
    FREEZE,
    RESET,
    TIMINGS,
    FakeServer,
    Script,
    chat_steps,
    completion_steps,
    delta,
    event,
    fake_server,
    metrics,
)


def chat_of(steps: list[Any], **options: Any) -> Any:
    with fake_server(Script(chat=lambda body: steps)) as server:
        return Client(server.url, **options).chat("Hi")


def failure_of(steps: list[Any], **options: Any) -> ClientError:
    with pytest.raises(ClientError) as caught:
        chat_of(steps, **options)
    return caught.value


# -- server-sent events ----------------------------------------------------------------------------


def test_events_are_told_from_pings_and_joined_over_lines() -> None:
    raw = b': ping\n\ndata: {"a":\ndata: 1}\n\ndata: [DONE]\r\n\r\n'
    assert list(events([raw])) == [
        Event("comment", "ping"),
        Event("data", '{"a":\n1}'),
        Event("data", "[DONE]"),
    ]


def test_an_error_event_is_told_in_both_dialects() -> None:
    assert list(events([b"event: error\ndata: {}\n\n"])) == [Event("error", "{}")]
    assert list(events([b"error: {}\n\ndata: x\n\n"])) == [Event("error", "{}"), Event("data", "x")]


def test_an_event_without_its_closing_line_is_not_reported() -> None:
    assert list(events([b"data: whole\n\ndata: half"])) == [Event("data", "whole")]


@given(
    st.lists(st.text(st.characters(exclude_characters="\r\n", exclude_categories=["Cs"])), max_size=5),
    st.data(),
)
def test_events_do_not_depend_on_where_the_bytes_are_cut(texts: list[str], data: st.DataObject) -> None:
    ending = data.draw(st.sampled_from(["\n", "\r\n", "\r"]))
    raw = "".join(f"data: {text}{ending}{ending}" for text in texts).encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(raw)), max_size=8)))
    chunks = [raw[start:end] for start, end in zip([0, *cuts], [*cuts, len(raw)], strict=True)]
    assert [one.text for one in events(chunks)] == texts


# -- answers ---------------------------------------------------------------------------------------


def test_an_answer_is_put_together_with_its_statistics() -> None:
    answer = chat_of(chat_steps("Hello"))
    assert (answer.text, answer.finish_reason, answer.model) == ("Hello", "stop", "fake")
    assert answer.timings.predicted_n == 11
    assert answer.usage == {"completion_tokens": 5}


def test_pieces_arrive_one_by_one() -> None:
    with fake_server(Script(chat=lambda body: chat_steps("abc"))) as server:
        stream = Client(server.url).chat("Hi", True)
        assert [piece.text for piece in stream] == ["a", "b", "c"]
        assert stream.answer.text == "abc"


def test_options_go_into_the_request_and_a_text_is_a_user_message() -> None:
    with fake_server() as server:
        Client(f"{server.url}/v1", "secret").chat(
            "Hi", temperature=0, response_format={"type": "json_object"}
        )
        body = server.posts("/v1/chat/completions")[0]
        assert body["messages"] == [{"role": "user", "content": "Hi"}]
        assert (body["temperature"], body["response_format"]) == (0, {"type": "json_object"})
        headers = next(row[3] for row in server.requests if row[0] == "POST")
        assert headers["Authorization"] == "Bearer secret"


def test_reasoning_is_kept_apart_from_the_answer() -> None:
    steps = [event(delta(reasoning_content="hm")), event(delta(content="yes")), event(b"[DONE]")]
    answer = chat_of(steps)
    assert (answer.reasoning, answer.text) == ("hm", "yes")


def test_tool_calls_are_put_together_from_their_parts() -> None:
    def call(**values: Any) -> bytes:
        return event(delta(tool_calls=[{"index": values.pop("index", 0), **values}]))

    steps = [
        call(id="a", function={"name": "add", "arguments": '{"x"'}),
        call(function={"arguments": ":1}"}),
        call(index=1, id="b", function={"name": "mul", "arguments": "{}"}),
        event(delta(finish="tool_calls")),
        event(b"[DONE]"),
    ]
    answer = chat_of(steps)
    assert [one["function"] for one in answer.tool_calls] == [
        {"name": "add", "arguments": '{"x":1}'},
        {"name": "mul", "arguments": "{}"},
    ]
    assert answer.finish_reason == "tool_calls"


def test_a_completion_ends_without_done_and_brings_tokens_and_probabilities() -> None:
    row = {
        "content": "!",
        "tokens": [9],
        "stop": False,
        "completion_probabilities": [{"id": 9, "logprob": -0.1}],
    }
    with fake_server(
        Script(completion=lambda body: [event(row), *completion_steps("", tokens=[3])])
    ) as server:
        answer = Client(server.url).complete([1, 2], n_predict=2)
        assert server.posts("/completion")[0]["prompt"] == [1, 2]
    assert answer.tokens == (9, 3)
    assert answer.probabilities[0]["id"] == 9
    assert (answer.finish_reason, answer.slot) == ("limit", 0)


@pytest.mark.parametrize("place", ["first", "on its own", "last", "with the finish"])
def test_timings_are_taken_from_any_chunk(place: str) -> None:
    timed = {"timings": TIMINGS}
    steps = {
        "first": [event({**delta(content="a"), **timed}), event(b"[DONE]")],
        "on its own": [event(delta(content="a")), event(timed), event(b"[DONE]")],
        "last": [event(delta(content="a")), event({"choices": [], **timed}), event(b"[DONE]")],
        "with the finish": [event({**delta(content="a", finish="stop"), **timed}), event(b"[DONE]")],
    }[place]
    assert chat_of(steps).timings.drafted == 8


def test_pings_are_no_text_and_do_no_harm() -> None:
    steps = [b": ping\n\n", *chat_steps("ab")]
    steps.insert(3, b": another\n\n")
    assert chat_of(steps).text == "ab"


def test_characters_cut_between_chunks_are_whole_in_the_text() -> None:
    raw = event(delta(content="über 火"))
    steps = [raw[index : index + 1] for index in range(len(raw))]
    assert chat_of([*steps, event(b"[DONE]")]).text == "über 火"


# -- answers that are no answers -------------------------------------------------------------------


@pytest.mark.parametrize("end", [[], [CUT], [RESET]])
def test_a_stream_cut_before_its_end_has_no_statistics(end: list[Any]) -> None:
    timed = {**delta(content="half"), "timings": TIMINGS}
    error = failure_of([event(timed), *end])
    assert error.kind == "cut"
    assert error.partial is not None
    assert (error.partial.text, error.partial.timings) == ("half", None)


def test_an_error_inside_the_stream_is_told_with_what_had_arrived() -> None:
    error = failure_of(
        [event(delta(content="ab")), event({"error": {"code": 500, "message": "out of slots"}})]
    )
    assert (error.kind, error.status) == ("failed", 500)
    assert "out of slots" in error.message
    assert error.partial is not None
    assert error.partial.text == "ab"


@pytest.mark.parametrize(
    "row", [b"{broken", b"[1]", b'"text"', b'{"choices": [1]}', b'{"choices": [{"delta": 3}]}']
)
def test_an_event_of_another_form_is_no_crash(row: bytes) -> None:
    assert failure_of([event(row)]).kind == "invalid"


def test_silence_inside_an_answer_is_a_timeout_and_pings_are_not_silence() -> None:
    error = failure_of([event(delta(content="a")), FREEZE], idle_timeout=0.4)
    assert error.kind == "timeout"
    assert "0.4 s" in error.message
    alive = [event(delta(content="a")), 0.8, b": ping\n\n", 0.8, b": ping\n\n", 0.8, *chat_steps("b")]
    assert chat_of(alive, idle_timeout=2).text == "ab"


def test_waiting_for_the_first_token_has_a_limit_of_its_own() -> None:
    steps = [2.0, *chat_steps("late")]
    assert chat_of(steps, idle_timeout=1, first_token_timeout=30).text == "late"
    pings = [step for _ in range(20) for step in (b": ping\n\n", 0.1)]
    assert failure_of([*pings, *chat_steps()], first_token_timeout=0.5).kind == "timeout"


def test_a_slow_reader_is_not_taken_for_a_silent_server() -> None:
    with fake_server(Script(chat=lambda body: chat_steps("abc"))) as server:
        stream = Client(server.url, idle_timeout=0.2).chat("Hi", True)
        for _ in stream:
            time.sleep(0.4)
        assert stream.answer.text == "abc"


# -- refusals and retries --------------------------------------------------------------------------


def test_the_servers_own_words_are_in_the_error() -> None:
    body = json.dumps({"error": {"code": 400, "message": "'messages' is required", "type": "x"}}).encode()
    with fake_server(Script(refuse={"/v1/chat/completions": (400, body)})) as server:
        with pytest.raises(ClientError, match="'messages' is required") as caught:
            Client(server.url).chat("Hi")
        assert (caught.value.kind, caught.value.status) == ("refused", 400)
        assert len(server.posts("/v1/chat/completions")) == 1


def test_an_error_page_is_no_crash() -> None:
    script = Script(refuse={"/v1/chat/completions": (502, b"<html>bad gateway</html>")})
    with fake_server(script) as server, pytest.raises(ClientError, match="HTTP status 502"):
        Client(server.url).chat("Hi")


def test_a_loading_server_is_tried_again() -> None:
    script = Script(refuse={"/v1/chat/completions": (503, b'{"error": {"message": "Loading model"}}')})
    with fake_server(script) as server:
        threading.Timer(0.3, script.refuse.clear).start()
        assert Client(server.url, retries=4).chat("Hi").text == "Hello"
        with_none = Client(server.url, retries=0)
        script.refuse["/v1/chat/completions"] = (503, b'{"error": {"message": "Loading model"}}')
        with pytest.raises(ClientError, match="Loading model") as caught:
            with_none.chat("Hi")
        assert caught.value.kind == "loading"


def test_a_refused_connection_is_tried_again_and_then_told() -> None:
    with fake_server() as server:
        url, port = server.url, server.port
    with pytest.raises(ClientError, match="nothing listens") as caught:
        Client(url, retries=1).chat("Hi")
    assert caught.value.kind == "unreachable"
    late = []

    def start_late() -> None:
        late.append(FakeServer(Script(), port))
        late[0].start()

    threading.Timer(0.3, start_late).start()
    assert Client(url, retries=4).chat("Hi").text == "Hello"
    late[0].stop()


def test_a_request_that_was_sent_is_never_sent_twice() -> None:
    script = Script(chat=lambda body: [CUT])
    with fake_server(script) as server:
        with pytest.raises(ClientError) as caught:
            Client(server.url, retries=5).chat("Hi")
        assert caught.value.kind == "cut"
        assert len(server.posts("/v1/chat/completions")) == 1


def test_an_address_that_is_none_is_refused() -> None:
    for url in ("127.0.0.1:8080", "ftp://x", "http://"):
        with pytest.raises(DflashError, match="no address"):
            Client(url)


def test_a_stranger_on_the_port_is_told() -> None:
    with (
        fake_server(Script(json={"/props": [1, 2]})) as server,
        pytest.raises(ClientError, match="did not answer as"),
    ):
        Client(server.url).props()


# -- state -----------------------------------------------------------------------------------------


def test_health_has_three_states() -> None:
    with fake_server(Script(health=[503, 200])) as server:
        client = Client(server.url)
        assert [client.health(), client.health()] == ["loading", "ready"]
    assert Client(server.url, retries=0).health() == "unreachable"


def test_speculative_is_none_where_the_server_does_not_say() -> None:
    for slots, expected in ((None, None), ([{"id": 0}], None), ([{"speculative": True}], True)):
        with fake_server(Script(slots=slots)) as server:
            assert Client(server.url).speculative() is expected


def test_verify_steps_come_from_metrics_when_the_request_was_alone() -> None:
    counted = {"now": metrics(100, 50, 20, 30)}

    def answer(body: Any) -> list[Any]:
        counted["now"] = metrics(108, 56, 23, 41)
        return chat_steps()

    with fake_server(Script(metrics=lambda: counted["now"], chat=answer)) as server:
        timings = Client(server.url).chat("Hi").timings
    assert timings is not None
    assert timings.verify_steps == 3
    assert timings.mean_accepted_length == pytest.approx(3.0)


def test_verify_steps_stay_unknown_when_others_ran_too_or_metrics_are_off() -> None:
    counted = {"now": metrics(100, 50, 20, 30)}

    def answer(body: Any) -> list[Any]:
        counted["now"] = metrics(150, 80, 40, 99)
        return chat_steps()

    for script in (Script(metrics=lambda: counted["now"], chat=answer), Script(chat=answer)):
        with fake_server(script) as server:
            timings = Client(server.url).chat("Hi").timings
        assert timings is not None
        assert timings.mean_accepted_length is None


def test_cancelling_waits_until_the_slot_is_idle() -> None:
    slots = [{"id": 0, "is_processing": True}]
    with fake_server(Script(slots=slots, chat=lambda body: [*chat_steps("abc")[:3], FREEZE])) as server:
        stream = Client(server.url).chat("Hi", True)
        pieces = iter(stream)
        next(pieces)
        threading.Timer(0.3, lambda: slots[0].update(is_processing=False)).start()
        assert stream.cancel() is True
        assert slots[0]["is_processing"] is False
        assert list(pieces) == []
        assert stream.answer.timings is None


def test_cancelling_says_when_the_slot_stays_busy_or_is_not_shown() -> None:
    for slots, expected in (([{"id": 0, "is_processing": True}], False), (None, None)):
        with fake_server(Script(slots=slots, chat=lambda body: [FREEZE])) as server:
            assert Client(server.url).chat("Hi", True).cancel(wait=0.2) is expected


def test_a_proxy_in_the_environment_does_not_stand_before_this_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    assert chat_of(chat_steps("x")).text == "x"
