"""Several prompts put to a server in one request, so that the answers do not hang on when each arrived.

Which rows share a batch decides how they are rounded. With a connection for each prompt that is decided by
the machine's scheduler, and a near tie may then fall differently from one run to the next.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import requests

from dflashcpp.stats import Timings


@dataclass(frozen=True)
class Said:
    """What a server answered to some prompts: the texts, and how much was drafted and accepted for each."""

    texts: tuple[str, ...]
    drafted: tuple[int, ...]
    accepted: tuple[int, ...]

    @property
    def acceptance(self) -> float:
        return sum(self.accepted) / sum(self.drafted)


def ask_together(url: str, prompts: Sequence[str | list[int]], **options: Any) -> Said:
    """`POST /completion` with all `prompts` (texts or token ids); they wait for free slots in this order."""
    response = requests.post(f"{url}/completion", json={"prompt": list(prompts), **options}, timeout=600)
    response.raise_for_status()
    found = response.json()
    answers = sorted(found, key=lambda answer: answer["index"]) if isinstance(found, list) else [found]
    assert len(answers) == len(prompts)
    timings = [Timings.from_json(answer["timings"]) for answer in answers]
    return Said(
        tuple(answer["content"] for answer in answers),
        tuple((one and one.drafted) or 0 for one in timings),
        tuple((one and one.accepted) or 0 for one in timings),
    )
