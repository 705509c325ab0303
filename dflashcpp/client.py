"""A client for llama-server, ours or anybody's: chat and completion, streamed, with statistics.

Every answer is read as a stream, also when the caller wants it whole: so that a dead server is told
from a busy one, and an answer that was cut is never taken for a short one.

What is tried again: a connection that was refused, and a server that is still loading. Neither has
begun to work on the request. A request that was sent is never sent twice.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Literal, overload
from urllib.parse import urlsplit

from dflashcpp.errors import DflashError
from dflashcpp.stats import Counters

if TYPE_CHECKING:
    import requests

    from dflashcpp.stream import Answer, Stream

Message = Mapping[str, Any]


class ClientError(DflashError):
    """A request that failed. `kind` says how, for programs.

    `unreachable`, `timeout`, `loading`, `refused` (the server answered with an error), `cut` (the stream
    ended early), `failed` (an error inside the stream), `invalid` (no valid answer). `partial` holds what
    had arrived of an answer, never with statistics.
    """

    def __init__(
        self,
        kind: str,
        message: str,
        *,
        hint: str | None = None,
        status: int | None = None,
        partial: Answer | None = None,
    ) -> None:
        super().__init__(message, hint=hint)
        self.kind = kind
        self.status = status
        self.partial = partial


class Client:
    """Talks to one llama-server at `url` (with or without `/v1`).

    `connect_timeout`: seconds to reach it. `first_token_timeout`: seconds until the answer begins, that is
    for the whole prompt. `idle_timeout`: seconds of silence inside an answer; pings count as life.
    `retries`: how often a refused connection or a loading server is tried again.
    """

    def __init__(
        self,
        url: str,
        api_key: str | None = None,
        *,
        connect_timeout: float = 5.0,
        first_token_timeout: float = 600.0,
        idle_timeout: float = 120.0,
        retries: int = 2,
    ) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        if urlsplit(self.url).scheme not in ("http", "https") or not urlsplit(self.url).hostname:
            raise DflashError(f"'{url}' is no address of a server", hint="write it as http://127.0.0.1:8080")
        self.connect_timeout = connect_timeout
        self.first_token_timeout = first_token_timeout
        self.idle_timeout = idle_timeout
        self.retries = retries
        self._api_key = api_key

    # -- what the server says about itself ----------------------------------------------------

    def health(self) -> str:
        """`ready`, `loading`, or `unreachable`."""
        try:
            status = self._request("GET", "/health", timeout=2.0).status_code
        except ClientError:
            return "unreachable"
        return {200: "ready", 503: "loading"}.get(status, "unreachable")

    def props(self) -> dict[str, Any]:
        """`GET /props`: model_path, model_alias, build_info, total_slots, default settings ..."""
        return self._json("GET", "/props", dict)

    def slots(self) -> list[dict[str, Any]] | None:
        """`GET /slots`; None when the server was started without it."""
        return self._optional("/slots", list)

    def models(self) -> list[dict[str, Any]]:
        """The `data` of `GET /v1/models`: id, aliases, meta."""
        return list(self._json("GET", "/v1/models", dict).get("data", []))

    def counters(self) -> Counters | None:
        """The drafting counters of `/metrics`; None when the server was started without `--metrics`."""
        response = self._request("GET", "/metrics")
        return Counters.from_metrics(response.text) if response.status_code == 200 else None

    def tokenize(self, text: str, *, special: bool = True, begin: bool = False) -> list[int]:
        """Token ids of `text`. `special`: texts such as `<|im_end|>` become their one token. `begin`: with
        the token that opens a prompt, if the model has one.
        """
        body = {"content": text, "add_special": begin, "parse_special": special}
        return list(self._json("POST", "/tokenize", dict, body)["tokens"])

    def detokenize(self, tokens: Sequence[int]) -> str:
        """The text of token ids."""
        return str(self._json("POST", "/detokenize", dict, {"tokens": list(tokens)})["content"])

    def apply_template(self, messages: str | Sequence[Message], **options: Any) -> str:
        """The prompt that the server's chat template makes of `messages`."""
        body = {"messages": _messages(messages), **options}
        return str(self._json("POST", "/apply-template", dict, body)["prompt"])

    def speculative(self) -> bool | None:
        """Whether a drafter is attached (`/slots`); None when the server does not say."""
        slots = self.slots()
        told = [slot["speculative"] for slot in slots or [] if "speculative" in slot]
        return all(told) if told else None

    # -- generation ---------------------------------------------------------------------------

    @overload
    def chat(
        self, messages: str | Sequence[Message], stream: Literal[False] = False, **options: Any
    ) -> Answer: ...

    @overload
    def chat(self, messages: str | Sequence[Message], stream: Literal[True], **options: Any) -> Stream: ...

    def chat(
        self, messages: str | Sequence[Message], stream: bool = False, **options: Any
    ) -> Answer | Stream:
        """`POST /v1/chat/completions`. A plain string is one user message.

        `options` go into the request as they are: `temperature`, `max_tokens`, `seed`, `tools`,
        `response_format`, `chat_template_kwargs` ... Raises ClientError.
        """
        body = {"messages": _messages(messages), "stream_options": {"include_usage": True}, **options}
        return self._generate("/v1/chat/completions", body, stream)

    @overload
    def complete(
        self, prompt: str | Sequence[int], stream: Literal[False] = False, **options: Any
    ) -> Answer: ...

    @overload
    def complete(self, prompt: str | Sequence[int], stream: Literal[True], **options: Any) -> Stream: ...

    def complete(self, prompt: str | Sequence[int], stream: bool = False, **options: Any) -> Answer | Stream:
        """`POST /completion`: continue a text or token ids. `options` as llama-server names them
        (`n_predict`, `temperature`, `n_probs`, `return_tokens` ...). Raises ClientError.
        """
        body = {"prompt": prompt if isinstance(prompt, str) else list(prompt), **options}
        return self._generate("/completion", body, stream)

    def _generate(self, path: str, body: dict[str, Any], stream: bool) -> Answer | Stream:
        from dflashcpp.stream import Stream

        before = self._counters_or_none()
        response = self._open(path, {**body, "stream": True})
        opened = Stream(self, response, chat=path != "/completion", before=before)
        return opened if stream else opened.finish()

    def _counters_or_none(self) -> Counters | None:
        with suppress(ClientError):
            return self.counters()
        return None

    def _open(self, path: str, body: Mapping[str, Any]) -> requests.Response:
        """Send a generation request; the answer's head has arrived when this returns."""
        response = self._request("POST", path, body, timeout=self.first_token_timeout, stream=True)
        if response.status_code == 200:
            return response
        with response:
            raise self._refusal(response)

    # -- plumbing -----------------------------------------------------------------------------

    def _json(self, method: str, path: str, kind: type, body: Mapping[str, Any] | None = None) -> Any:
        response = self._request(method, path, body)
        if response.status_code != 200:
            raise self._refusal(response)
        with suppress(ValueError):
            answer = response.json()
            if isinstance(answer, kind):
                return answer
        raise ClientError("invalid", f"{self.url}{path} did not answer as llama-server does", hint=_STRANGER)

    def _optional(self, path: str, kind: type) -> Any:
        try:
            return self._json("GET", path, kind)
        except ClientError as error:
            if error.status in (404, 501):
                return None
            raise

    def _request(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        timeout: float = 30.0,
        stream: bool = False,
    ) -> requests.Response:
        """One request, tried again only where the server has not begun to work on it."""
        wait = 0.2
        for left in range(self.retries, -1, -1):
            try:
                response = self._send(method, path, body, timeout, stream)
            except ClientError as error:
                if error.kind != "unreachable" or not left:
                    raise
            else:
                if response.status_code != 503 or path == "/health" or not left:
                    return response
                response.close()
            time.sleep(wait)
            wait *= 2
        raise AssertionError("the last round returns or raises")

    def _send(
        self, method: str, path: str, body: Mapping[str, Any] | None, timeout: float, stream: bool
    ) -> requests.Response:
        import requests

        headers = {"Connection": "close"}
        if self._api_key:
            headers["Authorization"] = f"Bearer {self._api_key}"
        with requests.Session() as session:
            session.trust_env = not _is_loopback(self.url)  # a proxy never stands before one's own machine
            try:
                return session.request(
                    method,
                    self.url + path,
                    json=body,
                    headers=headers,
                    timeout=(self.connect_timeout, timeout),
                    stream=stream,
                    allow_redirects=False,
                )
            except requests.RequestException as error:
                raise self._explained(error, timeout) from error

    def _explained(self, error: requests.RequestException, timeout: float) -> ClientError:
        import requests

        if isinstance(error, requests.ConnectTimeout):
            return ClientError(
                "unreachable", f"{self.url} did not take the connection in {self.connect_timeout:g} s"
            )
        if isinstance(error, requests.ReadTimeout):
            return ClientError(
                "timeout",
                f"{self.url} did not begin to answer in {timeout:g} s",
                hint="raise first_token_timeout for a long prompt; a server that hangs shows in its log",
            )
        if isinstance(error, requests.ConnectionError) and _never_connected(error):
            return ClientError(
                "unreachable",
                f"nothing listens at {self.url}",
                hint="start a server with: dflashcpp serve",
            )
        return ClientError(
            "cut",
            f"{self.url} closed the connection before it answered",
            hint="the server may have died: look at its log",
        )

    def _refusal(self, response: requests.Response) -> ClientError:
        """The server's own error in words."""
        try:
            error = json.loads(response.content)["error"]
            message = str(error["message"]) if isinstance(error, dict) else str(error)
        except (ValueError, KeyError, TypeError):
            message = f"HTTP status {response.status_code}, {len(response.content)} bytes that are no JSON"
        status = response.status_code
        kind = "loading" if status == 503 else "refused"
        return ClientError(
            kind, f"{self.url} refused the request: {message}", hint=_HINTS.get(status), status=status
        )


_STRANGER = "another program may hold this port: check it, or choose another with --port"
_HINTS = {
    401: "the server wants an API key: --api-key-file",
    404: "this server does not know the path: is it llama-server?",
    503: "the model is still loading: try again in a moment",
}


def _messages(messages: str | Sequence[Message]) -> list[Message]:
    return [{"role": "user", "content": messages}] if isinstance(messages, str) else list(messages)


def _is_loopback(url: str) -> bool:
    host = urlsplit(url).hostname or ""
    return host in ("localhost", "::1") or host.startswith("127.")


def _never_connected(error: Exception) -> bool:
    """Whether the connection itself failed, so that nothing was sent."""
    from urllib3 import exceptions

    reason = error.args[0] if error.args else error
    reason = getattr(reason, "reason", reason)
    return isinstance(reason, exceptions.NewConnectionError | exceptions.NameResolutionError)
