"""The plan against real llama-servers: every buffer of target and drafter, pristine and patched."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.memory import CASES, run
from dflashcpp import llamacpp
from dflashcpp.conversion import convert
from dflashcpp.gguf_file import TensorType
from dflashcpp.knowledge import folder
from dflashcpp.memory import planning, sources
from dflashcpp.memory.engine import parse_log
from dflashcpp.memory.settings import Settings
from tests.support.engine_memory import FLAGS, server_log
from tests.support.gguf_shapes import TARGETS, write_target

pytestmark = [pytest.mark.real, pytest.mark.slow]
SHAPES = ("muse-glimmer-30b", "qwen3.5-35b-a3b", "gpt-oss-20b", "nemotron-3-30b-a3b", "qwen3-4b")


@pytest.mark.parametrize("name", SHAPES)
def test_every_line_of_the_plan_is_the_engines(
    name: str, build_pristine: llamacpp.Build, build_patched: llamacpp.Build
) -> None:
    case = next(case for case in CASES if case.target == name)
    binaries = {"pristine": build_pristine, "patched": build_patched}
    results = run(case, {key: build.binary("llama-server") for key, build in binaries.items()})
    for result in results:
        assert result.lines >= 6
        assert result.worst_percent <= 1.0 or result.worst_mib <= 4.0, result
        assert result.compute_percent <= 5.0, result


@pytest.mark.parametrize("kind", [TensorType.Q4_K, TensorType.Q4_0, TensorType.Q2_K, TensorType.Q8_0])
@pytest.mark.parametrize("name", ["qwen3-4b", "qwen3-8b"])
def test_copies_for_the_processor_are_part_of_the_plan(
    name: str, kind: TensorType, build_pristine: llamacpp.Build, tmp_path: Path
) -> None:
    target = write_target(tmp_path / "target.gguf", replace(TARGETS[name], weights=kind, layers=2))
    flags = [flag for flag in FLAGS if flag != "--no-repack"]
    binary = build_pristine.binary("llama-server")
    log = server_log(binary, ["-m", target, "-c", "256", "-np", "1", *flags], tmp_path)
    told = parse_log(log.splitlines()).mib("target", "weights")
    planned = planning.make_lines(sources.from_gguf(target), None, Settings(context=256, on_device=False))
    plan = sum(line.mib for line in planned if line.kind == "weights")
    assert plan == pytest.approx(told, abs=0.5)


@pytest.fixture(scope="module")
def drafter(target_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = folder("models") / "smollm2-135m-dflash2" / "model.safetensors"
    file = tmp_path_factory.mktemp("a drafter") / "drafter.gguf"
    convert(source, target=target_gguf, type="Q8_0", output=file)
    return file


@pytest.mark.parametrize("patched", [True, False])
def test_the_real_pair_takes_what_was_planned_from_its_checkpoint(
    patched: bool,
    build_pristine: llamacpp.Build,
    build_patched: llamacpp.Build,
    target_gguf: Path,
    drafter: Path,
    tmp_path: Path,
) -> None:
    binary = (build_patched if patched else build_pristine).binary("llama-server")
    pair = ["-m", target_gguf, "-md", drafter, "--spec-type", "draft-dflash", "--spec-draft-n-max", "4"]
    log = server_log(binary, [*pair, "-c", "2048", "-np", "2", *FLAGS], tmp_path)
    told = parse_log(log.splitlines())
    source = folder("models") / "smollm2-135m-dflash2" / "model.safetensors"
    planned = planning.make_lines(
        sources.from_gguf(target_gguf),
        sources.drafter_of(source, "Q8_0"),
        Settings(context=2048, parallel=2, draft_max=4, repack=False, on_device=False, patched=patched),
    )
    for context in ("target", "draft"):
        for kind in ("weights", "kv", "compute"):
            plan = sum(line.mib for line in planned if (line.context, line.kind) == (context, kind))
            assert plan == pytest.approx(told.mib(context, kind), abs=0.02), (context, kind)
