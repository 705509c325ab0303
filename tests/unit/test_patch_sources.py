"""The C++ of patches/src alone: it compiles without llama.cpp, without a warning, and does what it says."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from dflashcpp import knowledge

SOURCES = knowledge.folder("patches") / "src"
TESTS = sorted(path.name for path in (SOURCES / "tests").glob("*-test.cpp"))
PORTABLE = [(name, ()) for name in TESTS]
# what the build on this machine takes (GGML_NATIVE), where the code has a branch for an instruction set
NATIVE = [
    (name, ("-march=native",))
    for name in TESTS
    if "#if defined(__AVX" in (SOURCES / f"{name.removesuffix('-test.cpp')}.h").read_text(encoding="utf-8")
]
STRICT = ("-std=c++17", "-O1", "-g", "-Wall", "-Wextra", "-Wpedantic", "-Werror")
SANITIZED = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")


@pytest.mark.parametrize(("name", "machine"), PORTABLE + NATIVE)
def test_the_sources_pass_their_own_tests_under_sanitizers(
    name: str, machine: tuple[str, ...], tmp_path: Path
) -> None:
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    program = tmp_path / "test"
    command = [compiler, *STRICT, *SANITIZED, *machine, "-o", program, SOURCES / "tests" / name]
    compiled = subprocess.run(command, capture_output=True, text=True)
    assert compiled.returncode == 0, compiled.stderr
    ran = subprocess.run([program, tmp_path], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr


def test_every_header_that_needs_no_llama_cpp_has_a_test() -> None:
    outside = ('"../common/', '"../src/', '"ggml.h"')
    headers = {
        path.stem for path in SOURCES.glob("*.h") if not any(name in path.read_text() for name in outside)
    }
    assert headers == {name.removesuffix("-test.cpp") for name in TESTS}
