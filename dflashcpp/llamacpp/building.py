"""Building llama.cpp: prove the source, apply the patches, compile, check, and keep it in the cache.

Objects stay in `work/<kind of build>`, so that a changed patch compiles only what it touches. What
is used lies in `builds/<kind of build>-<digest>` and appears there whole, in one rename.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from dflashcpp import paths
from dflashcpp.errors import DflashError
from dflashcpp.llamacpp import builds, ninja, toolchain
from dflashcpp.llamacpp.bases import find_base
from dflashcpp.llamacpp.builds import Build
from dflashcpp.llamacpp.git import ObjectStore
from dflashcpp.llamacpp.patches import Plan, has_series, plan
from dflashcpp.llamacpp.recipe import DEFAULT_TARGETS, Recipe, Request, complete, request
from dflashcpp.llamacpp.source import cached, check_source, obtain, scratch_folder
from dflashcpp.llamacpp.tree import StoreTree, sync
from dflashcpp.progress import SILENT, Progress

_GGML_TARGETS = ("ggml-base",)


@dataclass(frozen=True)
class Intent:
    """What `build` would do: for --dry-run."""

    base: str
    commit: str
    backend: str
    version_string: str
    patches: dict[str, str]
    targets: tuple[str, ...]
    jobs: int
    source: str
    cmake: tuple[str, ...]
    root: Path
    up_to_date: bool


def build(
    *,
    base: str | None = None,
    backend: str = "cpu",
    patches: bool = True,
    source: Path | None = None,
    jobs: int | None = None,
    targets: Iterable[str] | None = None,
    progress: Progress = SILENT,
) -> Build:
    """A finished build, made now unless it is in the cache already.

    `source` is a clean checkout of the base to take instead of fetching it; it is only read. `jobs`
    is how many files compile at once (default: what cores and memory allow). Raises DflashError
    for a missing tool, a source that cannot be had or is not the base, a patch that does not apply,
    or a failed compilation; nothing then stands under the build's name.
    """
    wanted = request(base, backend, patched=patches)
    names = tuple(dict.fromkeys(targets or DEFAULT_TARGETS))
    return _build(wanted, names, source, toolchain.job_count(jobs), progress)


def _build(
    wanted: Request, names: tuple[str, ...], source: Path | None, jobs: int, progress: Progress
) -> Build:
    found = builds.find_for(wanted, names)
    if found and source is None:
        return found
    recipe = complete(wanted, progress)
    with _work_folder(wanted, progress) as work:
        found = builds.find_for(wanted, names)
        if found and source is None:
            return found
        return _Job(recipe, names, work, jobs, progress).run(source)


def build_ggml_base(progress: Progress = SILENT) -> Path:
    """The path of libggml-base, from any finished build, else compiled now (this target alone is quick).

    It is compiled apart, so that nobody waits for a whole llama.cpp, and with the patches of the
    default base: the bytes are llama.cpp's, some types come sooner.
    """
    found = builds.find_build() or builds.find_build(patched=False)
    if found is None:
        wanted = replace(request(None, "cpu", patched=has_series(find_base(None))), part="ggml")
        found = _build(wanted, _GGML_TARGETS, None, toolchain.job_count(None), progress)
    return found.libggml


def intent(
    *,
    base: str | None = None,
    backend: str = "cpu",
    patches: bool = True,
    source: Path | None = None,
    jobs: int | None = None,
    targets: Iterable[str] | None = None,
    progress: Progress = SILENT,
) -> Intent:
    """What `build` would do with the same arguments; nothing is fetched, written or compiled.

    Tools are checked, and so are the patches when the source is in the cache.
    """
    wanted = request(base, backend, patched=patches)
    names = tuple(dict.fromkeys(targets or DEFAULT_TARGETS))
    recipe = complete(wanted, progress)
    if source is not None:
        check_source(source, wanted.base)
    store = cached(wanted.base)
    work = paths.cache_dir("work") / wanted.name
    return Intent(
        base=wanted.base.tag,
        commit=wanted.base.commit,
        backend=backend,
        version_string=wanted.version_string,
        patches=_patch_states(wanted, store),
        targets=names,
        jobs=toolchain.job_count(jobs),
        source=str(source) if source else ("cached" if store else f"to be fetched: {wanted.base.sdist}"),
        cmake=tuple(_cmake_command(recipe, work)),
        root=builds.builds_folder() / f"{wanted.name}-{recipe.digest}",
        up_to_date=builds.find_for(wanted, names) is not None,
    )


@dataclass(frozen=True)
class _Job:
    """One build under way; its work folder is locked."""

    recipe: Recipe
    targets: tuple[str, ...]
    work: Path
    jobs: int
    progress: Progress

    def run(self, source: Path | None) -> Build:
        wanted = self.recipe.request
        store = obtain(wanted.base, source=source, progress=self.progress)
        changes = self._plan(store)
        final = builds.builds_folder() / f"{wanted.name}-{self.recipe.digest}"
        present = builds.load_build(final)
        targets = tuple(dict.fromkeys((*(present.targets if present else ()), *self.targets)))
        if present and targets == present.targets:
            return present
        with self.progress.task("writing the source tree"):
            sync(store, wanted.base.tree, self.work / "llama.cpp", changes.files)
        self._compile(targets)
        with scratch_folder(final.parent, f"staged-{wanted.name}.") as scratch:
            staged = scratch / "build"
            shutil.copytree(self.work / "build" / "bin", staged / "bin", symlinks=True)
            _check(staged / "bin", targets, wanted, self.progress)
            builds.write_manifest(staged, self._facts(changes, targets))
            builds.install(staged, final)
        made = builds.load_build(final)
        if made is None:
            raise DflashError(f"the build in {final} is not whole", hint="run the command again")
        return made

    def _plan(self, store: ObjectStore) -> Plan:
        series = self.recipe.request.series
        if series is None:
            return Plan({}, {})
        result = plan(series, StoreTree(store, self.recipe.request.base.tree))
        for name, state in result.state.items():
            if state != "applies":
                self.progress.say(f"{name}: {state}")
        return result

    def _compile(self, targets: tuple[str, ...]) -> None:
        log = self.work / "build.log"
        log.unlink(missing_ok=True)
        environment = self._environment()
        self._forget_other_builds()
        ninja.configure(_cmake_command(self.recipe, self.work), log, environment, self.progress)
        command = [toolchain.ninja(), "-C", str(self.work / "build"), "-j", str(self.jobs), *targets]
        label = f"compiling llama.cpp {self.recipe.request.version_string} ({self.jobs} at once)"
        ninja.compile_targets(command, log, environment, self.progress, label)

    def _forget_other_builds(self) -> None:
        """Objects of other settings or tools go; of other patches only what was linked."""
        build = self.work / "build"
        mark = self.work / "configured.json"
        text = json.dumps(self._lasting_facts(), sort_keys=True)
        if not mark.is_file() or mark.read_text(encoding="utf-8") != text:
            shutil.rmtree(build, ignore_errors=True)
            mark.write_text(text, encoding="utf-8")
        digest = self.work / "digest"
        if not digest.is_file() or digest.read_text(encoding="utf-8") != self.recipe.digest:
            shutil.rmtree(build / "bin", ignore_errors=True)
            digest.write_text(self.recipe.digest, encoding="utf-8")

    def _lasting_facts(self) -> dict[str, object]:
        """What objects may only be kept for, patches aside."""
        settings = self.recipe.cmake_settings()
        del settings["LLAMA_BUILD_COMMIT"]
        return {
            "settings": settings,
            "tools": [tool.record() for tool in self.recipe.tools],
            "cpu": toolchain.cpu_identity(),
            "environment": toolchain.build_variables(),
        }

    def _environment(self) -> dict[str, str]:
        """The build's environment: with ccache, objects are shared between folders but not between CPUs."""
        mark = self.work / "cpu"
        mark.write_text(toolchain.cpu_identity(), encoding="ascii")
        extra = {"CCACHE_BASEDIR": str(self.work), "CCACHE_NOHASHDIR": "1", "CCACHE_EXTRAFILES": str(mark)}
        return {**os.environ, **(extra if shutil.which("ccache") else {}), "LC_ALL": "C"}

    def _facts(self, changes: Plan, targets: tuple[str, ...]) -> dict[str, object]:
        wanted = self.recipe.request
        return {
            "base": wanted.base.tag,
            "commit": wanted.base.commit,
            "backend": wanted.backend,
            "digest": self.recipe.digest,
            "patches": [name for name, state in changes.state.items() if not state.startswith("not needed")],
            "targets": list(targets),
            "inputs": wanted.inputs(),
            "tools": [tool.record() for tool in self.recipe.tools],
            "cmake": self.recipe.cmake_settings(),
        }


@contextmanager
def _work_folder(wanted: Request, progress: Progress) -> Iterator[Path]:
    """The folder of sources and objects for this kind of build, for one process at a time."""
    from filelock import FileLock, Timeout

    work = paths.cache_dir("work", wanted.name)
    lock = FileLock(work.with_name(f"{work.name}.lock"))
    try:
        lock.acquire(timeout=0)
    except Timeout:
        progress.say(f"another process builds {wanted.name}; waiting for it")
        lock.acquire()
    try:
        yield work
    finally:
        lock.release()


def _cmake_command(recipe: Recipe, work: Path) -> list[str]:
    settings = [f"-D{key}={text}" for key, text in recipe.cmake_settings().items()]
    program = f"-DCMAKE_MAKE_PROGRAM={toolchain.ninja()}"
    return [
        toolchain.cmake(),
        "-S",
        str(work / "llama.cpp"),
        "-B",
        str(work / "build"),
        "-G",
        "Ninja",
        program,
        *settings,
    ]


def _patch_states(wanted: Request, store: ObjectStore | None) -> dict[str, str]:
    if wanted.series is None:
        return {}
    if store is None:
        return {patch.name: "not checked: the source is not in the cache" for patch in wanted.series.patches}
    return plan(wanted.series, StoreTree(store, wanted.base.tree)).state


def _check(folder: Path, targets: Iterable[str], wanted: Request, progress: Progress) -> None:
    """The programs are there, run from this folder and say that they are this build."""
    missing = [name for name in targets if name.startswith("llama-") and not (folder / name).is_file()]
    if missing:
        raise DflashError(f"the build made no {', '.join(missing)}")
    if "llama-server" not in targets:
        return
    done = subprocess.run(
        [str(folder / "llama-server"), "--version"], capture_output=True, text=True, check=False
    )
    words = done.stdout + done.stderr
    if done.returncode and wanted.backend != "cpu" and "shared librar" in words:
        progress.say(f"llama-server does not start on this machine: {words.strip()}")
    elif wanted.version_string not in words:
        last = words.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
        raise DflashError(f"llama-server --version does not show {wanted.version_string}: {last[0]}")
