"""Several prompts put to a server in one request, so that the answers do not hang on when each arrived.

Which rows share a batch decides how they are rounded. With a connection for each prompt that is decided by
the machine's scheduler, and a near tie may then fall differently from one run to the next.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import requests

from dflashcpp.sse import events
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
    """`POST /completion` with all `prompts` (texts or token ids); they wait for free slots in this order.

    Streamed: a whole answer of a random model that ends within a character is no JSON, and refused.
    """
    texts, timings = [""] * len(prompts), [None] * len(prompts)
    body = {"prompt": list(prompts), "stream": True, **options}
    with requests.post(f"{url}/completion", json=body, timeout=600, stream=True) as response:
        response.raise_for_status()
        for event in events(response.iter_content(None)):
            piece = json.loads(event.text) if event.kind == "data" and event.text != "[DONE]" else None
            if piece is not None:  # the first event of several answers says null
                texts[piece["index"]] += piece["content"]
                if piece["stop"]:
                    timings[piece["index"]] = piece["timings"]
    counts = [Timings.from_json(one) for one in timings if one is not None]
    assert len(counts) == len(prompts), "an answer did not come to its end"
    return Said(
        tuple(texts),
        tuple((one and one.drafted) or 0 for one in counts),
        tuple((one and one.accepted) or 0 for one in counts),
    )
