"""The real llama.cpp: built patched and pristine, each saying which it is."""

from __future__ import annotations

import ctypes
import json
import socket
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from dflashcpp import llamacpp
from dflashcpp.cli.app import run
from dflashcpp.llamacpp import patches, source
from dflashcpp.llamacpp.bases import find_base
from dflashcpp.llamacpp.tree import StoreTree

pytestmark = [pytest.mark.real, pytest.mark.slow]


def says(build: llamacpp.Build, *arguments: str) -> str:
    done = subprocess.run(
        [build.binary("llama-server"), *arguments], capture_output=True, text=True, check=True
    )
    return done.stdout + done.stderr


def test_each_build_shows_base_and_patches(
    build_patched: llamacpp.Build, build_pristine: llamacpp.Build
) -> None:
    digest = patches.load_series(find_base()).digest
    assert f"commit 0c1e570-p{digest})" in says(build_patched, "--version")
    assert "commit 0c1e570)" in says(build_pristine, "--version")
    assert build_patched.patches == tuple(patches.series_names(_series_folder()))
    assert build_pristine.patches == ()


def test_every_default_program_runs_from_its_folder(build_patched: llamacpp.Build) -> None:
    for name in ("llama-quantize", "llama-bench", "llama-fit-params"):
        done = subprocess.run(
            [build_patched.binary(name), "--help"], capture_output=True, text=True, check=False
        )
        assert "usage" in (done.stdout + done.stderr).lower()
    assert build_patched.libggml.is_file()


def test_code_of_the_cpu_backend_is_aligned(build_patched: llamacpp.Build) -> None:
    """Functions are; where they begin, loops cannot be looked up."""
    library = ctypes.CDLL(str(next(build_patched.libggml.parent.glob("libggml-cpu.*"))))
    for kind in ("f32", "f16", "bf16", "q4_1_q8_1", "q4_K_q8_K", "q6_K_q8_K", "q8_0_q8_0"):
        begin = ctypes.cast(getattr(library, f"ggml_vec_dot_{kind}"), ctypes.c_void_p).value
        assert begin is not None and begin % 64 == 0, kind


def test_the_base_knows_what_its_row_says(build_pristine: llamacpp.Build) -> None:
    assert "dflash" in build_pristine.knows
    assert "draft-dflash" in says(build_pristine, "--help")


def test_builds_are_found_without_building(
    build_patched: llamacpp.Build, build_pristine: llamacpp.Build
) -> None:
    assert llamacpp.find_build(backend="cpu") == build_patched
    assert llamacpp.find_build(backend="cpu", patched=False) == build_pristine
    assert llamacpp.build_ggml_base().is_file()


def test_the_source_is_the_commit_and_the_series_applies(build_patched: llamacpp.Build) -> None:
    base = find_base()
    store = source.obtain(base)
    assert store.git("rev-parse", f"{base.commit}^{{tree}}").decode().strip() == base.tree
    plan = patches.plan(patches.load_series(base), StoreTree(store, base.tree))
    assert set(plan.state.values()) == {"applies"}


def test_patches_check_passes_on_the_default_base(build_patched: llamacpp.Build, capsys) -> None:
    assert run(["patches", "--check", "--base", "0c1e570", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["problems"] == []


def test_props_show_the_patches(build_patched: llamacpp.Build, target_gguf: Path, tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [build_patched.binary("llama-server"), "-m", target_gguf, "-c", "256", "-t", "1", "-np", "1"]
    with (tmp_path / "log").open("w") as log:
        server = subprocess.Popen([*command, "--port", str(port)], stdout=log, stderr=log)
        try:
            props = _props(f"http://127.0.0.1:{port}/props", server)
        finally:
            server.terminate()
            server.wait(timeout=30)
    assert props["build_info"] == f"b0-{build_patched.version_string}"


def _props(url: str, server: subprocess.Popen[bytes]) -> dict[str, str]:
    until = time.monotonic() + 120
    while server.poll() is None and time.monotonic() < until:
        try:
            with urllib.request.urlopen(url, timeout=5) as answer:
                return json.load(answer)
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            time.sleep(0.2)
    raise AssertionError(f"llama-server did not answer; exit code {server.poll()}")


def _series_folder() -> Path:
    from dflashcpp import knowledge

    return knowledge.folder("patches") / "0c1e570"
