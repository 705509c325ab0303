"""Builds of a patched base that no user needs: with sanitizers, and with llama.cpp's own tests.

They lie in the cache under `work/<base>-deep`: one source tree, made equal to the base and its series
before every use, and one folder of objects a kind of build, kept, so that only what changed is compiled.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from dflashcpp import paths
from dflashcpp.llamacpp import ninja, recipe, toolchain
from dflashcpp.llamacpp.patches import plan
from dflashcpp.llamacpp.source import obtain
from dflashcpp.llamacpp.tree import StoreTree, sync
from dflashcpp.progress import SILENT, Progress

# -O1 as the sanitizers' authors advise; no NDEBUG: llama.cpp's asserts count as well
SANITIZED = {
    "CMAKE_BUILD_TYPE": "RelWithDebInfo",
    "CMAKE_C_FLAGS_RELWITHDEBINFO": "-O1 -g1",
    "CMAKE_CXX_FLAGS_RELWITHDEBINFO": "-O1 -g1",
    "LLAMA_SANITIZE_ADDRESS": "ON",
    "LLAMA_SANITIZE_UNDEFINED": "ON",
    "GGML_SANITIZE_ADDRESS": "ON",
    "GGML_SANITIZE_UNDEFINED": "ON",
}
WITH_TESTS = {"LLAMA_BUILD_TESTS": "ON", "GGML_RPC": "ON"}
KINDS = {"sanitized": SANITIZED, "tests": WITH_TESTS}


@dataclass(frozen=True)
class DeepBuild:
    """A build in its work folder: the source tree and the folder of objects and programs."""

    base: str
    tree: Path
    folder: Path

    def program(self, name: str) -> Path:
        """The program of this name."""
        return self.folder / "bin" / name


def deep_build(base: str, kind: str, targets: Iterable[str], progress: Progress = SILENT) -> DeepBuild:
    """The patched `base` compiled as `kind` of `KINDS`, `targets` only. Raises DflashError like `build`."""
    from filelock import FileLock

    work = paths.cache_dir("work", f"{base}-deep")
    with FileLock(work.with_name(f"{work.name}.lock")):
        wanted = recipe.request(base, "cpu", patched=True)
        made = DeepBuild(wanted.base.tag, work / "llama.cpp", work / kind)
        _write_tree(wanted, made.tree, progress)
        _compile(recipe.complete(wanted, progress), made, kind, list(targets), progress)
    return made


def _write_tree(wanted: recipe.Request, tree: Path, progress: Progress) -> None:
    store = obtain(wanted.base, progress=progress)
    assert wanted.series is not None
    changes = plan(wanted.series, StoreTree(store, wanted.base.tree))
    assert set(changes.state.values()) == {"applies"}, changes.state
    sync(store, wanted.base.tree, tree, changes.files)


def _compile(
    tools: recipe.Recipe, made: DeepBuild, kind: str, targets: list[str], progress: Progress
) -> None:
    log = made.folder.with_name(f"{kind}.log")
    log.unlink(missing_ok=True)
    settings = tools.cmake_settings() | KINDS[kind]
    program = f"-DCMAKE_MAKE_PROGRAM={toolchain.ninja()}"
    configure = [toolchain.cmake(), "-S", str(made.tree), "-B", str(made.folder), "-G", "Ninja", program]
    configure += [f"-D{key}={text}" for key, text in settings.items()]
    jobs = toolchain.job_count(None)
    build = [toolchain.ninja(), "-C", str(made.folder), "-j", str(jobs), *targets]
    environment = _environment(made)
    ninja.configure(configure, log, environment, progress)
    label = f"compiling {made.base} ({kind}, {jobs} at once)"
    progress.say(label)
    ninja.compile_targets(build, log, environment, progress, label)


def _environment(made: DeepBuild) -> dict[str, str]:
    """As for a user's build: with ccache, objects are shared between folders but not between CPUs."""
    mark = made.tree.with_name("cpu")
    mark.write_text(toolchain.cpu_identity(), encoding="ascii")
    base = str(made.tree.parent)
    ccache = {"CCACHE_BASEDIR": base, "CCACHE_NOHASHDIR": "1", "CCACHE_EXTRAFILES": str(mark)}
    return {**os.environ, **(ccache if shutil.which("ccache") else {}), "LC_ALL": "C"}
