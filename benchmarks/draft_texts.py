"""Whether drafting changed greedy texts: every answer against the one without a drafter.

Where texts part, the target itself says whether it was a tie (dflashcpp/agreement.py). Answers to other
prompts, because an earlier turn of the conversation parted, are not compared.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from benchmarks.draft_columns import BASE, Column
from benchmarks.draft_measuring import Setup, Text, serving
from dflashcpp.agreement import compare
from dflashcpp.client import Client
from dflashcpp.errors import DflashError

VERDICTS = ("identical", "tie", "different", "unsteady", "other prompt")


@dataclass(frozen=True)
class Verdict:
    """One answer against the baseline's: a word of VERDICTS, and the whole sentence.

    unsteady: the target alone does not repeat its own answer, so nothing can be said.
    """

    column: str
    round: int
    place: tuple[str, int, int]
    word: str
    text: str


def judge(setup: Setup, texts: Sequence[Text]) -> list[Verdict]:
    """Every text of every column; one server without a drafter is started for those that part."""
    base = {(text.round, text.place): text for text in texts if text.column == BASE}
    others = [(text, base.get((text.round, text.place))) for text in texts if text.column != BASE]
    pairs = [(text, plain) for text, plain in others if plain is not None]
    parted = [(t, plain) for t, plain in pairs if t.prompt == plain.prompt and t.tokens != plain.tokens]
    words = _ask(setup, parted) if parted else {}
    return [_verdict(text, plain, words) for text, plain in pairs]


_Key = tuple[str, tuple[int, ...], tuple[int, ...]]


def _ask(setup: Setup, parted: Iterable[tuple[Text, Text]]) -> dict[_Key, tuple[str, str]]:
    """Word and sentence for every pair of answers that part, each asked once."""
    keys = list(dict.fromkeys(_key(text, plain) for text, plain in parted))
    with serving(setup, Column(BASE, False, None)) as server:
        client = server.client()
        return {key: _compared(client, key) for key in keys}


def _key(text: Text, plain: Text) -> _Key:
    return text.prompt, plain.tokens, text.tokens


def _compared(client: Client, key: _Key) -> tuple[str, str]:
    prompt, plain, drafted = key
    try:
        found = compare(client, client.tokenize(prompt, begin=True), plain, drafted)
    except DflashError as error:
        return "unsteady", error.message
    return found.verdict, found.text()


def _verdict(text: Text, plain: Text, words: dict[_Key, tuple[str, str]]) -> Verdict:
    if text.prompt != plain.prompt:
        found = ("other prompt", "an earlier turn parted")
    elif text.tokens == plain.tokens:
        found = ("identical", "identical")
    else:
        found = words[_key(text, plain)]
    return Verdict(text.column, text.round, text.place, *found)


def counts(verdicts: Iterable[Verdict]) -> dict[str, Counter[str]]:
    """How often each word was said of each column."""
    found: dict[str, Counter[str]] = {}
    for verdict in verdicts:
        found.setdefault(verdict.column, Counter())[verdict.word] += 1
    return found
