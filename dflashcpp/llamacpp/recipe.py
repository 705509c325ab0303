"""What a build is made of, and the digest that keeps one build from being taken for another."""

from __future__ import annotations

import hashlib
import json
import sys
from dataclasses import dataclass
from typing import Any

from dflashcpp import knowledge
from dflashcpp.errors import UsageError
from dflashcpp.llamacpp import gpu_tools, toolchain
from dflashcpp.llamacpp.bases import Base, find_base
from dflashcpp.llamacpp.patches import Series, load_series
from dflashcpp.llamacpp.toolchain import Tool
from dflashcpp.progress import SILENT, Progress

DEFAULT_TARGETS = ("llama-server", "llama-quantize", "llama-bench", "llama-fit-params")
BACKENDS = ("cpu", "cuda", "vulkan", "metal")
_LAYOUT = 1  # goes up when builds made by an older version of this code must not be used


@dataclass(frozen=True)
class Request:
    """Which build is wanted; cheap to make, no program is run for it."""

    base: Base
    backend: str
    series: Series | None
    part: str = ""  # a build of only a part of llama.cpp has folders of its own and waits for no other

    @property
    def version_string(self) -> str:
        """What `llama-server --version` and `/props` show as the commit: the base, and the patches on it."""
        return f"{self.base.tag}-p{self.series.digest}" if self.series else self.base.tag

    @property
    def name(self) -> str:
        """Names the folders of this kind of build."""
        kind = f"{self.base.tag}-{self.backend}" + ("" if self.series else "-pristine")
        return f"{kind}-{self.part}" if self.part else kind

    def inputs(self) -> dict[str, Any]:
        """All that decides what the binaries are, the tools aside."""
        return {
            "layout": _LAYOUT,
            "tree": self.base.tree,
            "version_string": self.version_string,
            "settings": settings(self.backend),
            "cpu": toolchain.cpu_identity(),
            "environment": toolchain.build_variables(),
            "gpus": gpu_tools.gpu_marks() if self.backend == "cuda" else [],
        }


@dataclass(frozen=True)
class Recipe:
    """A request with the tools of this machine: enough to configure and to name the build."""

    request: Request
    c: Tool
    cxx: Tool
    gpu: gpu_tools.GpuToolchain

    @property
    def tools(self) -> tuple[Tool, ...]:
        """Every program whose replacement makes the build stale."""
        return (self.c, self.cxx, *self.gpu.tools)

    @property
    def digest(self) -> str:
        """Twelve digits over commit, patches, settings, tools and machine."""
        programs = [[tool.path, tool.version] for tool in self.tools]
        facts = {**self.request.inputs(), "gpu_settings": self.gpu.settings, "tools": programs}
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:12]

    def cmake_settings(self) -> dict[str, str]:
        """Every -D that cmake gets."""
        return {
            **settings(self.request.backend),
            **self.gpu.settings,
            "CMAKE_C_COMPILER": self.c.path,
            "CMAKE_CXX_COMPILER": self.cxx.path,
            "LLAMA_BUILD_NUMBER": "0",
            "LLAMA_BUILD_COMMIT": self.request.version_string,
        }


def settings(backend: str) -> dict[str, str]:
    """The cmake settings of a backend (`patches/bases.toml`); programs look for libraries beside them."""
    table = knowledge.table("patches/bases.toml")
    origin = "@loader_path" if sys.platform == "darwin" else "$ORIGIN"
    return {**table["cmake"], **table["backends"][backend], "CMAKE_BUILD_RPATH": origin}


def request(base: str | None, backend: str, *, patched: bool) -> Request:
    """The build of `base` for `backend`. Raises UsageError for an unknown backend."""
    if backend not in BACKENDS:
        raise UsageError(f"there is no backend {backend!r}", hint=f"the backends are {', '.join(BACKENDS)}")
    found = find_base(base)
    return Request(found, backend, load_series(found) if patched else None)


def complete(wanted: Request, progress: Progress = SILENT) -> Recipe:
    """Find and check the tools for `wanted`. Raises DflashError that says what to install."""
    c, cxx = toolchain.compilers()
    return Recipe(wanted, c, cxx, gpu_tools.probe(wanted.backend, progress))
