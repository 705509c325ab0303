"""Finished builds in the cache: one folder each, whole or not there at all."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dflashcpp import paths
from dflashcpp.errors import DflashError
from dflashcpp.llamacpp import toolchain
from dflashcpp.llamacpp.bases import find_base
from dflashcpp.llamacpp.patches import has_series
from dflashcpp.llamacpp.recipe import BACKENDS, DEFAULT_TARGETS, Request, request
from dflashcpp.llamacpp.toolchain import Tool

_MANIFEST = "manifest.json"
_BEST_FIRST = ("cuda", "metal", "vulkan", "cpu")


@dataclass(frozen=True)
class Build:
    """A finished build: its programs and, beside them, their libraries."""

    base: str
    commit: str
    patches: tuple[str, ...]
    digest: str
    backend: str
    root: Path
    version_string: str = ""
    targets: tuple[str, ...] = field(default=DEFAULT_TARGETS)

    def binary(self, name: str) -> Path:
        """The program `name`. Raises DflashError when this build has no such target."""
        path = self.root / "bin" / name
        if not path.is_file():
            raise DflashError(
                f"the build in {self.root} has no {name}", hint=f"dflashcpp build --target {name}"
            )
        return path

    @property
    def knows(self) -> tuple[str, ...]:
        """What it does of DFlash: of `dflash`, `dflash2`, `muse-glimmer` (`patches/bases.toml`)."""
        base = find_base(self.base)
        return (*base.knows, *(base.adds if self.patches else ()))

    @property
    def libggml(self) -> Path:
        """The library with ggml's quantisation (libggml-base)."""
        suffix = "dylib" if sys.platform == "darwin" else "so"
        return self.root / "bin" / f"libggml-base.{suffix}"


def find_build(
    *,
    base: str | None = None,
    backend: str | None = None,
    patched: bool = True,
    targets: Iterable[str] = DEFAULT_TARGETS,
) -> Build | None:
    """The finished build that `build` would give, if it is in the cache and nothing it is made of changed.

    Without `base` the default one; without `backend` the best there is (cuda, metal, vulkan, cpu).
    No program is run unless a compiler was replaced.
    """
    if patched and not has_series(find_base(base)):
        return None
    wanted = request(base, backend or "cpu", patched=patched)
    for name in [backend] if backend else _BEST_FIRST:
        found = find_for(replace(wanted, backend=name), targets)
        if found:
            return found
    return None


def find_for(wanted: Request, targets: Iterable[str]) -> Build | None:
    """The finished build for `wanted` that has all `targets`."""
    manifests = list(_manifests(wanted.name))
    inputs = wanted.inputs() if manifests else {}
    for folder, manifest in manifests:
        if manifest.get("inputs") == inputs and set(targets) <= set(manifest["targets"]) and _fresh(manifest):
            return _as_build(folder, manifest) if _whole(folder, manifest) else None
    return None


def load_build(folder: Path) -> Build | None:
    """The finished build in `folder`; None when it is not whole."""
    manifest = _read(folder)
    return _as_build(folder, manifest) if manifest and _whole(folder, manifest) else None


def write_manifest(folder: Path, facts: dict[str, Any]) -> None:
    """Mark `folder` as finished, with the size of every file in it. Written last."""
    files = {
        str(path.relative_to(folder)): path.stat().st_size for path in sorted((folder / "bin").iterdir())
    }
    (folder / _MANIFEST).write_text(json.dumps({**facts, "files": files}, indent=1), encoding="utf-8")


def builds_folder() -> Path:
    """Where finished builds are kept."""
    return paths.cache_dir("builds")


def install(staged: Path, final: Path) -> None:
    """Put a finished folder under its final name; one that is there already is replaced."""
    if final.exists():
        aside = final.with_name(f"{final.name}.old-{os.getpid()}")
        final.replace(aside)
        staged.replace(final)
        shutil.rmtree(aside, ignore_errors=True)
    else:
        staged.replace(final)


def _manifests(name: str) -> Iterator[tuple[Path, dict[str, Any]]]:
    folders = [entry for entry in builds_folder().glob(f"{name}-*") if entry.name.rpartition("-")[0] == name]
    for folder in folders:
        manifest = _read(folder)
        if manifest is not None:
            yield folder, manifest


def _read(folder: Path) -> dict[str, Any] | None:
    try:
        manifest = json.loads((folder / _MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return manifest if isinstance(manifest, dict) and manifest.get("backend") in BACKENDS else None


def _fresh(manifest: dict[str, Any]) -> bool:
    """Whether the compilers are those that made it, and still what this machine would take."""
    tools = [Tool(**facts) for facts in manifest["tools"]]
    now = toolchain.compiler_paths()
    same = all(path is None or path == tool.path for path, tool in zip(now, tools, strict=False))
    return same and all(tool.unchanged() for tool in tools)


def _whole(folder: Path, manifest: dict[str, Any]) -> bool:
    try:
        return all((folder / name).stat().st_size == size for name, size in manifest["files"].items())
    except OSError:
        return False


def _as_build(folder: Path, manifest: dict[str, Any]) -> Build:
    return Build(
        base=manifest["base"],
        commit=manifest["commit"],
        patches=tuple(manifest["patches"]),
        digest=manifest["digest"],
        backend=manifest["backend"],
        root=folder,
        version_string=manifest["inputs"]["version_string"],
        targets=tuple(manifest["targets"]),
    )
