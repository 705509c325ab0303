"""Compilers, cmake, ninja, jobs and the GPU toolchains, on stand-ins for the real programs."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from dflashcpp import llamacpp
from dflashcpp.errors import DflashError
from dflashcpp.llamacpp import gpu_tools, toolchain
from dflashcpp.progress import Progress
from tests.support import fake_tools
from tests.support.stand_in import StandIn

CUDA_12_4 = (50, 60, 70, 75, 80, 86, 89, 90)
CUDA_13_0 = (75, 80, 86, 89, 90, 100, 120)


@pytest.fixture
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A PATH of one empty folder, no CUDA anywhere, no variables that point at tools."""
    folder = tmp_path / "my tools"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setattr(gpu_tools, "CUDA_ROOTS", tmp_path / "local")
    for name in ("CC", "CXX", "CUDACXX", "CUDA_HOME", "CUDA_PATH", "CUDAARCHS"):
        monkeypatch.delenv(name, raising=False)
    return folder


class Heard(Progress):
    def __init__(self) -> None:
        self.said: list[str] = []

    def say(self, text: str) -> None:
        self.said.append(text)


def test_missing_compilers_are_told_with_the_command(bare: Path) -> None:
    with pytest.raises(DflashError, match=r"no C and C\+\+ compiler") as caught:
        toolchain.compilers()
    assert caught.value.hint == "sudo apt-get install build-essential"
    fake_tools.script(bare, "gcc", "echo gcc 12")
    with pytest.raises(DflashError, match=r"no C\+\+ compiler"):
        toolchain.compilers()


def test_a_compiler_that_does_not_run_is_told(bare: Path) -> None:
    fake_tools.script(bare, "cc", "exit 1")
    fake_tools.script(bare, "c++", "exit 1")
    with pytest.raises(DflashError, match=r"my tools/cc does not run"):
        toolchain.compilers()


def test_cc_and_cxx_are_obeyed_without_their_ccache(bare: Path, monkeypatch) -> None:
    for name in ("cc", "c++", "clang-19", "clang++-19"):
        fake_tools.script(bare, name, f"echo {name}")
    monkeypatch.setenv("CC", "ccache clang-19")
    monkeypatch.setenv("CXX", str(bare / "clang++-19").replace(" ", "\\ "))
    assert [tool.version for tool in toolchain.compilers()] == ["clang-19", "clang++-19"]


def test_options_in_cxx_are_refused_with_their_right_place(bare: Path, monkeypatch) -> None:
    monkeypatch.setenv("CXX", "g++ -O1")
    with pytest.raises(DflashError, match="CXX holds options") as caught:
        toolchain.compilers()
    assert caught.value.hint == "put them in CXXFLAGS"


def test_an_old_cmake_gives_way_to_the_packaged_one(bare: Path) -> None:
    fake_tools.script(bare, "cmake", "echo 'cmake version 3.10.2'")
    assert Path(toolchain.cmake()).parent != bare
    fake_tools.script(bare, "cmake", "echo 'cmake version 3.25.1'")
    assert Path(toolchain.cmake()).parent == bare


def test_without_cmake_and_ninja_in_path_the_packages_give_them(bare: Path) -> None:
    assert "cmake version" in toolchain.says(toolchain.cmake())
    assert toolchain.says(toolchain.ninja())


def test_no_cmake_at_all_is_told(bare: Path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "cmake", None)
    with pytest.raises(DflashError, match=r"cmake 3\.18 or newer is needed") as caught:
        toolchain.cmake()
    assert "-m pip install cmake" in str(caught.value.hint)


@pytest.mark.parametrize(("gib", "cores", "jobs"), [(23.0, 2, 2), (5.0, 16, 2), (0.5, 16, 1), (64.0, 8, 8)])
def test_jobs_are_limited_by_memory_and_cores(monkeypatch, gib: float, cores: int, jobs: int) -> None:
    monkeypatch.setattr(toolchain, "free_gib", lambda: gib)
    monkeypatch.setattr(toolchain, "_cores", lambda: cores)
    assert toolchain.job_count(None) == jobs
    assert toolchain.job_count(5) == 5


def test_the_cpu_mark_changes_with_instruction_sets_and_not_with_frequency() -> None:
    cpu = ["vendor_id : X", "model\t\t: 1", "cpu MHz : 2000.0", "flags : avx avx2"]
    read = toolchain._first_cpu
    assert read([*cpu, "", "flags : later cpu"]) == ["vendor_id : X", "model\t\t: 1", "flags : avx avx2"]
    assert toolchain.cpu_identity() == toolchain.cpu_identity()


# --- CUDA


def test_the_nvcc_used_and_its_version_are_told(bare: Path) -> None:
    fake_tools.nvcc(bare, "13.0", CUDA_13_0)
    fake_tools.nvidia_smi(bare, "NVIDIA H200, 9.0", "NVIDIA H200, 9.0")
    heard = Heard()
    found = gpu_tools.probe("cuda", heard)
    assert found.settings == {
        "CMAKE_CUDA_COMPILER": str(bare / "nvcc"),
        "CMAKE_CUDA_ARCHITECTURES": "90-real",
    }
    assert heard.said == [f"CUDA compiler {bare}/nvcc (CUDA 13.0), for GPUs of compute capability 9.0"]


def test_an_nvcc_too_old_for_the_gpu_gives_way_to_a_newer_one_under_usr_local(
    bare: Path, tmp_path: Path
) -> None:
    fake_tools.nvcc(bare, "12.4", CUDA_12_4)
    fake_tools.nvcc(tmp_path / "local" / "cuda-12.2" / "bin", "12.2", CUDA_12_4)
    newer = fake_tools.nvcc(tmp_path / "local" / "cuda-13.0" / "bin", "13.0", CUDA_13_0)
    fake_tools.nvidia_smi(bare, "NVIDIA GeForce RTX 5090, 12.0")
    assert gpu_tools.probe("cuda").settings["CMAKE_CUDA_COMPILER"] == str(newer)


def test_a_gpu_that_no_nvcc_knows_is_told_before_compiling(bare: Path) -> None:
    fake_tools.nvcc(bare, "12.4", CUDA_12_4)
    fake_tools.nvidia_smi(bare, "NVIDIA GeForce RTX 5090, 12.0")
    with pytest.raises(
        DflashError, match=r"compute capability 12\.0 .*nvcc \(CUDA 12\.4\): 5\.0 to 9\.0"
    ) as caught:
        gpu_tools.probe("cuda")
    assert "newer CUDA toolkit" in str(caught.value.hint)


def test_a_gpu_that_cuda_dropped_is_told_to_be_too_old(bare: Path) -> None:
    fake_tools.nvcc(bare, "13.0", CUDA_13_0)
    fake_tools.nvidia_smi(bare, "NVIDIA GeForce GTX 1080, 6.1")
    with pytest.raises(DflashError, match=r"compute capability 6\.1") as caught:
        gpu_tools.probe("cuda")
    assert "older CUDA toolkit" in str(caught.value.hint)


def test_two_kinds_of_gpu_are_both_compiled_for(bare: Path) -> None:
    fake_tools.nvcc(bare, "13.0", CUDA_13_0)
    fake_tools.nvidia_smi(bare, "NVIDIA GeForce RTX 4090, 8.9", "NVIDIA GeForce RTX 3090, 8.6")
    assert gpu_tools.probe("cuda").settings["CMAKE_CUDA_ARCHITECTURES"] == "86-real;89-real"


def test_cuda_home_and_cudacxx_come_before_path(bare: Path, tmp_path: Path, monkeypatch) -> None:
    fake_tools.nvcc(bare, "12.4", CUDA_12_4)
    home = fake_tools.nvcc(tmp_path / "home" / "bin", "12.6", CUDA_12_4)
    asked = fake_tools.nvcc(tmp_path / "asked", "12.8", CUDA_12_4)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "home"))
    assert gpu_tools.find_nvcc()[0].tool.path == str(home)
    monkeypatch.setenv("CUDACXX", str(asked))
    assert [nvcc.release for nvcc in gpu_tools.find_nvcc()] == [(12, 8), (12, 6), (12, 4)]


def test_no_nvcc_is_told(bare: Path) -> None:
    with pytest.raises(DflashError, match=r"no CUDA compiler.*/usr/local/cuda"):
        gpu_tools.probe("cuda")


def test_without_a_gpu_the_architecture_must_be_said(bare: Path, monkeypatch) -> None:
    fake_tools.nvcc(bare, "13.0", CUDA_13_0)
    fake_tools.nvidia_smi(bare)
    with pytest.raises(DflashError, match="shows no GPU") as caught:
        gpu_tools.probe("cuda")
    assert "CUDAARCHS=89" in str(caught.value.hint)
    monkeypatch.setenv("CUDAARCHS", "89;90a")
    assert gpu_tools.probe("cuda").settings["CMAKE_CUDA_ARCHITECTURES"] == "89;90a"
    monkeypatch.setenv("CUDAARCHS", "all")
    with pytest.raises(DflashError, match="CUDAARCHS is 'all'"):
        gpu_tools.probe("cuda")


def test_cmake_gets_the_cuda_settings(stand_in: StandIn, tmp_path: Path, monkeypatch) -> None:
    tools = tmp_path / "bin"
    fake_tools.nvcc(tools, "13.0", CUDA_13_0)
    fake_tools.nvidia_smi(tools, "NVIDIA H200, 9.0")
    fake_tools.recording_cmake(tools, tmp_path / "arguments")
    monkeypatch.setenv("PATH", f"{tools}{os.pathsep}{os.environ['PATH']}")
    with pytest.raises(DflashError, match="only records"):
        llamacpp.build(backend="cuda", patches=False)
    given = set((tmp_path / "arguments").read_text().splitlines())
    assert {
        "-DGGML_CUDA=ON",
        f"-DCMAKE_CUDA_COMPILER={tools}/nvcc",
        "-DCMAKE_CUDA_ARCHITECTURES=90-real",
        "-DLLAMA_OPENSSL=OFF",
    } <= given


def test_another_gpu_is_another_build(stand_in: StandIn, tmp_path: Path, monkeypatch) -> None:
    tools = tmp_path / "bin"
    fake_tools.nvcc(tools, "13.0", CUDA_13_0)
    monkeypatch.setenv("PATH", f"{tools}{os.pathsep}{os.environ['PATH']}")
    roots = []
    for gpu in ("NVIDIA H200, 9.0", "NVIDIA GeForce RTX 4090, 8.9"):
        fake_tools.nvidia_smi(tools, gpu)
        roots.append(llamacpp.intent(backend="cuda", patches=False).root)
    assert roots[0] != roots[1]


# --- Vulkan and Metal


def test_vulkan_wants_its_shader_compiler(bare: Path) -> None:
    with pytest.raises(DflashError, match="glslc") as caught:
        gpu_tools.probe("vulkan")
    assert "apt-get install" in str(caught.value.hint)
    fake_tools.script(bare, "glslc", "echo shaderc v2023")
    assert gpu_tools.probe("vulkan").tools[0].version == "shaderc v2023"


@pytest.mark.skipif(sys.platform == "darwin", reason="Metal is there")
def test_metal_is_refused_where_it_cannot_be(bare: Path) -> None:
    with pytest.raises(DflashError, match="macOS only"):
        gpu_tools.probe("metal")


@pytest.mark.parametrize(("backend", "flag"), [("vulkan", "GGML_VULKAN"), ("metal", "GGML_METAL")])
def test_each_backend_sets_its_flag(backend: str, flag: str) -> None:
    from dflashcpp.llamacpp.recipe import settings

    assert settings(backend)[flag] == "ON"
    assert settings("cpu").get(flag, "OFF") == "OFF"
