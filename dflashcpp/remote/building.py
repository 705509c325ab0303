"""Our patched llama.cpp on a far side that has no dflashcpp: the source goes over, plain cmake builds it."""

from __future__ import annotations

import hashlib
import json
import tarfile
import tempfile
from pathlib import Path, PurePosixPath

from dflashcpp.errors import DflashError
from dflashcpp.llamacpp.recipe import Request, request, settings
from dflashcpp.progress import SILENT, Progress
from dflashcpp.remote import files
from dflashcpp.remote.host import Facts, Host

_BYTES_PER_JOB = 2 << 30
_FOLDER = ".cache/dflashcpp/remote-builds"
# What the compiler never reads.
_LEFT_OUT = ("media", "docs", "models", ".github", ".devops", "ci")


def ensure(
    host: Host, facts: Facts, *, may_build: bool = True, progress: Progress = SILENT
) -> tuple[str, str]:
    """The path over there of llama-server built from our patched default base, and the base's tag.

    What was built there before is used again. Raises DflashError when a tool is missing there, when the
    build fails, or when it would have to be built and `may_build` is false.
    """
    from dflashcpp.remote.engine import backend_of

    wanted = request(None, backend_of(facts), patched=True)
    options = {**settings(wanted.backend), **_told(wanted), **_compiler(facts, wanted.backend)}
    final = str(PurePosixPath(facts.home, _FOLDER, f"{wanted.name}-{_digest(wanted, options)}"))
    binary = f"{final}/bin/llama-server"
    if files.look(host, binary) is None:
        if not may_build:
            raise DflashError(f"{host.name} has no llama-server yet", hint="it would be built there")
        _check_tools(host, facts, wanted.backend)
        _build(host, facts, wanted, final, options, progress)
    return binary, wanted.base.tag


def _told(wanted: Request) -> dict[str, str]:
    return {"LLAMA_BUILD_NUMBER": "0", "LLAMA_BUILD_COMMIT": wanted.version_string}


def _compiler(facts: Facts, backend: str) -> dict[str, str]:
    return {"CMAKE_CUDA_COMPILER": facts.tools["nvcc"]} if backend == "cuda" and "nvcc" in facts.tools else {}


def _digest(wanted: Request, options: dict[str, str]) -> str:
    parts = {"tree": wanted.base.tree, "options": options}
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:12]


def _check_tools(host: Host, facts: Facts, backend: str) -> None:
    needed = {"cmake": "cmake", "c++": "g++"} | ({"nvcc": "the CUDA toolkit"} if backend == "cuda" else {})
    missing = [package for tool, package in needed.items() if tool not in facts.tools]
    if not {"ninja", "make"} & set(facts.tools):
        missing.append("ninja or make")
    if missing:
        raise DflashError(
            f"{host.name} cannot build llama.cpp: {', '.join(missing)} missing",
            hint="install it there, or name a llama-server that is there with --remote-server PATH",
        )


def _build(
    host: Host, facts: Facts, wanted: Request, final: str, options: dict[str, str], progress: Progress
) -> None:
    archive = f"{final}.tar.gz"
    with tempfile.TemporaryDirectory(prefix="dflashcpp-source-") as scratch:
        packed = _pack(wanted, Path(scratch), progress)
        files.push(host, packed, archive, progress)
    words = [f"-D{key}={value}" for key, value in options.items()]
    with progress.task(f"compiling llama.cpp {wanted.version_string} on {host.name}") as task:
        outcome = host.run(
            "build",
            final,
            archive,
            str(_jobs(facts)),
            *words,
            timeout=None,
            errors=lambda line: task.note(line.strip()[:100]),
        )
    if outcome.status != 0:
        raise DflashError(
            f"{host.name}: {outcome.last_words or 'the build failed'}", hint=_first_error(outcome.err)
        )


def _first_error(text: str) -> str | None:
    found = [line.strip() for line in text.splitlines() if "error" in line.lower() or "No space" in line]
    return found[0][:200] if found else None


def _jobs(facts: Facts) -> int:
    by_memory = facts.memory // _BYTES_PER_JOB if facts.memory else 1
    return max(1, min(facts.cores or 1, by_memory))


def _pack(wanted: Request, scratch: Path, progress: Progress) -> Path:
    """The patched source tree as a gzipped tar that is the same for the same source."""
    from dflashcpp.llamacpp.patches import plan
    from dflashcpp.llamacpp.source import obtain
    from dflashcpp.llamacpp.tree import StoreTree, sync

    store = obtain(wanted.base, progress=progress)
    changes = plan(wanted.series, StoreTree(store, wanted.base.tree)).files if wanted.series else {}
    with progress.task("packing the patched source"):
        sync(store, wanted.base.tree, scratch / "llama.cpp", changes)
        packed = scratch / f"{wanted.name}.tar.gz"
        with tarfile.open(packed, "w:gz", compresslevel=6) as archive:
            for path in sorted((scratch / "llama.cpp").iterdir()):
                if path.name not in _LEFT_OUT:
                    archive.add(path, path.name, filter=_plain)
    return packed


def _plain(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = ""
    entry.mtime = 0
    return entry
