"""The base that knew DFlash before our series: it drafts as the reference, v1 and DFlash-2, and what is not
ours (DSpark) still goes its own way there. `make test-bases` runs these.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from dflashcpp import LlamaServer, pairs
from dflashcpp.conversion import convert
from dflashcpp.llamacpp import Build
from tests.real import test_draft_state as state
from tests.real import test_sampled_drafts as sampled
from tests.real import test_three_witnesses as witnesses
from tests.support.acceptance import CHECKPOINT, held_out
from tests.support.asking import Said, ask_together
from tests.support.checkpoints import t1, t1_v2, write_checkpoint, write_target
from tests.support.first_version import strip_second_version
from tests.support.gguf_faults import faulty

pytestmark = [pytest.mark.bases, pytest.mark.parity, pytest.mark.real, pytest.mark.slow]

PROMPT = witnesses.PROMPT


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("target") / "target.gguf")


@pytest.fixture(scope="module")
def text(target: Path, build_4df29be: Build, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What the tiny target says without a drafter."""
    with pytest.MonkeyPatch.context() as patch:
        trace = tmp_path_factory.mktemp("alone") / "trace"
        return witnesses.ask(build_4df29be, target, None, [PROMPT], trace, patch).texts


def tiny(folder: Path, target: Path, config: dict[str, Any]) -> Path:
    """A random drafter with this config, in F32."""
    source = write_checkpoint(folder / "source", config, dtype="F32")
    return convert(source, target=target, type="F32", output=folder / "drafter.gguf").file


def run(build: Build, *arguments: str | Path) -> str:
    """What a llama-server that is to refuse its drafter says."""
    command = [build.binary("llama-server"), "-t", "1", "-c", "256", "--port", "0", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode > 0, "it ended on a signal, or well"
    return done.stderr + done.stdout


def at_once(build: Build, target: Path, drafter: Path | None, prompts: list[list[int]]) -> Said:
    """Greedy answers to the prompts, each in a slot of its own."""
    flags: dict[str, Any] = {"threads": 1, "ctx_size": 256 * len(prompts), "parallel": len(prompts)}
    if drafter:
        flags["spec_draft_adaptive"] = False
    request: dict[str, Any] = {"n_predict": 32, "temperature": 0.0, "ignore_eos": True}
    with LlamaServer(target, drafter, build=build, **flags) as server:
        return ask_together(server.url, prompts, **request)


@pytest.mark.parametrize("name", witnesses.CASES)
def test_tiny_drafters_draft_as_the_reference_and_leave_the_text_alone(
    name: str,
    tmp_path: Path,
    target: Path,
    text: list[str],
    build_4df29be: Build,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gguf = tiny(tmp_path, target, witnesses.CASES[name])
    found = witnesses.ask(build_4df29be, target, gguf, [PROMPT], tmp_path / "trace", monkeypatch)
    witnesses.check(found, witnesses.reference(target, gguf), witnesses.TINY_BOUND)
    assert found.texts == text


@pytest.mark.parametrize("version", [1, 2])
def test_the_real_pair_drafts_as_the_reference(
    version: int, tmp_path: Path, build_4df29be: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = pairs.ensure_target(pairs.load_pair())
    source = CHECKPOINT if version == 2 else strip_second_version(CHECKPOINT, tmp_path / "v1")
    gguf = convert(source, target=target, type="BF16", output=tmp_path / "drafter.gguf").file
    prompts = [
        f"<|im_start|>user\n{request}<|im_end|>\n<|im_start|>assistant\n"
        for kind in ("code", "explain")
        for request in held_out(kind, 1)
    ]
    found = witnesses.ask(build_4df29be, target, gguf, prompts, tmp_path / "trace", monkeypatch)
    witnesses.check(found, witnesses.reference(target, gguf), witnesses.REAL_BOUND)
    alone = witnesses.ask(build_4df29be, target, None, prompts, tmp_path / "alone", monkeypatch)
    assert found.texts == alone.texts


@pytest.mark.parametrize("config", [t1(), t1_v2()], ids=["v1", "v2"])
def test_four_slots_at_once_draft_and_say_the_same(
    config: dict[str, Any], tmp_path: Path, target: Path, build_4df29be: Build
) -> None:
    gguf = tiny(tmp_path, target, config)
    asked = [[7 + slot, 300, 12, 45, 99] * (8 + slot) for slot in range(4)]
    alone, drafted = (at_once(build_4df29be, target, drafter, asked) for drafter in (None, gguf))
    assert drafted.texts == alone.texts
    assert all(drafted.drafted)


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory, build_4df29be: Build) -> Iterator[sampled.Servers]:
    with ExitStack() as stack:
        yield sampled.Servers(tmp_path_factory.mktemp("sampled drafts"), build_4df29be, stack)


@pytest.mark.parametrize(("name", "setting"), [("v1", "plain"), ("v2", "top-p"), ("adaptive", "plain")])
def test_sampled_text_is_distributed_as_without_a_drafter(
    servers: sampled.Servers, name: str, setting: str
) -> None:
    drafted = servers.answers(name, setting)
    assert name == "adaptive" or sampled.total(drafted, "draft_n_accepted") > 20
    assert sampled.worst(servers.answers("alone", setting), drafted) < sampled.LIMIT


def test_the_same_seed_gives_the_same_text(servers: sampled.Servers) -> None:
    options = {**sampled.BASE, "n_predict": 40, "ignore_eos": True}
    one, two = (sampled.ask(servers.url("v2"), range(20), options) for _ in range(2))
    assert [answer["tokens"] for answer in one] == [answer["tokens"] for answer in two]


@pytest.fixture(scope="module")
def trio(build_4df29be: Build, tmp_path_factory: pytest.TempPathFactory) -> Iterator[state.Trio]:
    """The small real pair on three servers, as in test_draft_state.py."""
    target = pairs.ensure_target(pairs.load_pair())
    drafter = pairs.ensure_drafter(pairs.load_pair(), target=target)
    pair = state.Pair(build_4df29be, tmp_path_factory.mktemp("real"), target, drafter)
    with ExitStack() as stack:
        used, fresh = pair.serve(stack, ctx_size=256), pair.serve(stack, ctx_size=256, cache_ram=0)
        yield state.Trio(pair, used, fresh, pair.serve(stack, drafter=False, ctx_size=256, cache_ram=0))


def test_a_restored_slot_drafts_on_as_a_fresh_one(trio: state.Trio) -> None:
    state.test_a_real_conversation_drafts_on_as_a_fresh_one(trio)


def test_no_draft_goes_past_the_context(trio: state.Trio) -> None:
    state.test_no_draft_goes_past_the_context(234, trio)


def test_a_drafter_of_another_hidden_size_is_refused_by_name(
    tmp_path: Path, target: Path, build_4df29be: Build
) -> None:
    gguf = tiny(tmp_path, target, t1_v2())
    wide = write_target(tmp_path / "wide.gguf", hidden=512)
    said = run(build_4df29be, "-m", wide, "-md", gguf, "--spec-type", "draft-dflash")
    assert "was trained for a target of hidden size 256, this one has 512" in said


def test_a_tap_that_the_target_does_not_have_is_refused_by_name(
    tmp_path: Path, target: Path, build_4df29be: Build
) -> None:
    gguf = tiny(tmp_path, target, t1_v2())
    short = write_target(tmp_path / "short.gguf", layers=3)
    said = run(build_4df29be, "-m", short, "-md", gguf, "--spec-type", "draft-dflash")
    assert "reads the input of layer 4 (dflash.target_layers), the target has layers 0 to 2" in said


def test_a_file_that_lost_a_key_of_the_selector_is_refused_by_name(
    tmp_path: Path, target: Path, build_4df29be: Build
) -> None:
    gguf = tiny(tmp_path, target, t1_v2())
    torn = faulty(gguf, tmp_path / "torn.gguf", {"dflash.selector_rank": None})
    said = run(build_4df29be, "-m", target, "-md", torn, "--spec-type", "draft-dflash")
    assert "needs dflash.selector_rank" in said


def test_a_dspark_drafter_still_runs_by_upstreams_own_code(
    tmp_path: Path, target: Path, text: list[str], build_4df29be: Build
) -> None:
    gguf = tiny(tmp_path, target, t1())
    heads = {"markov_w1.weight": (32, 512), "markov_w2.weight": (32, 512), "conf_proj.weight": (288, 1)}
    dspark = faulty(gguf, tmp_path / "dspark.gguf", tensors=heads)
    log = tmp_path / "server.log"
    flags: dict[str, Any] = {"threads": 1, "ctx_size": 1024, "flash_attn": "off", "verbosity": 4}
    extra = ("-md", str(dspark), "--spec-type", "draft-dspark")
    with LlamaServer(target, build=build_4df29be, log=log, extra=extra, **flags) as server:
        answer = server.client().complete(PROMPT, n_predict=40, temperature=0.0, ignore_eos=True)
    assert "DSpark markov head (rank = 32)" in log.read_text(errors="replace")
    assert [answer.text] == text
    assert answer.timings is not None and answer.timings.drafted
    said = run(build_4df29be, "-m", target, "-md", dspark, "--spec-type", "draft-dflash")
    assert "is no DFlash drafter and cannot be run as --spec-type draft-dflash" in said
    said = run(build_4df29be, "-m", target, "-md", gguf, "--spec-type", "draft-dspark")
    assert "is a DFlash drafter and cannot be run as --spec-type draft-dspark" in said
