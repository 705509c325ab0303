"""Fixtures for every test: real builds, made once into the user's cache, and a cache of a test's own."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

# before torch is imported: its threads only get in the way of tiny matrices and of each other
os.environ.setdefault("OMP_NUM_THREADS", "1")

# a shell starts background jobs with Ctrl-C ignored, and every process that a test starts would inherit that
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

from hypothesis import settings

from dflashcpp import knowledge, llamacpp, pairs
from dflashcpp.progress import Progress
from tests.support import stand_in as stand_in_llama
from tests.support.stand_in import StandIn

# a run says the same each time, and a machine that stalls for 0.2 s is no fault; benchmarks/fuzz draws anew
settings.register_profile("suite", deadline=None, derandomize=True)
settings.load_profile("suite")


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


@pytest.fixture(scope="session")
def build_f449e05() -> llamacpp.Build:
    """The base that has no DFlash of its own, with the series that adds it."""
    return llamacpp.build(base="f449e05", progress=_Talk())


@pytest.fixture(scope="session")
def build_4df29be() -> llamacpp.Build:
    """The base that knows DFlash but not DFlash-2, with the series that adds it (tests marked `bases`)."""
    return llamacpp.build(base="4df29be", progress=_Talk())


@pytest.fixture(scope="session")
def target_gguf() -> Path:
    """The target of the built-in pair, fetched into the user's cache when it is not there."""
    return pairs.ensure_target(pairs.load_pair("smollm2-135m"), _Talk())


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty user cache for this test alone; its path has a space in it."""
    folder = tmp_path / "a cache"
    monkeypatch.setenv("DFLASHCPP_CACHE", str(folder))
    return folder


@pytest.fixture(scope="session")
def _stand_in_made(tmp_path_factory: pytest.TempPathFactory) -> StandIn:
    text = (knowledge.folder("patches") / "bases.toml").read_text(encoding="utf-8")
    settings = text[text.index("[cmake]") : text.index("[bases.")]
    return stand_in_llama.make(tmp_path_factory.mktemp("a stand-in"), settings=settings)


@contextmanager
def _only_base(made: StandIn, folder: Path, cache: Path) -> Iterator[StandIn]:
    """Make the stand-in the only base there is, and its sdist the only package pip finds."""
    shutil.copytree(made.knowledge, folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(knowledge, "root", lambda: folder)
        patch.setenv("DFLASHCPP_CACHE", str(cache))
        patch.setenv("PIP_NO_INDEX", "1")
        patch.setenv("PIP_FIND_LINKS", made.sdists.as_uri())
        patch.setenv("PIP_NO_CACHE_DIR", "1")
        patch.setenv("PIP_CONFIG_FILE", os.devnull)
        knowledge.table.cache_clear()
        yield replace(made, knowledge=folder)
    knowledge.table.cache_clear()


@pytest.fixture
def stand_in(_stand_in_made: StandIn, tmp_path: Path, own_cache: Path) -> Iterator[StandIn]:
    """A small llama.cpp that is the only base there is, with the real cmake settings; the cache is empty."""
    with _only_base(_stand_in_made, tmp_path / "knowledge", own_cache) as made:
        yield made


@pytest.fixture(scope="session")
def _built_cache(_stand_in_made: StandIn, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The stand-in, built patched and pristine, once for all tests."""
    folder = tmp_path_factory.mktemp("built")
    with _only_base(_stand_in_made, folder / "knowledge", folder / "cache") as made:
        made.write_series(stand_in_llama.SERIES)
        llamacpp.build()
        llamacpp.build(patches=False)
    return folder / "cache"


@pytest.fixture
def built_stand_in(stand_in: StandIn, own_cache: Path, _built_cache: Path) -> StandIn:
    """The stand-in with its series, and both its builds and its source in the cache."""
    stand_in.write_series(stand_in_llama.SERIES)
    for name in ("builds", "sources"):
        shutil.copytree(_built_cache / name, own_cache / name, symlinks=True)
    return stand_in
