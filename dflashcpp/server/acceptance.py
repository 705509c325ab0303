"""Watching a running server for drafts that are never accepted: the text is right, the gain is gone."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path

from dflashcpp.client import Client, ClientError
from dflashcpp.server import diagnose

EVERY_SECONDS = 15.0
ENOUGH_DRAFTED = 200
HARDLY_ANY = 0.02


class AcceptanceWatch:
    """Looks at the counters of `/metrics` now and then, and tells once when hardly a draft is accepted.

    Published faults of this kind accept 0 to 2 % (a quantised draft cache, weights that overflow, a
    drafter of another target); a working drafter accepts more on any text.
    """

    def __init__(self, log: Path, every: float = EVERY_SECONDS) -> None:
        self._log, self._every = log, every
        self._next = time.monotonic() + every
        self._told = False

    def look(self, client: Client) -> str | None:
        """One sentence, once; None when it is not time to look, nothing is wrong, or nobody can tell."""
        if self._told or time.monotonic() < self._next:
            return None
        self._next = time.monotonic() + self._every
        counters = None
        with suppress(ClientError):
            counters = client.counters()
        if counters is None or counters.accepted is None or (counters.drafted or 0) < ENOUGH_DRAFTED:
            return None
        drafted, accepted = int(counters.drafted or 0), counters.accepted
        if accepted > HARDLY_ANY * drafted:
            return None
        self._told = True
        return f"{accepted} of {drafted} drafted tokens were accepted: {self._reason()}"

    def _reason(self) -> str:
        found = diagnose.diagnose(diagnose.tail(self._log))
        if found is not None and found.kind == "drafting":
            return f"{found.cause}; {found.fix}"
        return "the drafter does not fit; `dflashcpp verify` compares it with its source"
