"""A stand-in for llama.cpp: a small git repository with the same targets, that compiles in seconds.

Its `llama-server --version` says what the real one says, so builds of it can be checked. Around it:
the sdist that carries it, and a `patches/` folder with its base.
"""

from __future__ import annotations

import hashlib
import io
import os
import subprocess
import tarfile
from dataclasses import dataclass
from pathlib import Path

FILES = {
    "CMakeLists.txt": """\
cmake_minimum_required(VERSION 3.18)
project(llama CXX)
set(CMAKE_RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/bin)
set(CMAKE_LIBRARY_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/bin)
add_compile_definitions(BUILD_NUMBER="${LLAMA_BUILD_NUMBER}" BUILD_COMMIT="${LLAMA_BUILD_COMMIT}")
add_subdirectory(ggml)
foreach(name llama-server llama-quantize llama-bench llama-fit-params)
    add_executable(${name} main.cpp common/arg.cpp)
    target_link_libraries(${name} ggml-base)
endforeach()
file(GLOB ours dflashcpp/*.cpp)
if(ours)
    target_sources(llama-server PRIVATE ${ours})
endif()
""",
    "ggml/CMakeLists.txt": """\
add_library(ggml-base SHARED ggml.cpp)
""",
    "ggml/ggml.cpp": """\
int ggml_answer() { return 42; }
""",
    "common/arg.cpp": """\
// spec types
const char * spec_types[] = {
    "none",
    "draft-simple",
    "draft-eagle3",
};

int count_spec_types() {
    return sizeof(spec_types) / sizeof(spec_types[0]);
}
""",
    "main.cpp": """\
#include <cstdio>

int ggml_answer();
int count_spec_types();

int main() {
    fprintf(stderr, "version: 0 (build %s, commit %s)\\n", BUILD_NUMBER, BUILD_COMMIT);
    printf("%d spec types\\n", count_spec_types());
    return ggml_answer() - 42;
}
""",
    "build-xcframework.sh": "#!/bin/sh\necho packs\n",
    ".gitignore": "/build*\n",
    "notes/no newline.txt": "the last line has no end",
}

HEADER = """\
Description: the spec type of DFlash
 One more name in the table.
Author: A Tester
Forwarded: not-needed
Last-Update: 2026-11-29
Drop-When: the base knows draft-dflash
"""

SPEC_TYPE_PATCH = (
    HEADER
    + """
--- a/common/arg.cpp
+++ b/common/arg.cpp
@@ -3,5 +3,6 @@
     "none",
     "draft-simple",
     "draft-eagle3",
+    "draft-dflash",
 };

"""
)

SERIES = {"0001-spec-type.patch": SPEC_TYPE_PATCH}


def git(folder: Path, *arguments: str) -> str:
    """Git in `folder`, with an identity and without the user's settings."""
    environment = {key: text for key, text in os.environ.items() if not key.startswith("GIT_")}
    environment |= {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}
    for who in ("AUTHOR", "COMMITTER"):
        environment |= {f"GIT_{who}_NAME": "t", f"GIT_{who}_EMAIL": "t@example.org"}
        environment[f"GIT_{who}_DATE"] = "2026-10-01T00:00:00Z"
    done = subprocess.run(
        ["git", *arguments], cwd=folder, env=environment, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def write_files(folder: Path, files: dict[str, str]) -> None:
    """Write a small tree."""
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


@dataclass(frozen=True)
class StandIn:
    """The repository, its hashes, the sdist that carries it, and the knowledge folder that names it."""

    repository: Path
    commit: str
    tree: str
    sdists: Path
    knowledge: Path

    @property
    def patches(self) -> Path:
        """The `patches/` folder."""
        return self.knowledge / "patches"

    def write_series(self, patches: dict[str, str], sources: dict[str, str] | None = None) -> None:
        """Make `patches` the series of the base, and `sources` the files of patches/src."""
        write_files(self.patches / "abc1234", patches)
        (self.patches / "abc1234" / "series").write_text(
            "# ours\n" + "".join(f"{name}\n" for name in patches)
        )
        write_files(self.patches / "src", sources or {})
        rows = "".join(f"| {name.removesuffix('.patch')} |\n" for name in patches)
        (self.patches / "README.md").write_text(rows, encoding="utf-8")


def make(folder: Path, *, settings: str) -> StandIn:
    """Make everything below `folder`. `settings` is the [cmake] and [backends] part of bases.toml."""
    repository = folder / "upstream"
    write_files(repository, FILES)
    (repository / "build-xcframework.sh").chmod(0o755)
    git(repository, "init", "--quiet", "--initial-branch=master")
    git(repository, "add", "--all", "--force")
    git(repository, "commit", "--quiet", "-m", "a llama.cpp")
    commit, tree = git(repository, "rev-parse", "HEAD"), git(repository, "rev-parse", "HEAD^{tree}")
    sdist = _write_sdist(folder / "sdists", repository, commit)
    made = StandIn(repository, commit, tree, sdist.parent, folder / "knowledge")
    made.patches.mkdir(parents=True)
    (made.patches / "bases.toml").write_text(_bases(made, sdist, settings), encoding="utf-8")
    return made


def _bases(made: StandIn, sdist: Path, settings: str) -> str:
    digest = hashlib.sha256(sdist.read_bytes()).hexdigest()
    return f'''\
default = "abc1234"
repository = "{made.repository.as_uri()}"

{settings}
[bases.abc1234]
commit = "{made.commit}"
tree = "{made.tree}"
date = "2026-10-01"
sdist = "llama-cpp-python==99.1"
sdist_sha256 = "{digest}"
sdist_bytes = {sdist.stat().st_size}
knows = []
'''


def _write_sdist(folder: Path, repository: Path, commit: str) -> Path:
    """As llama-cpp-python's sdists are: the submodule's git folder under .git/modules, depth 1."""
    folder.mkdir()
    git(repository, "repack", "-a", "-d", "-q")
    top = "llama_cpp_python-99.1"
    path = folder / f"{top}.tar.gz"
    module = f"{top}/.git/modules/vendor/llama.cpp"
    pyproject = (
        '[build-system]\nrequires = ["no-such-backend-anywhere"]\nbuild-backend = "scikit_build_core.build"\n'
    )
    with tarfile.open(path, "w:gz") as tar:
        _add(tar, f"{top}/PKG-INFO", b"Metadata-Version: 2.1\nName: llama-cpp-python\nVersion: 99.1\n")
        _add(tar, f"{top}/pyproject.toml", pyproject.encode())
        _add(tar, f"{module}/shallow", f"{commit}\n".encode())
        _add(tar, f"{module}/config", b"[core]\n\tfsmonitor = touch /tmp/obeyed\n")
        for file in sorted((repository / ".git" / "objects").rglob("*")):
            if file.is_file():
                _add(
                    tar,
                    f"{module}/objects/{file.relative_to(repository / '.git' / 'objects')}",
                    file.read_bytes(),
                )
    return path


def _add(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(data)
    tar.addfile(member, io.BytesIO(data))
