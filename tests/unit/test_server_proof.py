"""The proof that drafts are made: at a start, and at a server that has been at work."""

from __future__ import annotations

from typing import Any

import pytest

from dflashcpp.client import Client
from dflashcpp.errors import DflashError
from dflashcpp.server.readiness import prove_drafting
from tests.support.fake_http import TIMINGS, Script, completion_steps, fake_server

BARE = {key: value for key, value in TIMINGS.items() if not key.startswith("draft")}
RESTING = {**BARE, "draft_n": 0, "draft_n_accepted": 0, "draft_n_steps_per_len": [23]}


def proved(timings: dict[str, Any], **options: bool) -> int:
    script = Script(
        slots=[{"id": 0, "speculative": True, "is_processing": False}],
        completion=lambda body: completion_steps("x", timings),
    )
    with fake_server(script) as server:
        return prove_drafting(Client(server.url), lambda: None, **options).drafted


def test_a_server_at_work_may_rest_where_drafting_does_not_pay() -> None:
    assert proved(RESTING, may_rest=True) == 0
    assert proved({**RESTING, "draft_n": 8, "draft_n_accepted": 4}, may_rest=True) == 8


def test_at_a_start_and_where_nothing_tells_of_a_rest_no_draft_is_a_fault() -> None:
    for timings, options in ((RESTING, {}), (BARE, {"may_rest": True})):
        with pytest.raises(DflashError, match="made no draft"):
            proved(timings, **options)
