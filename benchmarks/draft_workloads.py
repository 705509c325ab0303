"""The workloads of benchmarks/drafting.py: one TOML file each in benchmarks/workloads.

A file has `max_tokens` and `conversation` rows; a conversation has `turns`, what the user says one after
the other (the answers go back into the conversation), and may have a `document` that stands before the
first of them. The held-out prompts of the pair are read from where the drafter is.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dflashcpp import knowledge
from dflashcpp.errors import DflashError, UsageError

FOLDER = Path(__file__).parent / "workloads"
HELD_OUT = "smollm2-135m-dflash2/held-out-prompts.json"


@dataclass(frozen=True)
class Conversation:
    """What a user says, turn after turn."""

    turns: tuple[str, ...]


@dataclass(frozen=True)
class Workload:
    """Conversations of one kind; every answer has at most `max_tokens` tokens."""

    kind: str
    max_tokens: int
    conversations: tuple[Conversation, ...]

    def shorter(self, conversations: int, max_tokens: int) -> Workload:
        """At most so many conversations and tokens."""
        tokens = min(self.max_tokens, max_tokens)
        return replace(self, max_tokens=tokens, conversations=self.conversations[:conversations])


def load(only: Sequence[str] = (), folder: Path = FOLDER) -> list[Workload]:
    """Every workload, or those whose kind holds one of the words in `only`. Raises DflashError."""
    files = sorted(folder.glob("*.toml"))
    found = [workload for file in files for workload in read(file)]
    for word in only:
        if not any(word in one.kind for one in found):
            raise UsageError(
                f"no workload is named '{word}'", hint=f"there are: {', '.join(one.kind for one in found)}"
            )
    return [one for one in found if not only or any(word in one.kind for word in only)]


def read(file: Path) -> list[Workload]:
    """The workload of one file; the held-out prompts are one for each kind of prompt."""
    try:
        rows = tomllib.loads(file.read_text(encoding="utf-8"))
        tokens = int(rows["max_tokens"])
        if "held_out" in rows:
            return _held_out(file.stem, int(rows["held_out"]), tokens)
        return [Workload(file.stem, tokens, tuple(_conversation(row) for row in rows["conversation"]))]
    except (tomllib.TOMLDecodeError, KeyError, TypeError, ValueError) as error:
        raise DflashError(f"{file} is no workload: {error!r}") from error


def _conversation(row: dict[str, Any]) -> Conversation:
    first, *rest = (str(turn) for turn in row["turns"])
    document = row.get("document")
    return Conversation((f"{document}\n\n{first}" if document else first, *rest))


def _held_out(name: str, each: int, tokens: int) -> list[Workload]:
    """`each` prompts of every kind, evenly over the file."""
    prompts: dict[str, list[str]] = {}
    for kind, text in json.loads((knowledge.folder("models") / HELD_OUT).read_text(encoding="utf-8")):
        prompts.setdefault(kind, []).append(text)
    return [
        Workload(f"{name}/{kind}", tokens, tuple(Conversation((text,)) for text in _spread(texts, each)))
        for kind, texts in sorted(prompts.items())
    ]


def _spread(texts: Sequence[str], count: int) -> list[str]:
    count = min(count, len(texts))
    return [texts[index * len(texts) // count] for index in range(count)]


def long_text(words: int, folder: Path = FOLDER) -> str:
    """So many words out of the documents of the workloads, again from the start where they end."""
    documents = [
        str(row["document"])
        for file in sorted(folder.glob("*.toml"))
        for row in tomllib.loads(file.read_text(encoding="utf-8")).get("conversation", ())
        if "document" in row
    ]
    found = " ".join(documents).split()
    return " ".join(found[index % len(found)] for index in range(words))
