"""Do two greedy answers agree: identical, parted at a tie, or really different?

Verifying several rows together rounds differently from evaluating one row, so where the target finds two
tokens equally likely either may win. Whether it was such a tie is measured, not assumed: the target gives
its log-probabilities of both tokens there, and the size of its rounding on this very text (the same tokens
evaluated one at a time and a few together). Two log-probabilities that each move by the rounding can change
places when they are no more than twice the rounding apart. Rounding is measured at nine places at least:
where texts part early, the target's own text goes on behind that, past its end if need be.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dflashcpp.client import Client
from dflashcpp.errors import DflashError

_TOP = 8
_STRIDE = 5
_LEAST_ROWS = 8 * _STRIDE + 1
_NEAR = 3.0


@dataclass(frozen=True)
class Candidate:
    """A token one of the answers has at the place where they part, and the target's log-probability of it."""

    token: int | None
    text: str
    logprob: float | None


@dataclass(frozen=True)
class Agreement:
    """`verdict`: `identical`, `tie`, or `different`. The rest says where and by how much, in nats."""

    verdict: str
    at: int | None = None
    plain: Candidate | None = None
    drafted: Candidate | None = None
    gap: float | None = None
    rounding: float | None = None
    positions: int = 0

    @property
    def agrees(self) -> bool:
        """Whether drafting changed nothing that the target itself decides."""
        return self.verdict != "different"

    def text(self) -> str:
        """One line for a person."""
        if self.verdict == "identical":
            return "identical"
        assert self.plain is not None and self.drafted is not None
        both = f"{_shown(self.plain)} without and {_shown(self.drafted)} with the drafter"
        if self.gap is None or self.rounding is None:
            return f"DIFFERENT from token {self.at} on: {both}"
        measured = f"the target's rounding is {self.rounding:.4f} (measured at {self.positions} places)"
        word = "a tie" if self.verdict == "tie" else "DIFFERENT"
        return f"{word} at token {self.at}: {both}, a gap of {self.gap:.4f}; {measured}"


def _shown(one: Candidate) -> str:
    value = "not among the likeliest" if one.logprob is None else f"log-probability {one.logprob:.4f}"
    return f"{one.text!r} ({value})"


def compare(client: Client, prompt: Sequence[int], plain: Sequence[int], drafted: Sequence[int]) -> Agreement:
    """Compare greedy answers (token ids) to `prompt`; `client` is a server without a drafter.

    Raises DflashError when that server cannot repeat its own answer or tells no log-probabilities.
    """
    at = first_difference(plain, drafted)
    if at is None:
        return Agreement("identical")
    tokens, rows = _one_at_a_time(client, prompt, plain, at)
    ours, theirs = _candidate(client, rows[at], plain, at), _candidate(client, rows[at], drafted, at)
    if len(rows) < _LEAST_ROWS:
        tokens, rows = _evaluated(client, prompt, _LEAST_ROWS, ignore_eos=True)
    rounding, positions = _rounding(client, prompt, tokens, rows)
    if ours.logprob is None or theirs.logprob is None:
        return Agreement("different", at, ours, theirs, None, rounding, positions)
    gap = abs(ours.logprob - theirs.logprob)
    verdict = "tie" if gap <= 2 * rounding else "different"
    return Agreement(verdict, at, ours, theirs, gap, rounding, positions)


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """The first place where two answers differ; one that ends earlier differs at its end."""
    for index, (first, second) in enumerate(zip(one, other, strict=False)):
        if first != second:
            return index
    return None if len(one) == len(other) else min(len(one), len(other))


def _one_at_a_time(
    client: Client, prompt: Sequence[int], tokens: Sequence[int], at: int
) -> tuple[list[int], list[dict[int, float]]]:
    """`_evaluated` up to `at` at least, and sure to be the answer that is compared."""
    again, rows = _evaluated(client, prompt, max(at + 1, _LEAST_ROWS))
    if again[:at] != list(tokens[:at]):
        raise DflashError(
            "the server without a drafter gave another greedy answer the second time",
            hint="it is not deterministic on this machine: texts cannot be compared",
        )
    if len(rows) <= at:
        raise DflashError(f"{client.url} tells no log-probabilities (n_probs)")
    return again, rows


def _evaluated(
    client: Client, prompt: Sequence[int], rows: int, **options: Any
) -> tuple[list[int], list[dict[int, float]]]:
    """The greedy answer, and the likeliest tokens' log-probabilities at each place, each row on its own."""
    answer = client.complete(
        prompt,
        n_predict=rows,
        temperature=0,
        n_probs=_TOP,
        cache_prompt=False,
        return_tokens=True,
        **options,
    )
    return list(answer.tokens), [_likeliest(row) for row in answer.probabilities]


def _likeliest(row: Mapping[str, Any]) -> dict[int, float]:
    return {int(one["id"]): float(one["logprob"]) for one in row.get("top_logprobs", [])}


def _candidate(client: Client, row: Mapping[int, float], tokens: Sequence[int], at: int) -> Candidate:
    if at < len(tokens):
        return Candidate(tokens[at], client.detokenize([tokens[at]]), row.get(tokens[at]))
    end = str(client.props().get("eos_token", ""))
    found = client.tokenize(end) if end else []
    token = found[0] if len(found) == 1 else None
    return Candidate(token, end or "the end", row.get(token) if token is not None else None)


def _rounding(
    client: Client, prompt: Sequence[int], tokens: Sequence[int], rows: Sequence[Mapping[int, float]]
) -> tuple[float, int]:
    """By how much the log-probabilities move when a few rows are evaluated together, and at how many places.

    Each request goes `_STRIDE` tokens further than the last and finds the rest in the server's cache, so that
    so many rows are evaluated in one batch, as in a verify step.
    """
    largest, places = 0.0, 0
    for index in range(0, len(rows), _STRIDE):
        answer = client.complete(
            [*prompt, *tokens[:index]], n_predict=1, temperature=0, n_probs=_TOP, cache_prompt=True
        )
        if not answer.probabilities:
            continue
        together = _likeliest(answer.probabilities[0])
        moved = _moved(rows[index], together)
        if moved:
            largest, places = max(largest, *moved), places + 1
    return largest, places


def _moved(alone: Mapping[int, float], together: Mapping[int, float]) -> list[float]:
    """How far each likely token moved; unlikely ones move further and never win."""
    best = max(alone.values(), default=0.0)
    likely = [token for token, value in alone.items() if value > best - _NEAR and token in together]
    return [abs(alone[token] - together[token]) for token in likely]
