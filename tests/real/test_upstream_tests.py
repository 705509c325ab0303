"""llama.cpp's own tests pass on the patched trees (`make test-deep` compiles them first)."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import time
import xml.etree.ElementTree as xml
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from dflashcpp.llamacpp import toolchain
from dflashcpp.pairs import ensure_target, load_pair
from dflashcpp.server.ports import free_port
from tests.support.deep_builds import DeepBuild, deep_build

pytestmark = [pytest.mark.deep, pytest.mark.real, pytest.mark.slow]

# What touches drafting, sampling, batches, the KV cache and its files, arguments, or code of ggml we change.
# A program that ctest gives another name stands as "name: program".
DEFAULT_BASE = """
test-arg-parser test-batch-alloc test-alloc test-barrier test-tiled-mulmat test-quantize-fns
test-sampling test-reasoning-budget test-grammar-parser test-grammar-integration test-llama-grammar
test-generate-models:test-llama-archs test-recurrent-state-rollback test-save-load-state
test-state-restore-fragmented test-thread-safety
test-model-load-cancel test-autorelease test-gguf test-opt
"""
NAMES = [entry.split(":")[0] for entry in DEFAULT_BASE.split()]
PROGRAMS = [entry.split(":")[-1] for entry in DEFAULT_BASE.split()]
# f449e05: these fetch files, need Python packages, or (test-backend-sampler) expect the very word
# that the model they fetch says next
NOT_HERE = "^(test-tokenizers-ggml-vocabs|test-download-model|test-jinja-py|test-backend-sampler)$"
# test-arg-parser is through with all arguments when it reads a page of ggml.ai, which ends it on this error
# where there is no internet
ALL_BUT_THE_INTERNET = "error: cannot make GET request"


@pytest.fixture(scope="module")
def default_base() -> DeepBuild:
    """The default base, and the programs that compare its CPU code with upstream's (see below)."""
    targets = [*PROGRAMS, "test-backend-ops", "ggml-rpc", "ggml-rpc-server"]
    return with_model(deep_build("0c1e570", "tests", targets))


@pytest.fixture(scope="module")
def f449e05() -> DeepBuild:
    """Base f449e05 with every test of the tag."""
    return with_model(deep_build("f449e05", "tests", ["tests/all"]))


def with_model(build: DeepBuild) -> DeepBuild:
    """Put our small target where the tests expect the model they would fetch."""
    place = build.folder / "tinyllamas" / "stories15M-q4_0.gguf"
    place.parent.mkdir(exist_ok=True)
    place.unlink(missing_ok=True)
    place.symlink_to(ensure_target(load_pair()))
    return build


def ctest(build: DeepBuild, *arguments: str) -> dict[str, str]:
    """How each test of this selection ended (`run`: it passed), and what those said that did not."""
    report = build.folder / "report.xml"
    report.unlink(missing_ok=True)
    program = str(Path(toolchain.cmake()).with_name("ctest"))
    command = [program, "--test-dir", str(build.folder), "--output-junit", str(report)]
    command += ["-FA", "test-download-model", "--output-on-failure", *arguments]
    model = {"LLAMACPP_TEST_MODELFILE": str(ensure_target(load_pair()))}
    subprocess.run(command, env={**os.environ, **model}, stdout=subprocess.DEVNULL, check=False)
    cases = xml.parse(report).getroot().iter("testcase")
    return {case.attrib["name"]: ended(case) for case in cases}


def ended(case: xml.Element) -> str:
    status, said = case.attrib["status"], case.findtext("system-out") or ""
    if status == "run" or (case.attrib["name"] == "test-arg-parser" and ALL_BUT_THE_INTERNET in said):
        return "run"
    return "\n".join([status, *said.strip().splitlines()[-20:]])


@pytest.mark.parametrize("name", NAMES)
def test_the_default_base(name: str, default_base: DeepBuild) -> None:
    found = ctest(default_base, "-R", f"^{re.escape(name)}$")
    assert name in found
    assert set(found.values()) == {"run"}, found


def test_every_architecture_computes_the_same_everywhere(default_base: DeepBuild) -> None:
    """What ctest runs only writes the models."""
    program = default_base.program("test-llama-archs")
    ran = subprocess.run([program, "-s", "1"], capture_output=True, text=True, cwd=default_base.folder)
    assert ran.returncode == 0, (ran.stdout + ran.stderr)[-4000:]


def test_f449e05(f449e05: DeepBuild) -> None:
    found = ctest(f449e05, "-E", NOT_HERE)
    assert len(found) > 40
    assert {name: end for name, end in found.items() if end != "run"} == {}


# -- operations of ggml that patches change
#
# test-backend-ops computes each case on two backends and compares them; on a machine without a GPU both are
# the same code. So the other one is the CPU of a ggml-rpc-server in which our code is off: it is upstream's.

LOADER = """
#include <cstdlib>
struct ggml_backend_reg;
extern "C" ggml_backend_reg * ggml_backend_rpc_add_server(const char * endpoint);
extern "C" ggml_backend_reg * ggml_backend_init() { return ggml_backend_rpc_add_server(getenv("OTHER_CPU")); }
"""


def wait_for(server: subprocess.Popen[bytes], port: int) -> None:
    """Return when the server listens."""
    until = time.monotonic() + 60
    while server.poll() is None and time.monotonic() < until:
        with suppress(OSError), socket.create_connection(("127.0.0.1", port)):
            return
        time.sleep(0.1)
    raise AssertionError(f"ggml-rpc-server does not listen; exit code {server.poll()}")


@contextmanager
def other_cpu(build: DeepBuild, folder: Path, off: str) -> Iterator[dict[str, str]]:
    """A ggml-rpc-server with some of our code off; the environment in which programs find it as RPC0."""
    source, library, port = folder / "loader.cpp", folder / "loader.so", free_port()
    source.write_text(LOADER, encoding="ascii")
    libraries = [f"-L{build.folder / 'bin'}", f"-Wl,-rpath,{build.folder / 'bin'}", "-lggml-rpc"]
    compiler = toolchain.compilers()[1].path
    subprocess.run([compiler, "-shared", "-fPIC", "-o", str(library), str(source), *libraries], check=True)
    command = [str(build.program("ggml-rpc-server")), "--device", "CPU", "-H", "127.0.0.1", "-p", str(port)]
    environment = {**os.environ, "DFLASHCPP_OFF": off, "GGML_NO_BACKTRACE": "1"}
    with (folder / "server.log").open("wb") as log:
        server = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
    try:
        wait_for(server, port)
        loaded = {"OTHER_CPU": f"127.0.0.1:{port}", "GGML_BACKEND_PATH": str(library)}
        yield {**environment, **loaded, "DFLASHCPP_OFF": ""}
    finally:
        server.terminate()
        server.wait()


OPERATIONS = {"MUL_MAT": "few-rows", "TOP_K": "top-k"}
CASES = {"MUL_MAT": 1000, "TOP_K": 100}


@pytest.mark.parametrize("operation", OPERATIONS)
def test_an_operation_computes_what_upstream_does(
    operation: str, default_base: DeepBuild, tmp_path: Path
) -> None:
    program = str(default_base.program("test-backend-ops"))
    with other_cpu(default_base, tmp_path, OPERATIONS[operation]) as environment:
        ran = subprocess.run(
            [program, "test", "-o", operation, "-b", "RPC0"], env=environment, capture_output=True, text=True
        )
    assert ran.returncode == 0, (ran.stdout + ran.stderr)[-4000:]
    passed = re.search(r"(\d+)/(\d+) tests passed", ran.stdout)
    assert passed is not None and passed[1] == passed[2] and int(passed[1]) > CASES[operation]
