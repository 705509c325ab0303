"""What the patched engine says about memory: before a start, when it does not fit, and while it runs."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from dflashcpp import knowledge
from dflashcpp.conversion import convert
from dflashcpp.llamacpp import Build
from dflashcpp.pairs import ensure_target, load_pair
from dflashcpp.server import LlamaServer
from tests.support.engine_memory import reserved, server_log
from tests.support.first_version import strip_second_version
from tests.support.sparse_models import TINY, write_drafter, write_target

pytestmark = [pytest.mark.real, pytest.mark.slow]

MIB = 2**20
SMALL_START = ("-c", "512", "-np", "1", "-t", "1", "-lv", "4", "--port", "0")
SPEC = ("--spec-type", "draft-dflash", "--spec-draft-n-max", "4")


@pytest.fixture(scope="module")
def target() -> Path:
    return ensure_target(load_pair())


@pytest.fixture(scope="module", params=[1, 2], ids=["v1", "v2"])
def drafter(request: pytest.FixtureRequest, target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("drafter")
    source = knowledge.folder("models") / "smollm2-135m-dflash2"
    if request.param == 1:
        source = strip_second_version(source, folder / "v1")
    return convert(source, target=target, type="Q8_0", output=folder / "d.gguf").file


def _fit_params(build: Build, *arguments: str | Path) -> str:
    command = [str(build.binary("llama-fit-params")), *map(str, arguments)]
    ran = subprocess.run(command, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def _sum(rows: list[dict], kind: str) -> float:
    return sum(row[kind] for row in rows) / MIB


@pytest.mark.parametrize(
    "flags", [("-np", "1"), ("-np", "4", "-ub", "128"), ("-np", "1", "-ub", "64", "-b", "256")]
)
def test_measured_before_the_start_is_what_the_server_takes(
    flags: tuple[str, ...], build_patched: Build, target: Path, drafter: Path
) -> None:
    common = ("-c", "2048", "-t", "1", *flags)
    told = json.loads(
        _fit_params(build_patched, "-m", target, "-md", drafter, *SPEC, *common, "-fitp", "json")
    )
    extra = ("-c", "2048", "-t", "1", *flags, "--spec-draft-n-max", "4")
    with LlamaServer(target, drafter, build=build_patched, extra=extra) as server:
        memory = server.client().props()["memory"]
    for context in ("target", "draft"):
        for kind in ("context", "compute"):
            assert _sum(told[context], kind) == pytest.approx(_sum(memory[context], kind), abs=0.01), (
                context,
                kind,
            )


def test_props_agree_with_the_log(build_patched: Build, target: Path, drafter: Path) -> None:
    with LlamaServer(target, drafter, build=build_patched, parallel=1, ctx_size=2048, threads=1) as server:
        told, log = server.client().props()["memory"], server.memory
    assert log is not None
    for context in ("target", "draft"):
        assert _sum(told[context], "compute") == pytest.approx(log.mib(context, "compute"), abs=0.01)
        assert _sum(told[context], "context") == pytest.approx(log.mib(context, "kv"), abs=0.02)
        assert _sum(told[context], "model") == pytest.approx(log.mib(context, "weights"), abs=0.02)


def test_the_table_at_exit_has_the_drafter(
    build_patched: Build, target: Path, drafter: Path, tmp_path: Path
) -> None:
    arguments = ("-m", target, "-md", drafter, *SPEC, *SMALL_START)
    log = server_log(build_patched.binary("llama-server"), arguments, tmp_path)
    table = log.split("cleaning up before exit")[-1]
    assert "memory breakdown [MiB]" in table
    assert "draft context [MiB]" in table


def test_fit_counts_a_drafter_that_borrows_the_embeddings(
    build_patched: Build, build_pristine: Build, target: Path, drafter: Path, tmp_path: Path
) -> None:
    arguments = ("-m", target, "-md", drafter, *SPEC, *SMALL_START)
    logs = [
        server_log(build.binary("llama-server"), arguments, tmp_path)
        for build in (build_pristine, build_patched)
    ]
    assert "fitting without it" in logs[0]
    assert "fitting without it" not in logs[1]


def test_both_are_printed_in_mib_without_json(build_patched: Build, target: Path, drafter: Path) -> None:
    arguments = ("-m", target, "-md", drafter, *SPEC, "-c", "2048", "-fitp", "on")
    lines = _fit_params(build_patched, *arguments).splitlines()
    assert [line.split()[0] for line in lines] == ["Host", "draft"]
    alone = _fit_params(build_patched, "-m", target, "-c", "2048", "-fitp", "on").split()
    assert alone[:3] == lines[0].split()[:3]


def _start(build: Build, pair: tuple[Path, Path], folder: Path, limit: int) -> str:
    os.environ["DFLASHCPP_DEVICE_MEMORY"] = f"Host={limit}"
    try:
        flags = ("-c", "2048", "-np", "1", "-t", "1", "--fit", "off", "--no-warmup", "--port", "0")
        return server_log(
            build.binary("llama-server"), ("-m", pair[0], "-md", pair[1], *SPEC, *flags), folder
        )
    finally:
        del os.environ["DFLASHCPP_DEVICE_MEMORY"]


def test_a_drafter_that_does_not_fit_says_so_before_anything_is_loaded(
    build_patched: Build, tmp_path: Path
) -> None:
    pair = write_target(tmp_path / "t.gguf", TINY), write_drafter(tmp_path / "d.gguf", TINY, 2)
    binary = build_patched.binary("llama-server")
    both = reserved(binary, *pair, tmp_path, "-c", "2048")
    target, drafter = (both.mib(name) - both.mib(name, "output") for name in ("target", "draft"))

    tight = _start(build_patched, pair, tmp_path, int(target + drafter) - 2)
    assert "drafter needs" in tight and "on Host" in tight
    assert "listening on" not in tight

    full = _start(build_patched, pair, tmp_path, int(target) - 2)
    assert "drafter needs" in full and "0 MiB free" in full and "the target alone takes" in full
    assert "listening on" not in full

    roomy = _start(build_patched, pair, tmp_path, int(target + drafter) + 2)
    assert "drafter needs" not in roomy
    assert "listening on" in roomy
