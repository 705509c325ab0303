"""One request of benchmarks/drafting.py, its answer asked whole.

dflashcpp's client reads every answer as a stream, which takes 0.4 ms of processor time a token: on the cores
that generate, that is what is to be measured. Whole answers cost nothing while they are made.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from dflashcpp.client import Client, ClientError
from dflashcpp.errors import DflashError
from dflashcpp.stats import Counters, Timings, with_verify_steps

_PATIENCE_SECONDS = 600.0


@dataclass(frozen=True)
class Whole:
    """An answer: text, token ids, what it cost."""

    text: str
    tokens: tuple[int, ...]
    timings: Timings


def ask(client: Client, prompt: str, tokens: int, temperature: float = 0.0, seed: int = 0) -> Whole:
    """At most `tokens` tokens behind `prompt`, which may stand in the slot's cache. Raises DflashError."""
    body = {"prompt": prompt, "n_predict": tokens, "temperature": temperature, "seed": seed}
    body |= {"cache_prompt": True, "return_tokens": True, "stream": False}
    before = _counters(client)
    row = _post(client.url, body)
    timings = Timings.from_json(row.get("timings") or {})
    if timings is None:
        raise DflashError(f"{client.url} told no timings of its answer")
    after = _counters(client)
    if timings.verify_steps is None and before is not None and after is not None:
        timings = with_verify_steps(timings, after.since(before))
    return Whole(str(row["content"]), tuple(int(token) for token in row["tokens"]), timings)


def _counters(client: Client) -> Counters | None:
    with suppress(ClientError):
        return client.counters()
    return None


def _post(url: str, body: dict[str, Any]) -> dict[str, Any]:
    import requests

    try:
        with requests.Session() as session:
            session.trust_env = False  # a proxy has no place between two processes of one machine
            response = session.post(f"{url}/completion", json=body, timeout=_PATIENCE_SECONDS)
            row = response.json()
    except (requests.RequestException, ValueError) as error:
        raise DflashError(f"{url} gave no answer: {error}") from error
    if response.status_code != 200:
        raise DflashError(f"{url} refused a request: {row}")
    return dict(row)
