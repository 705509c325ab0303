"""Server-sent events, as far as llama-server and the OpenAI dialect use them.

Lines end in LF, CRLF or CR; a line that opens with `:` is a comment (llama-server's ping); several `data:`
lines of one event are joined by a newline (HTML standard, section 9.2).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Event:
    """One event. `kind` is `data`, `comment` (a sign of life) or `error`."""

    kind: str
    text: str


def events(chunks: Iterable[bytes]) -> Iterator[Event]:
    """Events of a byte stream that may be cut anywhere, also inside a character.

    An event that is not closed by an empty line is not reported: the stream was cut inside it.
    """
    data: list[str] = []
    kind = "data"
    for line in _lines(chunks):
        if not line:
            if data:
                yield Event(kind, "\n".join(data))
            data, kind = [], "data"
        elif line.startswith(":"):
            yield Event("comment", line[1:].strip())
        else:
            name, _, value = line.partition(":")
            value = value.removeprefix(" ")
            if name in ("data", "error"):
                data.append(value)
            if name == "error" or (name == "event" and value == "error"):
                kind = "error"


def _lines(chunks: Iterable[bytes]) -> Iterator[str]:
    rest = b""
    after_cr = False
    for chunk in chunks:
        if not chunk:
            continue
        if after_cr and chunk.startswith(b"\n"):
            chunk = chunk[1:]
        after_cr = chunk.endswith(b"\r")
        rest += chunk
        *whole, rest = rest.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
        for line in whole:
            yield line.decode("utf-8", errors="replace")
