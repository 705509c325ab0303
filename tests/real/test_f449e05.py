"""The base that had no DFlash: what it refuses, what it reserves, several slots, and its draft cache."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import requests

from dflashcpp import knowledge
from dflashcpp.conversion import convert
from dflashcpp.gguf_file import Kv, ValueType
from dflashcpp.llamacpp import Build
from dflashcpp.pairs import ensure_target, load_pair
from dflashcpp.server import LlamaServer
from tests.support.asking import Said, ask_together
from tests.support.checkpoints import t1_v2, write_checkpoint, write_target
from tests.support.engine_memory import reserved
from tests.support.first_version import both_versions
from tests.support.gguf_faults import faulty
from tests.support.sparse_models import MUSE, TINY, write_drafter
from tests.support.sparse_models import write_target as write_sparse_target

pytestmark = [pytest.mark.real, pytest.mark.slow]

# how much is drafted would depend on the machine otherwise
DRAFT: dict[str, Any] = {"spec_draft_n_max": 4, "spec_draft_adaptive": False}


# -- refusals


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A tiny target and a DFlash-2 drafter that fits it."""
    folder = tmp_path_factory.mktemp("sound")
    target = write_target(folder / "target.gguf")
    source = write_checkpoint(folder / "source", t1_v2(), dtype="F32")
    return target, convert(source, target=target, type="F32", output=folder / "drafter.gguf").file


def refused(build: Build, target: Path, drafter: Path) -> str:
    """What llama-server says when it must end by itself, in an orderly way."""
    command = [build.binary("llama-server"), "-m", target, "-md", drafter, "--spec-type", "draft-dflash"]
    quiet = {**os.environ, "GGML_NO_BACKTRACE": "1"}
    options = ["-c", "512", "-np", "1", "-t", "1", "--no-warmup", "--port", "0"]
    ended = subprocess.run(
        [*map(str, command), *options], capture_output=True, text=True, timeout=60, env=quiet
    )
    said = ended.stdout + ended.stderr
    assert ended.returncode == 1, said[-2000:]
    assert "GGML_ASSERT" not in said
    return said


Edit = tuple[dict[str, Any], str]

FILES: dict[str, Edit] = {
    "taps": ({"keys": {"dflash.target_layers": None}}, "dflash.target_layers is missing"),
    "mask": ({"keys": {"tokenizer.ggml.mask_token_id": None}}, "tokenizer.ggml.mask_token_id is missing"),
    "vocabulary": ({"without": "tokenizer."}, "tokenizer.ggml.model"),
    "beyond": (
        {"keys": {"dflash.target_layers": Kv.array(ValueType.INT32, [2, 6])}},
        "reads the input of layer 6 (dflash.target_layers), the target has layers 0 to 5",
    ),
    "bias": ({"tensors": {"blk.0.attn_q.bias": (256,)}}, "blk.0.attn_q.bias is a bias"),
    "stranger": ({"tensors": {"markov_w1.weight": (64, 512)}}, "markov_w1.weight has no place"),
    "half a second version": ({"keys": {"dflash.selector_rank": None}}, "needs dflash.selector_rank"),
    "sections": (
        {"keys": {"dflash.rope.dimension_sections": Kv.array(ValueType.INT32, [16, 8, 8, 0])}},
        "dflash.rope.dimension_sections",
    ),
}


@pytest.mark.parametrize("name", FILES)
def test_a_drafter_that_cannot_work_is_refused_in_a_sentence(
    name: str, sound: tuple[Path, Path], tmp_path: Path, build_f449e05: Build
) -> None:
    target, drafter = sound
    edit, sentence = FILES[name]
    assert sentence in refused(build_f449e05, target, faulty(drafter, tmp_path / "edited.gguf", **edit))


TARGETS: dict[str, tuple[Callable[[Path], Path], str]] = {
    "hidden size": (lambda path: write_target(path, hidden=128), "hidden size 256, this one has 128"),
    "layers": (lambda path: write_target(path, layers=4), "the target has layers 0 to 3"),
    "vocabulary": (lambda path: write_target(path, vocab=600), "512 tokens, the target has 600"),
    "architecture": (lambda path: write_target(path, arch="hunyuan-dense"), "hunyuan-dense"),
}


@pytest.mark.parametrize("name", TARGETS)
def test_a_target_that_does_not_fit_is_refused_in_a_sentence(
    name: str, sound: tuple[Path, Path], tmp_path: Path, build_f449e05: Build
) -> None:
    write, sentence = TARGETS[name]
    assert sentence in refused(build_f449e05, write(tmp_path / "target.gguf"), sound[1])


# -- memory


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("shape", [TINY.with_vocab(202048), MUSE], ids=["202048", "muse"])
def test_the_compute_buffer_is_that_of_the_default_base(
    shape: Any, version: int, build_f449e05: Build, build_patched: Build, tmp_path: Path
) -> None:
    pair = write_sparse_target(tmp_path / "t.gguf", shape), write_drafter(tmp_path / "d.gguf", shape, version)
    old, new = (
        reserved(build.binary("llama-server"), *pair, tmp_path).mib("draft", "compute")
        for build in (build_f449e05, build_patched)
    )
    assert old < 1.05 * new + 1
    assert old < 4 * 512 * shape.vocab / 2**20 / 10


# -- slots and the draft cache, on the real pair


@pytest.fixture(scope="module")
def target() -> Path:
    return ensure_target(load_pair())


@pytest.fixture(scope="module")
def drafters(target: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """The small real drafter as it is (2), and without what DFlash-2 adds (1)."""
    return both_versions(target, tmp_path_factory.mktemp("drafters"))


@pytest.fixture(scope="module")
def questions() -> list[str]:
    path = knowledge.folder("models") / "smollm2-135m-dflash2" / "held-out-prompts.json"
    return [text for _, text in json.loads(path.read_text())]


def chat(text: str) -> str:
    return f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"


def ask(
    build: Build, target: Path, drafter: Path | None, prompts: list[str], slots: int = 1, **flags: Any
) -> Said:
    given: dict[str, Any] = {"parallel": slots, "ctx_size": 512 * slots, "threads": 1, "cache_ram": 0}
    given |= (DRAFT if drafter else {}) | flags
    request: dict[str, Any] = {"n_predict": 40, "cache_prompt": False, "temperature": 0.0}
    with LlamaServer(target, drafter, build=build, **given) as server:
        return ask_together(server.url, prompts, **request)


@pytest.mark.parametrize("version", [1, 2])
def test_four_slots_draft_as_well_as_one(
    version: int, build_f449e05: Build, target: Path, drafters: dict[int, Path], questions: list[str]
) -> None:
    """With a cache a slot, so that micro-batches do not keep the order of the batch."""
    prompts = [chat(text) for text in questions[:4]]
    alone = ask(build_f449e05, target, None, prompts)
    one = ask(build_f449e05, target, drafters[version], prompts)
    four = ask(build_f449e05, target, drafters[version], prompts, slots=4, kv_unified=False)
    assert one.texts == four.texts == alone.texts
    floor = {1: 0.01, 2: 0.1}[version]  # the first is the second without its convolution: it drafts badly
    assert one.acceptance > floor and four.acceptance > 0.8 * one.acceptance


def test_a_quantised_draft_cache_drafts_almost_as_well(
    build_f449e05: Build, target: Path, drafters: dict[int, Path], questions: list[str]
) -> None:
    prompts = [chat(text) for text in questions[:4]]
    plain = ask(build_f449e05, target, drafters[2], prompts)
    packed = ask(
        build_f449e05, target, drafters[2], prompts, cache_type_k_draft="q8_0", cache_type_v_draft="q8_0"
    )
    assert packed.texts == plain.texts
    assert packed.acceptance > 0.9 * plain.acceptance


def test_past_the_context_drafting_goes_on(
    build_f449e05: Build, target: Path, drafters: dict[int, Path], questions: list[str]
) -> None:
    """The context shifts twice within the answer."""
    flags: dict[str, Any] = {"ctx_size": 256, "context_shift": True, **DRAFT}
    with LlamaServer(
        target, drafters[2], build=build_f449e05, parallel=1, threads=1, cache_ram=0, **flags
    ) as server:
        answer = server.client().complete(chat(questions[0]), n_predict=400, temperature=0.0, ignore_eos=True)
    assert answer.timings is not None
    assert answer.timings.predicted_n == 400
    drafted, accepted = answer.timings.drafted or 0, answer.timings.accepted or 0
    assert accepted > 0.1 * drafted > 0


def test_reused_and_restored_prompts_draft_as_well_as_fresh_ones(
    build_f449e05: Build, target: Path, drafters: dict[int, Path], questions: list[str], tmp_path: Path
) -> None:
    """Not the same tokens: a reused prompt is rounded otherwise, on the default base just so."""
    prompts = [chat(" ".join(questions[at : at + 6])) for at in range(4)]
    flags: dict[str, Any] = {"ctx_size": 1024, "slot_save_path": str(tmp_path), **DRAFT}
    drafted = {"fresh": 0, "reused": 0, "restored": 0}
    accepted = dict(drafted)
    with LlamaServer(
        target, drafters[2], build=build_f449e05, parallel=1, threads=1, cache_ram=0, **flags
    ) as server:

        def answer(kind: str, prompt: str) -> None:
            timings = server.client().complete(prompt, n_predict=32, temperature=0.0).timings
            assert timings is not None
            drafted[kind] += timings.drafted or 0
            accepted[kind] += timings.accepted or 0

        def slot(action: str) -> None:
            url = f"{server.url}/slots/0?action={action}"
            assert requests.post(url, json={"filename": "slot.bin"}, timeout=30).status_code == 200

        for prompt in prompts:
            answer("fresh", prompt)
            slot("save")
            answer("reused", prompt)
            server.client().complete(chat(questions[20]), n_predict=8, temperature=0.0)
            slot("restore")
            answer("restored", prompt)
    fresh = accepted["fresh"] / drafted["fresh"]
    assert fresh > 0.1
    assert accepted["reused"] > 0.8 * fresh * drafted["reused"]
    assert accepted["restored"] > 0.8 * fresh * drafted["restored"]
