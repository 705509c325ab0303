"""What one generation cost and what drafting gave, without guessing.

Rates are computed here from counts and times, since bases of llama.cpp differ in theirs; the first
token comes out of the prompt's evaluation, so `n` tokens take `n - 1` steps of the measured time
(llama.cpp `tools/server/server-common.h`, `server_task_stats`).

The mean accepted length is 1 + accepted / verify steps. Our patched llama-server tells the steps in the
`timings` of each answer, an older one only in the counters of `/metrics`. Where neither does, the length
is None, shown as n/a.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

_COUNTER = re.compile(r"^llamacpp:([a-z0-9_]+)(?:\{position=\"(\d+)\"\})?\s+(\S+)$")

_COUNTS = ("cache_n", "draft_n", "draft_n_accepted", "draft_n_verif_steps")
_LISTS = ("draft_n_accepted_per_pos", "draft_n_steps_per_len")


@dataclass(frozen=True)
class Timings:
    """One request: tokens, milliseconds, and what was drafted. None or empty: the engine did not say.

    `accepted_at[i]`: steps that accepted drafted token i. `steps_of_length[n]`: steps in which n tokens were
    drafted, n = 0 for those without a draft.
    """

    prompt_n: int
    prompt_ms: float
    predicted_n: int
    predicted_ms: float
    cached_n: int | None = None
    drafted: int | None = None
    accepted: int | None = None
    verify_steps: int | None = None
    accepted_at: tuple[int, ...] = ()
    steps_of_length: tuple[int, ...] = ()

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> Timings | None:
        """llama-server's `timings` object; None when it lacks a count or a time, or holds no number."""
        try:
            needed = [float(row[key]) for key in ("prompt_n", "prompt_ms", "predicted_n", "predicted_ms")]
            cached, drafted, accepted, steps = (_whole(row.get(key)) for key in _COUNTS)
            at, of_length = (tuple(int(n) for n in row.get(key) or ()) for key in _LISTS)
        except (KeyError, TypeError, ValueError, OverflowError):
            return None
        if not all(math.isfinite(value) and value >= 0 for value in needed):
            return None
        first = (int(needed[0]), needed[1], int(needed[2]), needed[3])
        return cls(*first, cached, drafted, accepted, steps, at, of_length)

    @property
    def prompt_per_second(self) -> float | None:
        """Prompt tokens evaluated (not taken from the cache) per second."""
        return 1e3 * self.prompt_n / self.prompt_ms if self.prompt_n and self.prompt_ms > 0 else None

    @property
    def predicted_per_second(self) -> float | None:
        """Generated tokens per second, None for fewer than two."""
        steps = self.predicted_n - 1
        return 1e3 * steps / self.predicted_ms if steps > 0 and self.predicted_ms > 0 else None

    @property
    def acceptance(self) -> float | None:
        """Accepted / drafted tokens; every drafted token counts, tested or not."""
        return self.accepted / self.drafted if self.drafted and self.accepted is not None else None

    @property
    def mean_accepted_length(self) -> float | None:
        """Tokens a verify step gives, the target's own included; None when the steps are not known."""
        if not self.verify_steps or self.accepted is None:
            return None
        return 1 + self.accepted / self.verify_steps

    def as_json(self) -> dict[str, Any]:
        """Plain values, null where the engine did not say."""
        return {
            "prompt_n": self.prompt_n,
            "prompt_ms": self.prompt_ms,
            "prompt_per_second": self.prompt_per_second,
            "cached_n": self.cached_n,
            "predicted_n": self.predicted_n,
            "predicted_ms": self.predicted_ms,
            "predicted_per_second": self.predicted_per_second,
            "drafted": self.drafted,
            "accepted": self.accepted,
            "verify_steps": self.verify_steps,
            "accepted_at": list(self.accepted_at),
            "steps_of_length": list(self.steps_of_length),
            "mean_accepted_length": self.mean_accepted_length,
        }


def _whole(value: Any) -> int | None:
    return None if value is None else int(value)


@dataclass(frozen=True)
class Counters:
    """The drafting counters of `/metrics`, since the server's start. None: this build has no such counter."""

    predicted: int | None = None
    drafted: int | None = None
    accepted: int | None = None
    verify_steps: int | None = None
    accepted_at: tuple[int, ...] = ()

    @classmethod
    def from_metrics(cls, text: str) -> Counters:
        """Prometheus text of llama-server; counters that are missing or no number stay None."""
        plain: dict[str, int] = {}
        at: dict[int, int] = {}
        for line in text.splitlines():
            found = _COUNTER.match(line.strip())
            value = _counter_value(found.group(3)) if found else None
            if found is None or value is None:
                continue
            if found.group(2) is not None:
                at[int(found.group(2))] = value
            else:
                plain[found.group(1)] = value
        return cls(
            predicted=plain.get("tokens_predicted_total"),
            drafted=plain.get("spec_decode_num_draft_tokens_total"),
            accepted=plain.get("spec_decode_num_accepted_tokens_total"),
            verify_steps=plain.get("spec_decode_num_drafts_total"),
            accepted_at=tuple(at.get(index, 0) for index in range(max(at, default=-1) + 1)),
        )

    def since(self, before: Counters) -> Counters:
        """The difference to an earlier reading; None where either reading lacks the counter."""
        pairs = zip(
            _pad(self.accepted_at, before.accepted_at),
            _pad(before.accepted_at, self.accepted_at),
            strict=True,
        )
        return Counters(
            predicted=_minus(self.predicted, before.predicted),
            drafted=_minus(self.drafted, before.drafted),
            accepted=_minus(self.accepted, before.accepted),
            verify_steps=_minus(self.verify_steps, before.verify_steps),
            accepted_at=tuple(now - then for now, then in pairs),
        )


def _counter_value(text: str) -> int | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return int(value) if math.isfinite(value) else None


def _pad(values: tuple[int, ...], other: tuple[int, ...]) -> tuple[int, ...]:
    return values + (0,) * (len(other) - len(values))


def _minus(now: int | None, then: int | None) -> int | None:
    return None if now is None or then is None else now - then


def with_verify_steps(timings: Timings, moved: Counters) -> Timings:
    """`timings` with the verify steps that `/metrics` counted meanwhile, if they are this request's alone.

    They are when tokens, drafted and accepted moved by exactly what the request reports; otherwise other
    requests ran too (or the server was started anew) and the steps stay unknown.
    """
    same = (timings.predicted_n, timings.drafted, timings.accepted) == (
        moved.predicted,
        moved.drafted,
        moved.accepted,
    )
    return replace(timings, verify_steps=moved.verify_steps) if same and timings.drafted else timings


def summary(timings: Timings | None) -> str:
    """One line for a person, ending a chat."""
    if timings is None:
        return "no statistics: the answer did not come to its end"
    parts = [
        f"{timings.predicted_n} tokens",
        f"{number(timings.predicted_per_second, 1)} tok/s",
        f"prompt {timings.prompt_n} tokens at {number(timings.prompt_per_second, 1)} tok/s",
    ]
    if not timings.drafted:
        rests = timings.drafted == 0 and timings.steps_of_length
        parts.append("nothing drafted" + (": it does not pay at the moment" if rests else ""))
    else:
        parts.append(f"drafted {timings.drafted}, accepted {number(timings.accepted, 0)}")
        parts.append(f"mean accepted length {number(timings.mean_accepted_length, 2)}")
    return ", ".join(parts)


def number(value: float | None, digits: int) -> str:
    """`value` with so many digits, or n/a."""
    return "n/a" if value is None else f"{value:.{digits}f}"
