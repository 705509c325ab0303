"""The patch series of a base: read, checked as a whole in memory, and only then written.

A patch opens with DEP-3 fields (dep-team.debian.net/deps/dep3), then holds a unified diff.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from dflashcpp import knowledge
from dflashcpp.errors import DflashError
from dflashcpp.llamacpp import unified_diff
from dflashcpp.llamacpp.bases import Base
from dflashcpp.llamacpp.unified_diff import File, FileDiff, PatchError

FIELDS = ("Description", "Author", "Forwarded", "Last-Update", "Drop-When")
SOURCE_FOLDER = "dflashcpp"  # where the files of patches/src go in the tree
_ALSO = {"Subject": "Description", "From": "Author"}  # DEP-3 takes git's words as well
_HEADER_END = re.compile(rb"^(?:diff --git |--- |Index: |---\s*$)", re.M)
_FIELD = re.compile(r"([A-Za-z][A-Za-z0-9-]*):[ \t]*(.*)")
_SKIP_IF = re.compile(r"(\S+) contains (.+)")
_NOT_SOURCE = {"tests", "__pycache__", "build"}  # a changed test makes no build stale

Files = dict[str, File | None]  # what the files of a tree become; None: the file goes


class Tree(Protocol):
    """Whatever a series can be checked against."""

    def file(self, path: str) -> File | None:
        """The file at `path`, or None."""


@dataclass(frozen=True)
class Patch:
    """One patch: its header fields and what it does to which files."""

    name: str
    header: dict[str, str]
    diffs: tuple[FileDiff, ...]
    text: bytes = field(repr=False)

    @property
    def description(self) -> str:
        """The first line of its description."""
        return self.header.get("Description", "").split("\n")[0]

    @property
    def touched(self) -> tuple[str, ...]:
        """The files it changes, makes or deletes."""
        return tuple(dict.fromkeys(diff.path for diff in self.diffs))


@dataclass(frozen=True)
class Series:
    """The patches of one base, in order, and the whole files (`patches/src`) that go with them."""

    base: str
    patches: tuple[Patch, ...]
    sources: dict[str, bytes] = field(repr=False)

    @property
    def digest(self) -> str:
        """Twelve digits that change whenever a patch or a source file does."""
        state = hashlib.sha256()
        parts = [(patch.name, patch.text) for patch in self.patches] + sorted(self.sources.items())
        for name, data in parts:
            state.update(f"{name}\0{len(data)}\0".encode())
            state.update(data)
        return state.hexdigest()[:12]


@dataclass(frozen=True)
class Plan:
    """What a series makes of a tree: every changed file, and how each patch fared."""

    files: Files = field(repr=False)
    state: dict[str, str]  # patch name -> "applies", "already applied" or "not needed: ..."


def read_patch(path: Path) -> Patch:
    """Read one patch file. Raises PatchError when its diff cannot be read."""
    text = path.read_bytes()
    return Patch(path.name, _header(text), unified_diff.parse(text, path.name), text)


def header_problems(patch: Patch) -> list[str]:
    """What the header of a patch lacks."""
    problems = [f"{patch.name}: the field {name} is missing" for name in FIELDS if not patch.header.get(name)]
    date = patch.header.get("Last-Update", "")
    if date and not re.fullmatch(r"\d{4}-\d{2}-\d{2}", date):
        problems.append(f"{patch.name}: Last-Update is {date!r}, expected a date such as 2026-11-29")
    condition = patch.header.get("Skip-If", "")
    if condition and not _SKIP_IF.fullmatch(condition):
        problems.append(f"{patch.name}: Skip-If is {condition!r}, expected 'PATH contains TEXT'")
    if not patch.diffs:
        problems.append(f"{patch.name}: there is no diff in it")
    return problems


def series_names(folder: Path) -> list[str]:
    """The names in a quilt `series` file: one a line, `#` starts a comment; options are refused."""
    path = folder / "series"
    if not path.is_file():
        raise PatchError(f"{path} is missing", hint="a base's patches are listed there, one name a line")
    names = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        words = re.sub(r"(^|\s)#.*", "", line).split()
        if len(words) > 1:
            raise PatchError(f"{path}, line {number}: one patch name a line, without options")
        names += words
    return names


def has_series(base: Base, root: Path | None = None) -> bool:
    """Whether there is a series for `base`."""
    return ((root or knowledge.folder("patches")) / base.tag / "series").is_file()


def load_series(base: Base, root: Path | None = None) -> Series:
    """The series of `base` out of the patches folder `root` (by default the one that ships).

    Raises PatchError when there is none, a listed patch is missing or a diff cannot be read.
    """
    root = root or knowledge.folder("patches")
    if not has_series(base, root):
        raise PatchError(f"there are no patches for the base {base.tag}", hint="build it with --no-patches")
    names = series_names(root / base.tag)
    missing = [name for name in names if not (root / base.tag / name).is_file()]
    if missing:
        raise PatchError(f"{base.tag}/series lists {', '.join(missing)}, but there is no such file")
    patches = tuple(read_patch(root / base.tag / name) for name in names)
    return Series(base.tag, patches, _sources(root / "src"))


def unlisted(folder: Path) -> list[str]:
    """Patch files in `folder` that its series leaves out."""
    listed = set(series_names(folder))
    return sorted(path.name for path in folder.glob("*.patch") if path.name not in listed)


def plan(series: Series, tree: Tree) -> Plan:
    """Check every patch of `series` against `tree` in memory; nothing is written.

    A tree that holds the first patches already is taken as it is and given the rest. Raises
    PatchError that names the patch, the file, the hunk and the next step.
    """
    try:
        result = _forward(series.patches, tree, {}, {})
    except PatchError as error:
        resumed = _resume(series.patches, tree)
        if resumed is None:
            raise error from None
        result = resumed
    for path, data in series.sources.items():
        present = tree.file(path)
        if present is not None and present.data != data:
            raise PatchError(f"{path}: the tree has a file of this name that is not ours")
        if present is None:
            result.files[path] = File("100644", data)
    return result


def write(changes: Mapping[str, File | None], directory: Path) -> None:
    """Write `changes` below `directory`; when one fails, those before it are undone.

    No git is asked, so it makes no difference whether the tree lies in a repository.
    """
    folder = FolderTree(directory)
    before = {path: folder.file(path) for path in changes}
    done: list[str] = []
    try:
        for path, file in changes.items():
            done.append(path)
            _write_file(directory, path, file)
    except BaseException as error:
        for path in reversed(done):
            _write_file(directory, path, before[path])
        if isinstance(error, OSError):
            raise DflashError(f"{error.filename}: {error.strerror}; the tree is as it was") from error
        raise


def _write_file(directory: Path, path: str, file: File | None) -> None:
    target = directory / path
    if file is None:
        target.unlink(missing_ok=True)
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.partial")
    try:
        temporary.write_bytes(file.data)
        temporary.chmod(0o755 if file.mode == "100755" else 0o644)
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)


class FolderTree:
    """A tree on disk. Paths that leave it through a symbolic link are refused."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory.resolve()

    def file(self, path: str) -> File | None:
        """The file at `path`, or None."""
        target = self._directory / path
        if target.is_symlink() or not target.parent.resolve().is_relative_to(self._directory):
            raise PatchError(f"{path}: a symbolic link, which a patch must not follow")
        if not target.is_file():
            return None
        return File("100755" if os.access(target, os.X_OK) else "100644", target.read_bytes())


class MemoryTree:
    """A tree given as a mapping, for example the touched files out of git's objects."""

    def __init__(self, files: Mapping[str, File]) -> None:
        self._files = files

    def file(self, path: str) -> File | None:
        """The file at `path`, or None."""
        return self._files.get(path)


def _header(text: bytes) -> dict[str, str]:
    end = _HEADER_END.search(text)
    lines = text[: end.start() if end else len(text)].decode("utf-8", "replace").splitlines()
    fields: dict[str, str] = {}
    name = None
    for line in lines:
        match = _FIELD.match(line)
        if match:
            name = _ALSO.get(match[1].title(), match[1].title())
            fields.setdefault(name, match[2].strip())
        elif name and line.startswith((" ", "\t")):
            fields[name] += "\n" + line.strip()
    return fields


def _sources(folder: Path) -> dict[str, bytes]:
    """The files of `patches/src` by their place in the tree."""
    found = {}
    for path in sorted(folder.rglob("*")) if folder.is_dir() else []:
        parts = path.relative_to(folder).parts
        if path.is_file() and not any(part.startswith(".") or part in _NOT_SOURCE for part in parts):
            found["/".join((SOURCE_FOLDER, *parts))] = path.read_bytes()
    return found


def _forward(patches: Sequence[Patch], tree: Tree, files: Files, state: dict[str, str]) -> Plan:
    for patch in patches:
        reason = _not_needed(patch, tree)
        if reason:
            state[patch.name] = f"not needed: {reason}"
            continue
        changed = dict(files)
        try:
            for diff in patch.diffs:
                changed[diff.path] = unified_diff.apply(diff, _now(diff.path, tree, changed))
        except PatchError as error:
            if _undo([patch], tree, files, anywhere=True) is None:
                raise _advice(patch, error) from error
            state[patch.name] = "already applied"
            continue
        files = changed
        state[patch.name] = "applies"
    return Plan(files, state)


def _resume(patches: Sequence[Patch], tree: Tree) -> Plan | None:
    """Take the longest run of first patches that the tree holds already, and apply the rest."""
    for count in range(len(patches), 0, -1):
        if _undo(patches[:count], tree, {}) is None:
            continue
        try:
            return _forward(patches[count:], tree, {}, {p.name: "already applied" for p in patches[:count]})
        except PatchError:
            continue
    return None


def _undo(patches: Sequence[Patch], tree: Tree, files: Files, *, anywhere: bool = False) -> Files | None:
    """What undoing `patches` makes of the tree, or None when they are not in it."""
    files = dict(files)
    try:
        for patch in reversed(patches):
            for diff in reversed(patch.diffs):
                back = unified_diff.reversed_diff(diff)
                files[diff.path] = unified_diff.apply(back, _now(diff.path, tree, files), anywhere=anywhere)
    except PatchError:
        return None
    return files


def _now(path: str, tree: Tree, files: Files) -> File | None:
    return files[path] if path in files else tree.file(path)


def _not_needed(patch: Patch, tree: Tree) -> str | None:
    match = _SKIP_IF.fullmatch(patch.header.get("Skip-If", ""))
    if not match:
        return None
    file = tree.file(match[1])
    return f"{match[1]} has {match[2]!r}" if file and match[2].encode() in file.data else None


def _advice(patch: Patch, error: PatchError) -> PatchError:
    hint = "nothing was changed; refresh the patch against this tree, or build with --no-patches"
    return PatchError(f"{patch.name} does not apply: {error.message}", hint=hint)
