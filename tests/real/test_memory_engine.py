"""The plan against real llama-servers: every buffer of target and drafter, pristine and patched."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.memory import CASES, run, write_files
from dflashcpp import llamacpp
from dflashcpp.conversion import convert
from dflashcpp.gguf_file import TensorType
from dflashcpp.knowledge import folder
from dflashcpp.memory import measure, plan, planning, sources
from dflashcpp.memory.engine import parse_log
from dflashcpp.memory.settings import Settings, from_flags
from dflashcpp.memory.settings import to_flags as measure_flags
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
    size = sum(line.mib for line in planned if line.kind == "weights")
    assert size == pytest.approx(told, abs=0.5)


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
    pair: list[str | Path] = [
        "-m",
        target_gguf,
        "-md",
        drafter,
        "--spec-type",
        "draft-dflash",
        "--spec-draft-n-max",
        "4",
    ]
    log = server_log(binary, [*pair, "-c", "2048", "-np", "2", *FLAGS], tmp_path)
    told = parse_log(log.splitlines())
    source = folder("models") / "smollm2-135m-dflash2" / "model.safetensors"
    planned = planning.make_lines(
        sources.from_gguf(target_gguf),
        sources.drafter_of(source, "Q8_0"),
        Settings(context=2048, parallel=2, draft_max=4, repack=False, on_device=False, patched=patched),
    )
    for context in ("target", "draft"):
        for kind in ("weights", "kv", "compute", "output"):
            kinds = (kind, "extraction") if patched and kind == "compute" else (kind,)
            size = sum(line.mib for line in planned if line.context == context and line.kind in kinds)
            assert size == pytest.approx(told.mib(context, kind), abs=0.02), (context, kind)


@pytest.mark.parametrize("name", SHAPES)
def test_the_engine_asked_before_a_start_says_what_the_formulas_say(
    name: str, build_patched: llamacpp.Build, tmp_path: Path
) -> None:
    case = next(case for case in CASES if case.target == name)
    target, drafter = write_files(case, tmp_path)
    settings, _ = from_flags(case.flags.split(), Settings(on_device=False, repack=False))
    lines = planning.make_lines(sources.from_gguf(target), sources.from_gguf(drafter), settings)
    told = measure.measure(build_patched.binary("llama-fit-params"), target, drafter, measure_flags(settings))
    assert told is not None
    for context in ("target", "draft"):
        formula = sum(
            line.mib for line in lines if line.context == context and line.kind in ("compute", "extraction")
        )
        assert told.mib(context, "host", "compute") == pytest.approx(formula, abs=0.01)
    assert measure.disagreements(lines, told) == []


def test_plan_asks_the_build_that_is_here_by_default_and_the_server_takes_that_much(
    build_patched: llamacpp.Build, target_gguf: Path, drafter: Path, tmp_path: Path
) -> None:
    flags = ("-c", "2048", "-np", "2", "--no-repack", "--spec-draft-n-max", "4")
    made = plan(target=target_gguf, drafter=drafter, flags=flags, with_savings=False)
    asked = {(line.context, line.kind): line for line in made.lines if line.origin == "engine"}
    assert set(asked) == {("target", "compute"), ("draft", "compute")}
    pair: list[str | Path] = ["-m", target_gguf, "-md", drafter, "--spec-type", "draft-dflash"]
    log = server_log(build_patched.binary("llama-server"), [*pair, *flags, *FLAGS], tmp_path)
    told = parse_log(log.splitlines())
    for (context, kind), line in asked.items():
        assert line.mib == pytest.approx(told.mib(context, kind), abs=0.01), context
    without = plan(target=target_gguf, drafter=drafter, flags=flags, with_savings=False, engine=False)
    assert all(line.origin != "engine" for line in without.lines)


def test_a_tied_target_that_is_mapped_is_no_disagreement(
    build_patched: llamacpp.Build, tmp_path: Path
) -> None:
    case = next(case for case in CASES if case.target == "gemma-4-26b-a4b")
    target, drafter = write_files(case, tmp_path)
    flags = ("-c", "512", "-np", "1", "--no-repack")
    made = plan(target=target, drafter=drafter, flags=flags, with_savings=False, engine=True)
    assert not any("the engine" in text for text in made.warnings)


def test_the_output_buffers_are_as_told_at_start_for_every_number_of_slots(
    build_patched: llamacpp.Build, target_gguf: Path, drafter: Path, tmp_path: Path
) -> None:
    for slots in (1, 3):
        flags = ("-c", "1024", "-np", str(slots), "--no-repack", "--spec-draft-n-max", "4")
        pair: list[str | Path] = ["-m", target_gguf, "-md", drafter, "--spec-type", "draft-dflash"]
        log = server_log(build_patched.binary("llama-server"), [*pair, *flags, *FLAGS], tmp_path)
        told = parse_log(log.splitlines())
        made = plan(target=target_gguf, drafter=drafter, flags=flags, with_savings=False, engine=False)
        for context in ("target", "draft"):
            assert made.mib(context, "output") == pytest.approx(told.mib(context, "output"), abs=0.01)
