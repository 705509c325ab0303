"""Building, on a stand-in llama.cpp that compiles in seconds with the real cmake, ninja and compiler."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dflashcpp import llamacpp
from dflashcpp.cli.app import run
from dflashcpp.errors import DflashError, UsageError
from tests.support import fake_tools
from tests.support.stand_in import HEADER, SERIES, SPEC_TYPE_PATCH, StandIn, git


def spec_types(build: llamacpp.Build) -> str:
    return subprocess.run(
        [build.binary("llama-server")], capture_output=True, text=True, check=True
    ).stdout.strip()


def test_a_patched_build_holds_the_patch_and_shows_its_digest(stand_in: StandIn) -> None:
    stand_in.write_series(SERIES)
    build = llamacpp.build()
    assert spec_types(build) == "4 spec types"
    shown = subprocess.run(
        [build.binary("llama-server"), "--version"], capture_output=True, text=True, check=True
    )
    assert build.version_string in shown.stderr
    assert build.version_string.startswith("abc1234-p")
    assert build.patches == ("0001-spec-type.patch",)
    assert build.commit == stand_in.commit
    assert build.libggml.is_file()


def test_the_pristine_build_stands_beside_it(built_stand_in: StandIn) -> None:
    patched, pristine = llamacpp.find_build(), llamacpp.find_build(patched=False)
    assert patched is not None
    assert pristine is not None
    assert patched.root != pristine.root
    assert (spec_types(patched), spec_types(pristine)) == ("4 spec types", "3 spec types")
    assert pristine.version_string == "abc1234"
    assert pristine.patches == ()


def test_the_second_call_starts_no_tool_and_needs_no_source(
    built_stand_in: StandIn, monkeypatch, own_cache
) -> None:
    first = llamacpp.build()

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a program was started")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    assert llamacpp.build() == first


def test_a_build_can_be_moved_with_its_folder(built_stand_in: StandIn, tmp_path: Path) -> None:
    build = llamacpp.build(patches=False)
    moved = tmp_path / "moved elsewhere"
    build.root.rename(moved)
    subprocess.run([moved / "bin" / "llama-server"], check=True, capture_output=True)


def test_nothing_stale_is_found_when_a_patch_changes(stand_in: StandIn) -> None:
    stand_in.write_series(SERIES)
    old = llamacpp.build()
    stand_in.write_series(
        {"0001-spec-type.patch": SPEC_TYPE_PATCH.replace('draft-dflash",', 'draft-dflash-2",')}
    )
    assert llamacpp.find_build() is None
    new = llamacpp.build()
    assert (new.root, new.version_string) != (old.root, old.version_string)
    assert old.root.is_dir(), "a running server may still use it"


def test_nothing_stale_is_found_when_a_source_file_changes(built_stand_in: StandIn) -> None:
    assert llamacpp.find_build() is not None
    built_stand_in.write_series(SERIES, {"walk.cpp": "int walk() { return 2; }\n"})
    assert llamacpp.find_build() is None


def test_nothing_stale_is_found_when_a_flag_changes(built_stand_in: StandIn) -> None:
    llamacpp.build(patches=False)
    path = built_stand_in.patches / "bases.toml"
    path.write_text(path.read_text().replace('GGML_NATIVE = "ON"', 'GGML_NATIVE = "OFF"'))
    from dflashcpp import knowledge

    knowledge.table.cache_clear()
    assert llamacpp.find_build(patched=False) is None


def test_nothing_stale_is_found_with_other_compiler_flags(built_stand_in: StandIn, monkeypatch) -> None:
    assert llamacpp.find_build() is not None
    monkeypatch.setenv("CXXFLAGS", "-O0")
    assert llamacpp.find_build() is None


def test_changed_compiler_flags_reach_the_objects(stand_in: StandIn, monkeypatch) -> None:
    old = llamacpp.build(patches=False)
    monkeypatch.setenv("CXXFLAGS", "-Dcount_spec_types=counted_otherwise")
    new = llamacpp.build(patches=False)
    assert old.root != new.root
    assert b"counted_otherwise" in new.binary("llama-server").read_bytes()


def test_nothing_stale_is_found_on_another_cpu(built_stand_in: StandIn, monkeypatch) -> None:
    llamacpp.build(patches=False)
    monkeypatch.setattr("dflashcpp.llamacpp.toolchain.cpu_identity", lambda: "another CPU")
    assert llamacpp.find_build(patched=False) is None


def test_nothing_stale_is_found_with_another_compiler(
    built_stand_in: StandIn, monkeypatch, tmp_path: Path
) -> None:
    llamacpp.build(patches=False)
    other = fake_tools.script(tmp_path / "other", "c++", 'exec /usr/bin/c++ "$@"')
    monkeypatch.setenv("CXX", str(other))
    assert llamacpp.find_build(patched=False) is None


def test_a_replaced_compiler_is_noticed_a_touched_one_is_not(
    stand_in: StandIn, monkeypatch, tmp_path: Path
) -> None:
    compiler = fake_tools.script(tmp_path / "other", "c++", 'exec /usr/bin/c++ "$@"')
    monkeypatch.setenv("CXX", str(compiler))
    build = llamacpp.build(patches=False)
    os.utime(compiler, (1, 1))
    assert llamacpp.find_build(patched=False) == build
    fake_tools.script(tmp_path / "other", "c++", "echo c++ 99.0")
    assert llamacpp.find_build(patched=False) is None


def test_a_build_that_lost_a_file_is_made_again(stand_in: StandIn) -> None:
    build = llamacpp.build(patches=False)
    build.binary("llama-bench").unlink()
    assert llamacpp.find_build(patched=False) is None
    assert llamacpp.build(patches=False).binary("llama-bench").is_file()


def test_a_build_without_manifest_is_not_taken(built_stand_in: StandIn) -> None:
    build = llamacpp.build(patches=False)
    (build.root / "manifest.json").unlink()
    assert llamacpp.find_build(patched=False) is None


def test_an_edit_of_the_work_tree_does_not_reach_the_next_build(stand_in: StandIn, own_cache: Path) -> None:
    stand_in.write_series(SERIES)
    llamacpp.build()
    tree = own_cache / "work" / "abc1234-cpu" / "llama.cpp"
    (tree / "main.cpp").write_text("this does not compile")
    (tree / "dflashcpp").mkdir()
    (tree / "dflashcpp" / "stray.cpp").write_text("nor does this")
    stand_in.write_series({"0001-spec-type.patch": SPEC_TYPE_PATCH.replace("DFlash", "DFlash too")})
    assert spec_types(llamacpp.build()) == "4 spec types"


def test_a_failed_compilation_tells_the_error_and_the_log_and_leaves_nothing(
    stand_in: StandIn, own_cache
) -> None:
    broken = SPEC_TYPE_PATCH.replace('+    "draft-dflash",', "+    draft-dflash,")
    stand_in.write_series({"0001-spec-type.patch": broken})
    with pytest.raises(DflashError, match=r"did not compile: .*arg\.cpp.*error: .*draft") as caught:
        llamacpp.build()
    assert caught.value.hint is not None
    log = Path(caught.value.hint.rpartition("the whole log is ")[2])
    assert "error:" in log.read_text()
    assert list((own_cache / "builds").iterdir()) == []
    assert llamacpp.find_build() is None


def test_an_interrupted_build_leaves_nothing_and_the_next_one_ends_well(
    stand_in: StandIn, own_cache, monkeypatch
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("dflashcpp.llamacpp.builds.write_manifest", interrupt)
        with pytest.raises(KeyboardInterrupt):
            llamacpp.build(patches=False)
    assert list((own_cache / "builds").iterdir()) == []
    assert llamacpp.build(patches=False).binary("llama-server").is_file()


def test_ninja_is_ended_when_the_build_is_interrupted(stand_in: StandIn, own_cache, monkeypatch) -> None:
    import dflashcpp.llamacpp.ninja as running

    started = []
    popen = subprocess.Popen

    def remember(*arguments, **settings):
        started.append(popen(*arguments, **settings))
        return started[-1]

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(running.subprocess, "Popen", remember)
    monkeypatch.setattr(running, "_show", interrupt)
    with pytest.raises(KeyboardInterrupt):
        llamacpp.build(patches=False)
    assert started[-1].poll() is not None


def test_ggml_base_alone_is_built_and_later_kept_in_the_whole_build(stand_in: StandIn) -> None:
    library = llamacpp.build_ggml_base()
    assert library.is_file()
    assert not (library.parent / "llama-server").exists()
    assert llamacpp.find_build(patched=False) is None
    build = llamacpp.build(patches=False)
    assert build.libggml.is_file()
    assert llamacpp.build_ggml_base() == build.libggml


def test_another_target_joins_the_same_build(stand_in: StandIn) -> None:
    first = llamacpp.build(patches=False, targets=("llama-bench",))
    second = llamacpp.build(patches=False, targets=("llama-quantize",))
    assert first.root == second.root
    assert second.targets == ("llama-bench", "llama-quantize")


def test_what_a_killed_build_left_goes_and_what_another_kind_stages_stays(
    stand_in: StandIn, own_cache: Path
) -> None:
    left, other = (own_cache / "builds" / f"staged-abc1234-cpu{kind}.x" for kind in ("-pristine", ""))
    left.mkdir(parents=True)
    other.mkdir()
    llamacpp.build(patches=False, targets=("ggml-base",))
    assert not left.exists()
    assert other.exists()


def test_an_unknown_target_is_told(stand_in: StandIn) -> None:
    with pytest.raises(DflashError, match="llama-nonsense"):
        llamacpp.build(patches=False, targets=("llama-nonsense",))


def test_a_program_that_was_not_built_is_told_with_the_command(built_stand_in: StandIn) -> None:
    build = llamacpp.build(patches=False)
    with pytest.raises(DflashError, match="no llama-perplexity") as caught:
        build.binary("llama-perplexity")
    assert caught.value.hint == "dflashcpp build --target llama-perplexity"


def test_a_tree_in_a_foreign_repository_is_patched_all_the_same(
    stand_in: StandIn, tmp_path, monkeypatch
) -> None:
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    git(foreign, "init", "--quiet")
    monkeypatch.setenv("DFLASHCPP_CACHE", str(foreign / ".cache"))
    stand_in.write_series(SERIES)
    build = llamacpp.build()
    assert spec_types(build) == "4 spec types"
    assert git(foreign, "status", "--porcelain", "--untracked-files=no") == ""


def test_files_of_patches_src_are_compiled_in(stand_in: StandIn) -> None:
    call = """
--- a/main.cpp
+++ b/main.cpp
@@ -2,5 +2,6 @@

 int ggml_answer();
 int count_spec_types();
+int walk();

 int main() {
@@ -7,4 +8,4 @@
     fprintf(stderr, "version: 0 (build %s, commit %s)\\n", BUILD_NUMBER, BUILD_COMMIT);
     printf("%d spec types\\n", count_spec_types());
-    return ggml_answer() - 42;
+    return ggml_answer() - 42 + walk() - 7;
 }
"""
    only_server = """
--- a/CMakeLists.txt
+++ b/CMakeLists.txt
@@ -11,4 +11,4 @@
 file(GLOB ours dflashcpp/*.cpp)
 if(ours)
-    target_sources(llama-server PRIVATE ${ours})
+    target_sources(ggml-base PRIVATE ${ours})
 endif()
"""
    stand_in.write_series(
        {"0001-walk.patch": HEADER + call, "0002-cmake.patch": HEADER + only_server},
        {"walk.cpp": "int walk() { return 7; }\n"},
    )
    assert spec_types(llamacpp.build()) == "3 spec types"


def test_cmake_gets_every_flag_that_keeps_the_build_offline(stand_in: StandIn, tmp_path, monkeypatch) -> None:
    log = tmp_path / "arguments"
    fake_tools.recording_cmake(tmp_path / "bin", log)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    with pytest.raises(DflashError, match=r"could not configure.*only records"):
        llamacpp.build(patches=False)
    given = set(log.read_text().splitlines())
    off = ("UI", "TESTS", "EXAMPLES", "APP")
    assert {f"-DLLAMA_BUILD_{name}=OFF" for name in off} <= given
    assert {"-DLLAMA_OPENSSL=OFF", "-DLLAMA_USE_PREBUILT_UI=OFF", "-DLLAMA_BUILD_NUMBER=0"} <= given
    assert {"-DLLAMA_BUILD_COMMIT=abc1234", "-DGGML_NATIVE=ON", "-DCMAKE_BUILD_RPATH=$ORIGIN"} <= given
    assert not [word for word in given if "CURL" in word]


@pytest.mark.parametrize("present", [True, False])
def test_ccache_is_used_where_it_is_and_never_needed(
    stand_in: StandIn, tmp_path, monkeypatch, present: bool
) -> None:
    tools = tmp_path / "bin"
    for name in ("git", "cc", "c++", "ninja"):
        fake_tools.script(tools, name, f'exec {shutil.which(name)} "$@"')
    if present:
        fake_tools.script(tools, "ccache", "exit 0")
    fake_tools.script(
        tools, "cmake", f"[ \"$1\" = --version ] && echo cmake version 3.30 || env > '{tmp_path}/seen'"
    )
    monkeypatch.setenv("PATH", f"{tools}:/bin")
    monkeypatch.setattr(shutil, "which", _which_in(tools))
    with pytest.raises(DflashError):
        llamacpp.build(patches=False)
    seen = (tmp_path / "seen").read_text()
    assert ("CCACHE_BASEDIR" in seen) is present
    assert ("CCACHE_EXTRAFILES" in seen) is present


def _which_in(folder: Path):
    """`shutil.which` that looks in `folder` only."""
    return lambda name, **_: str(folder / name) if (folder / name).is_file() else None


def test_a_dry_run_does_nothing_and_says_what_would_be_done(
    stand_in: StandIn, own_cache: Path, capsys
) -> None:
    stand_in.write_series(SERIES)
    assert run(["build", "--dry-run", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["base"] == "abc1234"
    assert shown["source"] == "to be fetched: llama-cpp-python==99.1"
    assert shown["patches"] == {"0001-spec-type.patch": "not checked: the source is not in the cache"}
    assert shown["up_to_date"] is False
    assert not Path(shown["root"]).exists()
    assert list((own_cache / "sources").iterdir()) == []
    assert run(["build", "--dry-run", "--source", str(own_cache)]) == 1


def test_the_command_prints_one_json_object(built_stand_in: StandIn, capsys) -> None:
    assert run(["build", "--no-patches", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert {"base", "commit", "patches", "llama_server", "libggml"} <= shown.keys()
    assert Path(shown["llama_server"]).is_file()


def test_a_base_without_patches_says_so(stand_in: StandIn) -> None:
    with pytest.raises(DflashError, match="no patches for the base abc1234") as caught:
        llamacpp.build()
    assert "--no-patches" in (caught.value.hint or "")
    assert llamacpp.find_build() is None


def test_an_unknown_base_and_backend_are_told_with_what_there_is(stand_in: StandIn) -> None:
    with pytest.raises(DflashError, match="fffffff") as caught:
        llamacpp.build(base="fffffff")
    assert "abc1234" in (caught.value.hint or "")
    with pytest.raises(UsageError, match="rocm"):
        llamacpp.build(backend="rocm", patches=False)


def test_jobs_below_one_are_refused(stand_in: StandIn) -> None:
    with pytest.raises(DflashError, match="--jobs 0"):
        llamacpp.build(patches=False, jobs=0)


def test_two_processes_build_once(stand_in: StandIn, own_cache: Path) -> None:
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(2) as pool:
        made = [job.result() for job in [pool.submit(llamacpp.build, patches=False) for _ in range(2)]]
    assert made[0] == made[1]
    assert [path.name for path in (own_cache / "builds").iterdir()] == [made[0].root.name]


def test_ctrl_c_while_compiling_ends_the_compiler_and_leaves_no_build(
    stand_in: StandIn, own_cache, tmp_path
) -> None:
    started, ended = tmp_path / "started", tmp_path / "ended"
    slow = f"""case "$*" in *main.cpp*)
    trap 'touch "{ended}"; exit 1' TERM INT
    touch "{started}"
    i=0; while [ $i -lt 600 ]; do sleep 0.1; i=$((i + 1)); done;;
esac
exec /usr/bin/c++ "$@\""""
    compiler = fake_tools.script(tmp_path / "slow", "c++", slow)
    code = (
        "import sys, pathlib; from dflashcpp import knowledge; from dflashcpp.cli.app import run;"
        "knowledge.root = lambda: pathlib.Path(sys.argv[1]);"
        "sys.exit(run(['build', '--no-patches', '--jobs', '1']))"
    )
    # One job: dash drops a signal that comes while it starts a program, so a second compiler could miss it.
    command = [sys.executable, "-c", code, str(stand_in.knowledge)]
    environment = os.environ | {"CXX": str(compiler)}
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as process:
        _wait_for(started)
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=30) == 130
        assert process.stderr is not None
        assert "Traceback" not in process.stderr.read()
    _wait_for(ended)
    assert list((own_cache / "builds").iterdir()) == []
    assert llamacpp.build(patches=False).binary("llama-server").is_file()


def _wait_for(path: Path) -> None:
    until = time.monotonic() + 120
    while not path.exists():
        assert time.monotonic() < until, f"{path.name} did not come"
        time.sleep(0.05)


def test_ggml_base_waits_for_no_other_build(stand_in: StandIn, own_cache: Path) -> None:
    from filelock import FileLock

    (own_cache / "work").mkdir(parents=True)
    locks = [FileLock(own_cache / "work" / f"abc1234-cpu{kind}.lock") for kind in ("", "-pristine")]
    with locks[0], locks[1]:
        assert llamacpp.build_ggml_base().is_file()
