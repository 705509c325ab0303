"""Unified diffs, read and applied strictly: right line, right context, no fuzz.

Format: GNU diffutils manual, "Detailed Description of Unified Format", and git's extended headers
(git-diff documentation, "Generating patch text with -p"). Renames, copies and binary patches are
refused: they hide what a patch changes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from dflashcpp.errors import DflashError

_HUNK = re.compile(rb"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")
_REFUSED = (b"rename ", b"copy ", b"GIT binary patch", b"Binary files ")
_NO_NEWLINE = b"\\ No newline at end of file"


class PatchError(DflashError):
    """A diff that cannot be read or does not fit."""


@dataclass(frozen=True)
class Hunk:
    """One run of changed lines; `old` and `new` are whole lines with their ends."""

    number: int
    old_start: int
    new_start: int
    old: tuple[bytes, ...]
    new: tuple[bytes, ...]


@dataclass(frozen=True)
class FileDiff:
    """What one patch does to one file. `old` is None for a new file, `new` for a deleted one."""

    old: str | None
    new: str | None
    mode: str | None
    hunks: tuple[Hunk, ...]

    @property
    def path(self) -> str:
        """The file it is about."""
        name = self.new or self.old
        assert name is not None
        return name


@dataclass(frozen=True)
class File:
    """A file's git mode (`100644` or `100755`) and bytes."""

    mode: str
    data: bytes


def parse(text: bytes, name: str) -> tuple[FileDiff, ...]:
    """The file diffs in `text`. Raises PatchError that names the patch `name` and the line."""
    return tuple(_Parser(text, name).files())


def apply(diff: FileDiff, file: File | None, *, anywhere: bool = False) -> File | None:
    """The file after `diff`; None when it is deleted.

    With `anywhere` a hunk may sit at other lines than the diff says. Raises PatchError that names
    the file, the hunk and what was found there.
    """
    if diff.old is None and file is not None:
        raise PatchError(f"{diff.path}: the patch makes this file, but it is there already")
    if diff.old is not None and file is None:
        raise PatchError(f"{diff.path}: the patch changes this file, but it is not there")
    lines = _lines(file.data) if file else []
    for hunk in diff.hunks:
        lines[slice(*_place(diff, hunk, lines, anywhere))] = hunk.new
    data = b"".join(lines)
    if diff.new is None:
        if data:
            raise PatchError(
                f"{diff.path}: the patch deletes this file, but it has more lines than the patch"
            )
        return None
    return File(diff.mode or (file.mode if file else "100644"), data)


def reversed_diff(diff: FileDiff) -> FileDiff:
    """The diff that undoes `diff` (modes aside)."""
    hunks = (
        replace(h, old_start=h.new_start, new_start=h.old_start, old=h.new, new=h.old) for h in diff.hunks
    )
    return FileDiff(diff.new, diff.old, None, tuple(hunks))


def _place(diff: FileDiff, hunk: Hunk, lines: Sequence[bytes], anywhere: bool) -> tuple[int, int]:
    """Where the hunk's old lines are: the hunks before it are applied, so that is at `new_start`."""
    start = hunk.new_start - 1 if hunk.new else hunk.new_start
    end = start + len(hunk.old)
    if tuple(lines[start:end]) == hunk.old and start <= len(lines):
        return start, end
    found = _search(lines, hunk.old)
    if anywhere and len(found) == 1:
        return found[0], found[0] + len(hunk.old)
    where = f"hunk {hunk.number} (line {hunk.old_start})"
    if len(found) == 1:
        raise PatchError(f"{diff.path}: {where} fits at line {found[0] + 1}, not at line {start + 1}")
    line = _first_difference(lines, start, hunk.old)
    raise PatchError(f"{diff.path}: {where} does not fit: {line}")


def _first_difference(lines: Sequence[bytes], start: int, wanted: Sequence[bytes]) -> str:
    for offset, want in enumerate(wanted):
        have = lines[start + offset] if start + offset < len(lines) else None
        if have != want:
            found = "the end of the file" if have is None else _show(have)
            return f"line {start + offset + 1} is {found}, expected {_show(want)}"
    return f"the file has only {len(lines)} lines"


def _show(line: bytes) -> str:
    text = line.decode("utf-8", "replace")
    return repr(text.rstrip("\n")[:100]) + ("" if text.endswith("\n") else " without a newline")


def _search(lines: Sequence[bytes], wanted: tuple[bytes, ...]) -> list[int]:
    if not wanted:
        return []
    last = len(lines) - len(wanted)
    return [
        at
        for at in range(last + 1)
        if lines[at] == wanted[0] and tuple(lines[at : at + len(wanted)]) == wanted
    ]


def _lines(data: bytes) -> list[bytes]:
    lines = data.split(b"\n")
    tail = lines.pop()
    return [line + b"\n" for line in lines] + ([tail] if tail else [])


class _Parser:
    def __init__(self, text: bytes, name: str) -> None:
        self._lines = [line.removesuffix(b"\n") for line in _lines(text)]
        self._at = 0
        self._name = name

    def files(self) -> Iterator[FileDiff]:
        while self._at < len(self._lines):
            line = self._lines[self._at]
            if line.startswith(b"diff --git "):
                yield self._git_file()
            elif line.startswith(b"--- ") and self._peek(1).startswith(b"+++ "):
                yield self._file(None, None)
            elif line.startswith(b"@@ -"):
                raise self._error("a hunk without a file header")
            else:
                self._at += 1

    def _git_file(self) -> FileDiff:
        """Git's extended header, then perhaps the two name lines and hunks."""
        header = self._lines[self._at]
        mode = made = gone = None
        self._at += 1
        while self._at < len(self._lines):
            line = self._lines[self._at]
            if line.startswith(_REFUSED):
                raise self._error(
                    "renames, copies and binary patches are not taken; write them as plain diffs"
                )
            if line.startswith((b"new mode ", b"new file mode ")):
                mode, made = line.split()[-1].decode(), line.startswith(b"new file")
            elif line.startswith(b"deleted file mode "):
                gone = True
            elif not line.startswith((b"old mode ", b"index ", b"similarity ", b"dissimilarity ")):
                break
            self._at += 1
        if mode not in (None, "100644", "100755"):
            raise self._error(f"file mode {mode} is not taken")
        if self._peek(0).startswith(b"--- "):
            return self._file(mode, header)
        path = self._header_path(header)
        return FileDiff(None if made else path, None if gone else path, mode, ())

    def _header_path(self, header: bytes) -> str:
        """`diff --git a/X b/X`, both the same, as renames are refused."""
        rest = header[len(b"diff --git ") :]
        old, new = rest[: len(rest) // 2], rest[len(rest) // 2 + 1 :]
        path, again = self._path(old), self._path(new)
        if path is None or path != again:
            raise self._error("the header names two files")
        return path

    def _file(self, mode: str | None, header: bytes | None) -> FileDiff:
        old = self._path(self._peek(0)[4:])
        self._at += 1
        if not self._peek(0).startswith(b"+++ "):
            raise self._error("a '---' line without its '+++' line")
        new = self._path(self._peek(0)[4:])
        self._at += 1
        if old and new and old != new:
            raise self._error(f"the patch renames {old} to {new}; write it as plain diffs")
        if not old and not new:
            raise self._error("neither side names a file")
        hunks: list[Hunk] = []
        while self._peek(0).startswith(b"@@ -"):
            hunks.append(self._hunk(len(hunks) + 1))
        if not hunks:
            raise self._error("a file without hunks")
        self._check_order(hunks)
        return FileDiff(old, new, mode, tuple(hunks))

    def _check_order(self, hunks: Sequence[Hunk]) -> None:
        """Hunks come in order, and each new position is the old one moved by what went before."""
        moved, end = 0, 0
        for hunk in hunks:
            old = hunk.old_start - bool(hunk.old)
            new = hunk.new_start - bool(hunk.new)
            if old < end or new - old != moved:
                raise self._error(
                    f"hunk {hunk.number} has positions that do not follow from the hunks before it"
                )
            end = old + len(hunk.old)
            moved += len(hunk.new) - len(hunk.old)

    def _hunk(self, number: int) -> Hunk:
        match = _HUNK.match(self._peek(0))
        if match is None:
            raise self._error("a hunk header that cannot be read")
        old_start, old_count, new_start, new_count = (
            1 if part is None else int(part) for part in match.groups()
        )
        self._at += 1
        old: list[bytes] = []
        new: list[bytes] = []
        while len(old) < old_count or len(new) < new_count:
            self._hunk_line(old, new)
        if self._peek(0).startswith(_NO_NEWLINE):
            self._cut_newline(old, new)
        if len(old) != old_count or len(new) != new_count or self._runs_on():
            raise self._error(f"hunk {number} has other line counts than its header says")
        return Hunk(number, old_start, new_start, tuple(old), tuple(new))

    def _hunk_line(self, old: list[bytes], new: list[bytes]) -> None:
        line = self._peek(0)
        if self._at >= len(self._lines):
            raise self._error("the patch ends inside a hunk")
        kind, body = line[:1] or b" ", line[1:] + b"\n"
        if kind == b"\\":
            self._cut_newline(old, new)
            return
        if kind not in b" +-":
            raise self._error("a line inside a hunk that is neither context, '+' nor '-'")
        if kind != b"+":
            old.append(body)
        if kind != b"-":
            new.append(body)
        self._at += 1

    def _cut_newline(self, old: list[bytes], new: list[bytes]) -> None:
        """`\\ No newline at end of file` is about the line before it."""
        kind = self._lines[self._at - 1][:1]
        for side, owns in ((old, kind != b"+"), (new, kind != b"-")):
            if owns and side:
                side[-1] = side[-1].removesuffix(b"\n")
        self._at += 1

    def _runs_on(self) -> bool:
        line = self._peek(0)
        if line.rstrip() == b"--" or (line.startswith(b"--- ") and self._peek(1).startswith(b"+++ ")):
            return False
        return line[:1] in (b"+", b"-", b" ")

    def _path(self, raw: bytes) -> str | None:
        """The path without its first part (`a/`, `b/`), which must stay in the tree; None for /dev/null."""
        raw = raw.split(b"\t", 1)[0].rstrip()
        if raw == b"/dev/null":
            return None
        if raw.startswith(b'"'):
            raise self._error("quoted file names are not taken")
        parts = raw.decode("utf-8", "surrogateescape").split("/")[1:]
        if not parts or any(part in ("", ".", "..", ".git") for part in parts):
            raise self._error(f"{raw.decode(errors='replace')!r} is no path inside the tree")
        return "/".join(parts)

    def _peek(self, ahead: int) -> bytes:
        at = self._at + ahead
        return self._lines[at] if at < len(self._lines) else b""

    def _error(self, what: str) -> PatchError:
        return PatchError(f"{self._name}, line {self._at + 1}: {what}")
