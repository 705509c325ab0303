"""The drafter's compute buffer with and without our patch: smaller, and nothing else differs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dflashcpp import knowledge
from dflashcpp.llamacpp import Build
from dflashcpp.pairs import ensure_target, load_pair
from dflashcpp.server import LlamaServer
from tests.support.asking import Said, ask_together
from tests.support.engine_memory import reserved
from tests.support.first_version import both_versions
from tests.support.sparse_models import MUSE, TINY, Shape, write_drafter, write_target

pytestmark = [pytest.mark.real, pytest.mark.slow]

SHAPES = {"49152": TINY, "202048": TINY.with_vocab(202048), "muse": MUSE}
SAMPLING = {"greedy": {"temperature": 0.0}, "sampled": {"temperature": 0.8, "seed": 42}}


@pytest.fixture(scope="module")
def target() -> Path:
    return ensure_target(load_pair())


@pytest.fixture(scope="module")
def drafters(target: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """The small real drafter as it is (2), and without what DFlash-2 adds (1)."""
    return both_versions(target, tmp_path_factory.mktemp("drafters"))


@pytest.fixture(scope="module")
def prompts() -> list[str]:
    """Held-out questions in the target's chat form."""
    path = knowledge.folder("models") / "smollm2-135m-dflash2" / "held-out-prompts.json"
    found = [text for _, text in json.loads(path.read_text())]
    return [f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n" for text in found]


def _ask(
    build: Build,
    target: Path,
    drafter: Path,
    prompts: list[str],
    slots: int,
    extra: tuple[str, ...] = (),
    **options,
) -> Said:
    flags: dict[str, Any] = {
        "parallel": slots,
        "ctx_size": 1024 * slots,
        "threads": 1,
        "spec_draft_n_max": 4,
        "cache_ram": 0,
    }
    if build.patches:  # as the unpatched engine drafts: always, greedily
        flags["spec_draft_adaptive"] = False
        extra = (*extra, "--spec-draft-sampling", "greedy")
    request = {"n_predict": 40, "cache_prompt": False, **options}
    with LlamaServer(target, drafter, build=build, extra=extra, **flags) as server:
        return ask_together(server.url, prompts, **request)


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("name", SHAPES)
def test_the_patched_buffer_is_at_most_a_tenth(
    name: str, version: int, build_patched: Build, build_pristine: Build, tmp_path: Path
) -> None:
    shape: Shape = SHAPES[name]
    pair = write_target(tmp_path / "target.gguf", shape), write_drafter(tmp_path / "d.gguf", shape, version)
    before, after = (
        reserved(build.binary("llama-server"), *pair, tmp_path).mib("draft", "compute")
        for build in (build_pristine, build_patched)
    )
    assert before >= 4 * 512 * shape.vocab / 2**20
    assert after <= before / 10


def test_the_published_buffer_of_the_unpatched_engine_is_what_we_compare_with(
    build_pristine: Build, tmp_path: Path
) -> None:
    pair = write_target(tmp_path / "target.gguf", MUSE), write_drafter(tmp_path / "d.gguf", MUSE, 1)
    engine = reserved(
        build_pristine.binary("llama-server"), *pair, tmp_path, "--no-spec-draft-backend-sampling"
    )
    assert engine.mib("draft", "compute") == pytest.approx(407.62, abs=0.01)


@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("slots", [1, 4])
@pytest.mark.parametrize("version", [1, 2])
def test_drafts_and_texts_are_those_of_the_unpatched_build(
    version: int,
    slots: int,
    sampling: str,
    build_patched: Build,
    build_pristine: Build,
    target: Path,
    drafters: dict[int, Path],
    prompts: list[str],
) -> None:
    before, after = (
        _ask(build, target, drafters[version], prompts[:4], slots, **SAMPLING[sampling])
        for build in (build_pristine, build_patched)
    )
    assert all(after.drafted)
    assert after == before


def test_the_size_of_the_injected_chunks_changes_nothing(
    build_patched: Build, target: Path, drafters: dict[int, Path], prompts: list[str]
) -> None:
    long = ["".join(prompts[:12])]
    small, large = (
        _ask(build_patched, target, drafters[2], long, 1, ("-ubd", rows), temperature=0.0)
        for rows in ("16", "512")
    )
    assert small == large


def test_blocks_of_all_slots_may_exceed_the_targets_ubatch(
    build_patched: Build, target: Path, drafters: dict[int, Path], prompts: list[str]
) -> None:
    answered = _ask(build_patched, target, drafters[2], prompts[:6], 6, ("-ub", "16"), temperature=0.0)
    assert sum(answered.accepted) > 0
