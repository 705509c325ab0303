"""Fixtures for every test: real builds, made once into the user's cache, and a cache of a test's own."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from dflashcpp import llamacpp
from dflashcpp.progress import Progress


class _Talk(Progress):
    """What a long build says, past pytest's capture."""

    def say(self, text: str) -> None:
        print(text, file=sys.__stderr__, flush=True)


@pytest.fixture(scope="session")
def build_patched() -> llamacpp.Build:
    """llama.cpp's default base with our patches, for the CPU; compiled when the cache has no fresh one."""
    return llamacpp.build(progress=_Talk())


@pytest.fixture(scope="session")
def build_pristine() -> llamacpp.Build:
    """The same base without patches."""
    return llamacpp.build(patches=False, progress=_Talk())


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty user cache for this test alone; its path has a space in it."""
    folder = tmp_path / "a cache"
    monkeypatch.setenv("DFLASHCPP_CACHE", str(folder))
    return folder
