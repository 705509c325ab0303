"""One answer as it arrives: pieces, and at the end the whole with its statistics."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any

from dflashcpp.client import ClientError
from dflashcpp.sse import Event, events
from dflashcpp.stats import Counters, Timings, with_verify_steps

if TYPE_CHECKING:
    import requests

    from dflashcpp.client import Client


@dataclass(frozen=True)
class Piece:
    """What one event brought."""

    text: str = ""
    reasoning: str = ""
    tokens: tuple[int, ...] = ()


@dataclass(frozen=True)
class Answer:
    """A whole answer. `timings` is None when the server sent none or the stream was cut."""

    text: str
    reasoning: str = ""
    tool_calls: tuple[dict[str, Any], ...] = ()
    finish_reason: str | None = None
    timings: Timings | None = None
    tokens: tuple[int, ...] = ()
    probabilities: tuple[dict[str, Any], ...] = ()
    model: str | None = None
    usage: dict[str, Any] | None = None
    slot: int | None = None


class Stream:
    """Iterate for `Piece`s; afterwards `answer` holds the whole. Leaving early cancels the request."""

    def __init__(
        self, client: Client, response: requests.Response, *, chat: bool, before: Counters | None
    ) -> None:
        self._client, self._response, self._chat, self._before = client, response, chat, before
        self._gathered = _Gathered()
        self._complete = False
        self._closed = False
        self._cancelled = False

    def __iter__(self) -> Iterator[Piece]:
        """Pieces in order. Raises ClientError when the stream is cut, falls silent, or reports an error."""
        guard = _Guard(self._response, self._client)
        try:
            for event in events(guard.chunks()):
                piece = self._take(event)
                if piece is not None:
                    guard.answering()
                    yield piece
                if self._complete:
                    return
        except _Broken as error:
            if not self._cancelled:
                raise self._broken(guard) from error
        finally:
            guard.stop()
            self.close()
        if not self._cancelled:
            raise self._broken(guard)

    def finish(self) -> Answer:
        """Read to the end and return the whole answer."""
        for _ in self:
            pass
        return self.answer

    @property
    def answer(self) -> Answer:
        """What has arrived; with statistics only when the stream came to its proper end."""
        timings = self._timings() if self._complete else None
        return self._gathered.answer(timings)

    def close(self) -> None:
        """Close the connection; the server stops generating when it notices."""
        if not self._closed:
            self._closed = True
            self._response.close()

    def cancel(self, wait: float = 10.0) -> bool | None:
        """Stop the generation, and wait until the server's slot is idle.

        True: it is. False: not within `wait` seconds. None: this server does not show its slots.
        """
        self._cancelled = True
        _shut(self._response)
        self.close()
        return self._wait_idle(time.monotonic() + wait)

    def __enter__(self) -> Stream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _wait_idle(self, until: float) -> bool | None:
        while True:
            slots = self._client.slots()
            if slots is None:
                return None
            mine = [slot for slot in slots if self._gathered.slot in (None, slot.get("id"))]
            if not any(slot.get("is_processing") for slot in mine):
                return True
            if time.monotonic() >= until:
                return False
            time.sleep(0.05)

    def _take(self, event: Event) -> Piece | None:
        if event.kind == "comment":
            return None
        if event.text.strip() == "[DONE]":
            self._complete = True
            return None
        try:
            row = json.loads(event.text)
        except ValueError:
            row = None
        if not isinstance(row, dict):
            raise ClientError("invalid", f"{self._client.url} sent an event that is no JSON object")
        if event.kind == "error" or row.get("error") is not None:
            raise self._failed(row.get("error", row))
        try:
            piece = self._gathered.chat_row(row) if self._chat else self._gathered.plain_row(row)
        except (AttributeError, KeyError, IndexError, TypeError) as error:
            raise ClientError("invalid", f"{self._client.url} sent an event of unknown form") from error
        if not self._chat and row.get("stop") is True:
            self._complete = True
        return piece

    def _failed(self, error: Any) -> ClientError:
        message = error.get("message", error) if isinstance(error, dict) else error
        return ClientError(
            "failed",
            f"{self._client.url} failed while answering: {message}",
            status=error.get("code") if isinstance(error, dict) else None,
            partial=self._gathered.answer(None),
        )

    def _broken(self, guard: _Guard) -> ClientError:
        partial = self._gathered.answer(None)
        if guard.silence is not None:
            message = f"{self._client.url} fell silent for {guard.silence:g} s"
            hint = "the server or the way to it hangs: look at its log, or raise the time-out"
            return ClientError("timeout", message, hint=hint, partial=partial)
        message = f"{self._client.url} cut the answer off after {len(partial.text)} characters"
        hint = "the server may have died, or a tunnel closed: the text is incomplete and has no statistics"
        return ClientError("cut", message, hint=hint, partial=partial)

    def _timings(self) -> Timings | None:
        timings = Timings.from_json(self._gathered.timings) if self._gathered.timings else None
        if timings is None or self._before is None or not timings.drafted:
            return timings
        if timings.verify_steps is None and self._gathered.steps_asked is None:
            self._gathered.steps_asked = self._ask_steps(timings)
        return self._gathered.steps_asked or timings

    def _ask_steps(self, timings: Timings) -> Timings:
        """The server counts a request when its slot is released, a moment after the last event."""
        assert self._before is not None
        for _ in range(10):
            with suppress(ClientError):
                now = self._client.counters()
                known = with_verify_steps(timings, now.since(self._before)) if now else timings
                if known.verify_steps is not None or now is None:
                    return known
            time.sleep(0.03)
        return timings


class _Gathered:
    """The parts of an answer, put together."""

    def __init__(self) -> None:
        self.text: list[str] = []
        self.reasoning: list[str] = []
        self.tokens: list[int] = []
        self.probabilities: list[dict[str, Any]] = []
        self.tools: dict[int, dict[str, Any]] = {}
        self.finish: str | None = None
        self.model: str | None = None
        self.usage: dict[str, Any] | None = None
        self.timings: dict[str, Any] | None = None
        self.steps_asked: Timings | None = None
        self.slot: int | None = None

    def chat_row(self, row: dict[str, Any]) -> Piece | None:
        self._common(row)
        choices = row.get("choices") or []
        if not choices:
            return None
        self.finish = choices[0].get("finish_reason") or self.finish
        delta = choices[0].get("delta") or {}
        text, reasoning = delta.get("content") or "", delta.get("reasoning_content") or ""
        for call in delta.get("tool_calls") or []:
            self._tool(call)
        return self._piece(text, reasoning, ())

    def plain_row(self, row: dict[str, Any]) -> Piece | None:
        self._common(row)
        self.finish = row.get("stop_type") or self.finish
        if row.get("id_slot", -1) >= 0:
            self.slot = row["id_slot"]
        self.probabilities += row.get("completion_probabilities") or []
        return self._piece(row.get("content") or "", "", tuple(row.get("tokens") or ()))

    def _common(self, row: dict[str, Any]) -> None:
        self.timings = row.get("timings") or self.timings
        self.usage = row.get("usage") or self.usage
        self.model = row.get("model") or self.model

    def _piece(self, text: str, reasoning: str, tokens: tuple[int, ...]) -> Piece | None:
        self.text.append(text)
        self.reasoning.append(reasoning)
        self.tokens += tokens
        return Piece(text, reasoning, tokens) if text or reasoning or tokens else None

    def _tool(self, call: dict[str, Any]) -> None:
        """A tool call comes in parts: name and id once, the arguments piece by piece."""
        index = call.get("index", 0)
        whole = self.tools.setdefault(
            index, {"id": "", "type": "function", "function": {"name": "", "arguments": ""}}
        )
        function = call.get("function") or {}
        whole["id"] = call.get("id") or whole["id"]
        whole["function"]["name"] += function.get("name") or ""
        whole["function"]["arguments"] += function.get("arguments") or ""

    def answer(self, timings: Timings | None) -> Answer:
        return Answer(
            text="".join(self.text),
            reasoning="".join(self.reasoning),
            tool_calls=tuple(self.tools[index] for index in sorted(self.tools)),
            finish_reason=self.finish,
            timings=timings,
            tokens=tuple(self.tokens),
            probabilities=tuple(self.probabilities),
            model=self.model,
            usage=self.usage,
            slot=self.slot,
        )


class _Broken(Exception):
    """The connection broke, or was shut, while it was read."""


class _Guard:
    """Ends a read that has been silent for too long, by shutting the socket from another thread."""

    def __init__(self, response: requests.Response, client: Client) -> None:
        self._response, self._client = response, client
        self._first_by = time.monotonic() + client.first_token_timeout
        self._waiting: float | None = None
        self._answering = False
        self._over = threading.Event()
        self.silence: float | None = None
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def chunks(self) -> Iterator[bytes]:
        """Bytes as they come. Only waiting counts as silence, not what the reader does in between."""
        while True:
            self._waiting = time.monotonic()
            try:
                chunk = self._response.raw.read1(65536)
            except _read_errors() as error:
                raise _Broken from error
            self._waiting = None
            if not chunk:
                return
            yield chunk

    def answering(self) -> None:
        """The first token is here: from now on only silence counts."""
        self._answering = True

    def stop(self) -> None:
        self._over.set()

    def _watch(self) -> None:
        while not self._over.wait(min(0.1, self._client.idle_timeout / 4)):
            self.silence = self._too_long(time.monotonic())
            if self.silence is not None:
                _shut(self._response)
                return

    def _too_long(self, now: float) -> float | None:
        """The time-out that has passed, in seconds."""
        since = self._waiting
        if since is None:
            return None
        if self._answering:
            return self._client.idle_timeout if now - since > self._client.idle_timeout else None
        return self._client.first_token_timeout if now > self._first_by else None


def _read_errors() -> tuple[type[Exception], ...]:
    """What reading a broken, shut or closed connection raises."""
    import http.client

    import urllib3

    return (OSError, http.client.HTTPException, urllib3.exceptions.HTTPError, AttributeError, ValueError)


def _shut(response: requests.Response) -> None:
    """Wake a thread that reads from this response: it sees the end of the stream."""
    with suppress(Exception):
        getattr(response.raw, "shutdown", response.raw.close)()
