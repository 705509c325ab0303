"""The source tree a build compiles: made equal to a base plus our changes, whatever it was before."""

from __future__ import annotations

from pathlib import Path

from dflashcpp.llamacpp.git import ObjectStore
from dflashcpp.llamacpp.patches import Files, FolderTree, write
from dflashcpp.llamacpp.unified_diff import File


class StoreTree:
    """The files of a base, straight out of git's objects."""

    def __init__(self, store: ObjectStore, tree: str) -> None:
        self._store, self._tree = store, tree
        self._modes = store.files(tree)

    def file(self, path: str) -> File | None:
        """The file at `path`, or None."""
        mode = self._modes.get(path)
        if mode is None:
            return None
        return File(mode, self._store.read(self._tree, [path])[path])


def sync(store: ObjectStore, tree: str, folder: Path, changes: Files) -> None:
    """Make `folder` hold exactly `tree` with `changes` on top.

    Every file is hashed, so no trace of other patches, of an edit or of an interrupted run stays. A
    file that is right already is not written, so that ninja compiles only what changed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    index = folder.with_name(f"{folder.name}.index")
    index.unlink(missing_ok=True)

    def git(*arguments: str, stdin: bytes | None = None) -> list[str]:
        answer = store.git(
            *("-C", str(folder), f"--work-tree={folder}"), *arguments, stdin=stdin, GIT_INDEX_FILE=str(index)
        )
        return [name for name in answer.decode("utf-8", "surrogateescape").split("\0") if name]

    git("read-tree", tree)
    git("update-index", "-q", "--refresh", "--ignore-missing")
    foreign = [name for name in git("diff-files", "--name-only", "-z") if name not in changes]
    for name in git("ls-files", "--others", "-z"):
        if name not in changes:
            (folder / name).unlink()
    names = "".join(f"{name}\0" for name in foreign).encode("utf-8", "surrogateescape")
    git("checkout-index", "--force", "-z", "--stdin", stdin=names)
    present = FolderTree(folder)
    write({path: file for path, file in changes.items() if present.file(path) != file}, folder)
