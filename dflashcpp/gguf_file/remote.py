"""The beginning of a file on a web server, by HTTP ranges: a header costs at most twice its size."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from types import TracebackType
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from dflashcpp.errors import DflashError
from dflashcpp.gguf_file.parse import MAX_HEADER

if TYPE_CHECKING:
    import requests

_FIRST = 1 << 19  # bytes
_CHUNK = 1 << 16
_TIMEOUT = (10.0, 30.0)  # seconds: connect, each read
_TRIES = 3
_UNKNOWN_SIZE = MAX_HEADER


def hub_endpoint() -> str:
    """The Hugging Face server: `HF_ENDPOINT` or the public one."""
    return os.environ.get("HF_ENDPOINT", "").rstrip("/") or "https://huggingface.co"


def _is_hub(url: str) -> bool:
    try:
        ours, hub = urlsplit(url), urlsplit(hub_endpoint())
    except ValueError as error:
        raise DflashError(f"{url} is no usable address: {error}") from None
    return (ours.scheme, ours.netloc) == (hub.scheme, hub.netloc)


class RemoteSource:
    """A file behind a URL for `parse`; use it as a context manager.

    `token` (or `HF_TOKEN`) goes to the Hub's own host only, not to where it redirects. A server that
    ignores ranges is read as one stream which is closed as soon as the header is complete.
    """

    def __init__(self, url: str, *, token: str | None = None) -> None:
        import requests

        self.name = url
        self._hub = _is_hub(url)
        if self._hub and os.environ.get("HF_HUB_OFFLINE", "").upper() in {"1", "ON", "YES", "TRUE"}:
            raise DflashError(f"{url} cannot be read: HF_HUB_OFFLINE is set", hint="download the file first")
        self._url = url.replace("/blob/", "/resolve/", 1) if self._hub else url
        self._headers = {"Accept-Encoding": "identity", "User-Agent": "dflashcpp"}
        token = token or os.environ.get("HF_TOKEN")
        if token and self._hub:
            self._headers["Authorization"] = f"Bearer {token.strip()}"
        self._session = requests.Session()
        self._stream: Iterator[bytes] | None = None
        self._response: requests.Response | None = None
        self._data = bytearray()
        self.size = _UNKNOWN_SIZE
        self.fetched = 0  # bytes received, for tests and reports
        self._grow(_FIRST)

    def upto(self, end: int) -> bytearray:
        """At least the first `end` bytes of the file."""
        if len(self._data) < end:
            self._grow(max(end, 2 * len(self._data)))
        if len(self._data) < end:
            raise DflashError(f"{self.name}: the server stopped after {len(self._data)} bytes of {self.size}")
        return self._data

    def _grow(self, goal: int) -> None:
        """Retry what may pass (a lost connection, a busy server), from where we are."""
        import requests

        for attempt in range(_TRIES):
            goal = min(goal, self.size)
            if len(self._data) >= goal:
                return
            try:
                self._receive(goal)
            except (
                requests.ConnectionError,
                requests.Timeout,
                requests.exceptions.ChunkedEncodingError,
            ) as error:
                self._close_stream()
                if attempt == _TRIES - 1:
                    raise DflashError(
                        f"{self.name} cannot be read: {_reason(error)}",
                        hint="check the network and the address",
                    ) from None
                time.sleep(0.2 * 2**attempt)
            except requests.RequestException as error:
                raise DflashError(f"{self.name} cannot be read: {_reason(error)}") from None

    def _receive(self, goal: int) -> None:
        stream = self._stream or self._open(goal)
        for piece in stream:
            self._data += piece
            self.fetched += len(piece)
            if len(self._data) >= goal:
                break
        else:
            self._ended()
        if self._response is not None and self._response.status_code == 206:
            self._close_stream()

    def _ended(self) -> None:
        """The body is over: of a range that is normal, of a whole file it tells the size."""
        assert self._response is not None
        if self._response.status_code == 200:
            self.size = len(self._data)
        self._close_stream()

    def _open(self, goal: int) -> Iterator[bytes]:
        begin = len(self._data)
        response = self._session.get(
            self._url,
            headers={**self._headers, "Range": f"bytes={begin}-{goal - 1}"},
            stream=True,
            timeout=_TIMEOUT,
        )
        self._response = response
        if response.status_code == 416:
            self.size = begin
            return iter(())
        self._check_status(response)
        if response.status_code == 206:
            self._check_range(response, begin)
        else:
            self._restart(response)
        self._stream = response.iter_content(_CHUNK)
        return self._stream

    def _restart(self, response: requests.Response) -> None:
        """The server ignored the range and sends the file from its beginning."""
        self._data = bytearray()
        length = response.headers.get("Content-Length", "")
        if length.isdigit():
            self.size = int(length)

    def _check_range(self, response: requests.Response, begin: int) -> None:
        text = response.headers.get("Content-Range", "")
        match = re.fullmatch(r"bytes (\d+)-\d+/(\d+|\*)", text.strip())
        if not match or int(match[1]) != begin:
            raise DflashError(f"{self.name}: the server answered a range request with {text or 'no range'!r}")
        if match[2] != "*":
            total = int(match[2])
            if begin and total != self.size:
                raise DflashError(f"{self.name} changed on the server while it was read", hint="try again")
            self.size = total

    def _check_status(self, response: requests.Response) -> None:
        import requests

        code = response.status_code
        if code in (200, 206):
            return
        if code == 429 or code >= 500:
            raise requests.ConnectionError(f"the server answered {code} {response.reason}")
        hint = None
        if code == 401 or code == 403:
            hint = (
                "set HF_TOKEN to a token that may read it; a gated model must be accepted on its page first"
            )
        raise DflashError(
            f"{self.name} cannot be read: the server answered {code} {response.reason}", hint=hint
        )

    def _close_stream(self) -> None:
        if self._response is not None:
            self._response.close()
        self._stream = self._response = None

    def __enter__(self) -> RemoteSource:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close_stream()
        self._session.close()


def _reason(error: Exception) -> str:
    """The innermost sentence of a requests error, without object addresses."""
    text = str(error)
    for phrase in (
        "Name or service not known",
        "Connection refused",
        "timed out",
        "Temporary failure in name",
    ):
        if phrase in text:
            return phrase.lower()
    return re.sub(r"<[^>]*>:?\s*", "", text)[:200] or type(error).__name__
