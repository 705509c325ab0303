"""Inputs that a fuzzer found or a rule suggests: read or refused in a sentence, in bounded memory."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.fuzz.run import mutated
from benchmarks.fuzz.targets import READERS, TARGETS, seeds

CORPUS = Path(__file__).parent / "corpus"
CASES = sorted(path.relative_to(CORPUS).as_posix() for path in CORPUS.glob("*/*"))


@pytest.mark.parametrize("case", CASES)
def test_a_found_case_is_handled_without_memory_beyond_its_size(case: str) -> None:
    target, data = TARGETS[case.partition("/")[0]], (CORPUS / case).read_bytes()
    target(data)  # imports and caches
    tracemalloc.start()
    try:
        target(data)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < (8 << 20) + 100 * len(data)


@pytest.mark.parametrize("name", TARGETS)
@settings(max_examples=60, deadline=None)
@given(random=st.randoms(use_true_random=False))
def test_damaged_files_are_read_or_refused_in_a_sentence(name: str, random) -> None:
    TARGETS[name](mutated(seeds(name), random))


@pytest.mark.parametrize("name", TARGETS)
@settings(max_examples=60, deadline=None)
@given(data=st.binary(max_size=200))
def test_any_bytes_are_read_or_refused_in_a_sentence(name: str, data: bytes) -> None:
    TARGETS[name](data)


@pytest.mark.parametrize("name", READERS)
def test_a_good_file_is_read_so_that_the_fuzzer_starts_beyond_the_first_check(name: str) -> None:
    READERS[name](seeds(name)[0])
