"""Git, without the user's configuration, and the bare repository that holds one base's objects.

Only objects are ever taken from outside: no config file, hook or attribute of a foreign repository
is obeyed. Git's own hashes prove them.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from dflashcpp.errors import DflashError

_OFF = (
    "-c",
    "core.fsmonitor=false",
    "-c",
    "core.hooksPath=/dev/null",
    "-c",
    "core.autocrlf=false",
    "-c",
    "gc.auto=0",
)


def environment(**extra: str) -> dict[str, str]:
    """The environment for git: no user or system config, no repository of the caller's, C locale."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
    return kept | {
        "GIT_CONFIG_GLOBAL": os.devnull,
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_TERMINAL_PROMPT": "0",
        "LC_ALL": "C",
        **extra,
    }


def run(arguments: Sequence[str], *, stdin: bytes | None = None, **extra: str) -> bytes:
    """Git's stdout. Raises DflashError with git's own words when it fails, or when there is no git."""
    program = shutil.which("git")
    if program is None:
        raise DflashError("git is not installed", hint="sudo apt-get install git")
    done = subprocess.run(
        [program, *_OFF, *arguments], input=stdin, capture_output=True, env=environment(**extra), check=False
    )
    if done.returncode != 0:
        words = done.stderr.decode(errors="replace").strip().splitlines()
        raise DflashError(f"git {_verb(arguments)}: {words[-1] if words else f'exit code {done.returncode}'}")
    return done.stdout


def _verb(arguments: Sequence[str]) -> str:
    return next((word for word in arguments if not word.startswith("-") and "=" not in word), "")


@dataclass(frozen=True)
class ObjectStore:
    """A bare repository of ours that holds the objects of one base."""

    folder: Path

    @classmethod
    def create(cls, folder: Path) -> ObjectStore:
        """A new empty store in `folder`."""
        run(["init", "--quiet", "--bare", "--template=", str(folder)])
        return cls(folder)

    def git(self, *arguments: str, stdin: bytes | None = None, **extra: str) -> bytes:
        """Run git on this store."""
        return run([f"--git-dir={self.folder}", *arguments], stdin=stdin, **extra)

    def prove(self, commit: str, tree: str) -> None:
        """Rehash every object and follow the tree to the last file; DflashError when anything is amiss.

        `commit` may be absent from a store made from a tree without history: the tree's hash proves
        the files just as well.
        """
        self.git("fsck", "--full", "--no-dangling", "--no-reflogs", "--no-progress", tree)
        if self.has(commit):
            found = self.git("rev-parse", f"{commit}^{{tree}}").decode().strip()
            if found != tree:
                raise DflashError(f"commit {commit[:12]} has the tree {found[:12]}, not {tree[:12]}")

    def has(self, name: str) -> bool:
        """Whether the object is there."""
        try:
            self.git("cat-file", "-e", name)
        except DflashError:
            return False
        return True

    def files(self, tree: str) -> dict[str, str]:
        """Path to mode (`100644`, `100755`, `120000`) of every file in `tree`."""
        listing = self.git("ls-tree", "-r", "-z", tree).decode("utf-8", "surrogateescape")
        rows = (row.split("\t", 1) for row in listing.split("\0") if row)
        return {path: facts.split()[0] for facts, path in rows}

    def read(self, tree: str, paths: Iterable[str]) -> dict[str, bytes]:
        """The contents of those of `paths` that are files of `tree`."""
        wanted = [path for path in paths if "\n" not in path]
        asked = "".join(f"{tree}:{path}\n" for path in wanted).encode("utf-8", "surrogateescape")
        answer = self.git("cat-file", "--batch", stdin=asked)
        found: dict[str, bytes] = {}
        at = 0
        for path in wanted:
            end = answer.index(b"\n", at)
            facts = answer[at:end].rsplit(b" ", 2)
            at = end + 1
            if facts[-1] == b"missing":
                continue
            size = int(facts[2])
            if facts[1] == b"blob":
                found[path] = answer[at : at + size]
            at += size + 1
        return found
