"""The short form of benchmarks/soak.py: clients, cancels, kills and cuts behind a real sshd."""

from __future__ import annotations

import pytest

from benchmarks import soak
from dflashcpp.llamacpp import Build
from tests.support.sshd import require_sshd

pytestmark = [pytest.mark.real, pytest.mark.slow]


def test_nothing_is_lost_mixed_up_or_grows_under_cancels_kills_and_cuts(build_patched: Build) -> None:
    require_sshd()
    program = build_patched.binary("llama-server")
    done, sizes = soak.soaked(40.0, kill_every=14.0, cut_every=6.0, program=program, tunnel=True)
    assert done.problems == [], (done.counts, sizes)
    assert done.counts["answers"] > len(soak.QUESTIONS) * 2, done.counts
    assert done.counts["server killed"] >= 1
    assert done.counts["ssh killed"] + done.counts["sshd killed"] >= 2
    assert done.counts["cancelled"] >= 1
