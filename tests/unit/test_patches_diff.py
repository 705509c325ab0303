"""The strict unified-diff applier, against git's own diffs, random edits and diffs that must be refused."""

from __future__ import annotations

import difflib
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflashcpp.llamacpp.unified_diff import File, PatchError, apply, parse, reversed_diff
from tests.support.stand_in import git

LINES = st.lists(
    st.sampled_from([b"a\n", b"b\n", b"c\n", b"\n", b" x\n", b"-- \n", b"+++ y\n", b"\r\n"]), max_size=30
)
TAIL = st.sampled_from([b"", b"", b"no end", b"-"])


def as_diff(old: bytes, new: bytes, context: int) -> bytes:
    """`diff -u`, by difflib, with the mark for a missing last newline."""
    sides = [text.splitlines(keepends=True) if b"\r" not in text else _split(text) for text in (old, new)]
    out = []
    for line in difflib.diff_bytes(difflib.unified_diff, *sides, b"a/f", b"b/f", n=context, lineterm=b"\n"):
        out.append(line if line.endswith(b"\n") else line + b"\n\\ No newline at end of file\n")
    return b"".join(out)


def _split(text: bytes) -> list[bytes]:
    parts = text.split(b"\n")
    return [part + b"\n" for part in parts[:-1]] + ([parts[-1]] if parts[-1] else [])


@given(LINES, LINES, TAIL, TAIL, st.integers(0, 4))
@settings(max_examples=400, deadline=None)
def test_a_diff_of_two_texts_turns_one_into_the_other_and_back(
    old_lines, new_lines, old_tail, new_tail, context
) -> None:
    old, new = b"".join(old_lines) + old_tail, b"".join(new_lines) + new_tail
    diffs = parse(as_diff(old, new, context), "p")
    if old == new:
        assert diffs == ()
        return
    assert apply(diffs[0], File("100644", old)) == File("100644", new)
    assert apply(reversed_diff(diffs[0]), File("100644", new)) == File("100644", old)


@given(LINES, LINES, st.data())
@settings(max_examples=300, deadline=None)
def test_a_change_of_any_line_the_diff_shows_is_refused(old_lines, new_lines, data) -> None:
    old, new = b"".join(old_lines), b"".join(new_lines)
    diffs = parse(as_diff(old, new, 3), "p")
    shown = [hunk.old_start - 1 + i for diff in diffs for hunk in diff.hunks for i in range(len(hunk.old))]
    if not shown:
        return
    lines = _split(old)
    lines[data.draw(st.sampled_from(shown))] = b"something else\n"
    with pytest.raises(PatchError, match="hunk"):
        apply(diffs[0], File("100644", b"".join(lines)))


def git_diff(folder: Path, *states: bytes | None) -> bytes:
    """What `git diff` says about two states of the file d/f."""
    git(folder, "init", "-q")
    path = folder / "d" / "f"
    path.parent.mkdir()
    for data in states:
        path.unlink(missing_ok=True)
        if data is not None:
            path.write_bytes(data)
        git(folder, "add", "-A")
        git(folder, "commit", "-q", "--allow-empty", "-m", "x")
    command = ["git", "diff", "--no-renames", "HEAD~", "HEAD"]
    return subprocess.run(command, cwd=folder, capture_output=True, check=True).stdout


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (None, b"one\ntwo\n"),
        (b"one\ntwo\n", None),
        (None, b""),
        (b"", None),
        (b"", b"x"),
        (b"a\nb\n", b"a\nb"),
        (b"a\nb", b"a\nb\n"),
        (b"a\r\nb\r\n", b"a\r\nc\r\n"),
        (b"".join(b"%d\n" % i for i in range(100)), b"".join(b"%d\n" % i for i in range(100) if i % 30)),
    ],
)
def test_gits_own_diffs_are_taken(tmp_path: Path, before: bytes | None, after: bytes | None) -> None:
    (diff,) = parse(git_diff(tmp_path, before, after), "p")
    old = None if before is None else File("100644", before)
    new = None if after is None else File("100644", after)
    assert diff.path == "d/f"
    assert apply(diff, old) == new
    assert apply(reversed_diff(diff), new) == old


def test_a_change_of_mode_alone_is_taken() -> None:
    (diff,) = parse(b"diff --git a/run.sh b/run.sh\nold mode 100644\nnew mode 100755\n", "p")
    assert apply(diff, File("100644", b"x")) == File("100755", b"x")


def test_the_mode_of_a_file_stays_where_the_diff_says_nothing() -> None:
    (diff,) = parse(b"--- a/f\n+++ b/f\n@@ -1 +1 @@\n-x\n+y\n", "p")
    assert apply(diff, File("100755", b"x\n")) == File("100755", b"y\n")


def test_a_signature_after_the_last_hunk_is_no_part_of_it() -> None:
    (diff,) = parse(b"--- a/f\n+++ b/f\n@@ -1 +1 @@\n-x\n+y\n-- \n2.39.5\n", "p")
    assert apply(diff, File("100644", b"x\n")) == File("100644", b"y\n")


HEAD = b"--- a/f\n+++ b/f\n"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (HEAD + b"@@ -1,2 +1,2 @@\n-x\n+y\n", "ends inside a hunk"),
        (HEAD + b"@@ -1 +1 @@\n-x\n+y\n+z\n", "other line counts"),
        (HEAD + b"@@ -1,2 +1,1 @@\n x\n y\n", "other line counts"),
        (HEAD + b"@@ -1 +1 @@\n-x\n*y\n", "neither context"),
        (HEAD + b"@@ -1 +7 @@\n-x\n+y\n", "positions"),
        (HEAD + b"@@ -9 +9 @@\n-x\n+y\n@@ -1 +1 @@\n-x\n+y\n", "positions"),
        (HEAD + b"@@ nonsense @@\n", "without hunks"),
        (b"@@ -1 +1 @@\n-x\n+y\n", "without a file header"),
        (b"--- a/../../etc/passwd\n+++ b/../../etc/passwd\n@@ -1 +1 @@\n-x\n+y\n", "no path inside"),
        (b"--- a/.git/config\n+++ b/.git/config\n@@ -1 +1 @@\n-x\n+y\n", "no path inside"),
        (b"--- /etc/passwd\n+++ /etc//passwd\n@@ -1 +1 @@\n-x\n+y\n", "no path inside"),
        (b"--- a/f\n+++ b/g\n@@ -1 +1 @@\n-x\n+y\n", "renames"),
        (b"--- /dev/null\n+++ /dev/null\n@@ -1 +1 @@\n-x\n+y\n", "neither side"),
        (b"diff --git a/f b/g\nsimilarity index 100%\nrename from f\nrename to g\n", "renames"),
        (b"diff --git a/f b/f\nindex 1..2\nGIT binary patch\nliteral 0\n", "binary"),
        (b"diff --git a/f b/f\nindex 1..2\nBinary files a/f and b/f differ\n", "binary"),
        (
            b"diff --git a/f b/f\nnew file mode 120000\n--- /dev/null\n+++ b/f\n@@ -0,0 +1 @@\n+/etc\n",
            "mode 120000",
        ),
        (b'diff --git "a/\\303" "b/\\303"\n--- "a/\\303"\n+++ "b/\\303"\n@@ -1 +1 @@\n-x\n+y\n', "quoted"),
    ],
)
def test_a_diff_that_cannot_be_trusted_is_refused_with_patch_and_line(text: bytes, words: str) -> None:
    with pytest.raises(PatchError, match=words) as caught:
        parse(text, "0001-x.patch")
    assert caught.value.message.startswith("0001-x.patch, line ")


def test_a_hunk_that_moved_is_refused_and_its_new_place_told() -> None:
    (diff,) = parse(HEAD + b"@@ -1,2 +1,2 @@\n a\n-x\n+y\n", "p")
    with pytest.raises(PatchError, match=r"f: hunk 1 \(line 1\) fits at line 3, not at line 1"):
        apply(diff, File("100644", b"new\nnew\na\nx\n"))


def test_the_first_line_that_differs_is_told() -> None:
    (diff,) = parse(HEAD + b"@@ -1,2 +1,2 @@\n a\n-x\n+y\n", "p")
    with pytest.raises(PatchError, match=r"line 2 is 'z', expected 'x'"):
        apply(diff, File("100644", b"a\nz\n"))
    with pytest.raises(PatchError, match=r"line 2 is the end of the file, expected 'x'"):
        apply(diff, File("100644", b"a\n"))
    with pytest.raises(PatchError, match=r"line 2 is 'x' without a newline"):
        apply(diff, File("100644", b"a\nx"))


def test_a_new_file_that_is_there_and_an_old_one_that_is_not_are_refused() -> None:
    (made,) = parse(b"--- /dev/null\n+++ b/f\n@@ -0,0 +1 @@\n+x\n", "p")
    (changed,) = parse(HEAD + b"@@ -1 +1 @@\n-x\n+y\n", "p")
    (gone,) = parse(b"--- a/f\n+++ /dev/null\n@@ -1 +0,0 @@\n-x\n", "p")
    with pytest.raises(PatchError, match="there already"):
        apply(made, File("100644", b""))
    with pytest.raises(PatchError, match="not there"):
        apply(changed, None)
    with pytest.raises(PatchError, match="more lines"):
        apply(gone, File("100644", b"x\nmore\n"))
