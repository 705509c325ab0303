"""The source of a base: fetched once, proved by git's hashes, kept in the cache.

What is kept is a bare repository (`ObjectStore`), not a tree: files come out of it exactly as
committed, and a damaged cache shows itself when the objects are hashed again.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from dflashcpp import paths
from dflashcpp.errors import DflashError
from dflashcpp.llamacpp import git
from dflashcpp.llamacpp.bases import Base, all_bases
from dflashcpp.llamacpp.git import ObjectStore
from dflashcpp.llamacpp.sdist import fill_from_sdist
from dflashcpp.progress import SILENT, Progress

_Fill = Callable[[ObjectStore, Base, Progress], None]


def obtain(base: Base, *, source: Path | None = None, progress: Progress = SILENT) -> ObjectStore:
    """The proved objects of `base`, fetched when they are not in the cache.

    `source` is a tree of the user's own; it is only read, and must be exactly the base. Without it
    the sdist that carries the commit is tried, then llama.cpp's repository.
    Raises DflashError that tells every way that was tried.
    """
    from filelock import FileLock

    final = paths.cache_dir("sources") / f"{base.tag}-{base.tree[:12]}.git"
    with FileLock(final.with_suffix(".lock")):
        if source is not None:
            check_source(source, base)
        if final.is_dir() and _still_good(ObjectStore(final), base, progress):
            return ObjectStore(final)
        ways: list[tuple[str, _Fill]] = [
            ("the sdist", fill_from_sdist),
            ("the repository", _fill_from_repository),
        ]
        if source is not None:
            ways = [(str(source), lambda store, base, _: _fill_from_tree(store, base, source))]
        _fetch(final, base, ways, progress)
        return ObjectStore(final)


@contextmanager
def scratch_folder(parent: Path, prefix: str) -> Iterator[Path]:
    """A folder, gone afterwards. The caller has the lock for `prefix`: what a killed run left goes too."""
    for left in parent.glob(f"{prefix}*"):
        shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=prefix, dir=parent) as folder:
        yield Path(folder)


def cached(base: Base) -> ObjectStore | None:
    """The objects of `base` if the cache has them; they are not hashed again here."""
    final = paths.cache_dir("sources") / f"{base.tag}-{base.tree[:12]}.git"
    return ObjectStore(final) if final.is_dir() else None


def _still_good(store: ObjectStore, base: Base, progress: Progress) -> bool:
    try:
        store.prove(base.commit, base.tree)
    except DflashError as error:
        progress.say(f"the cached source of {base.tag} is damaged ({error.message}); fetching it again")
        shutil.rmtree(store.folder)
        return False
    return True


def _fetch(final: Path, base: Base, ways: list[tuple[str, _Fill]], progress: Progress) -> None:
    failures = []
    for name, fill in ways:
        with scratch_folder(final.parent, f"fetch-{base.tag}.") as scratch:
            store = ObjectStore.create(scratch / "store.git")
            try:
                fill(store, base, progress)
                store.prove(base.commit, base.tree)
            except DflashError as error:
                failures.append(f"{name}: {error.message}")
                continue
            store.folder.replace(final)
            return
    raise DflashError(
        f"the source of llama.cpp {base.tag} could not be had. " + " | ".join(failures),
        hint=f"check the network, or pass --source DIR with a clean checkout of {base.commit}",
    )


def _fill_from_repository(store: ObjectStore, base: Base, progress: Progress) -> None:
    with progress.task(f"fetching {base.commit[:12]} from {base.repository}"):
        store.git(
            *("-c", "http.lowSpeedLimit=1000", "-c", "http.lowSpeedTime=30"),
            *("fetch", "--quiet", "--depth", "1", "--no-tags", base.repository, base.commit),
        )


def _fill_from_tree(store: ObjectStore, base: Base, source: Path) -> None:
    folder = _git_folder(source)
    if folder is None:
        _add_files(store, source)
        return
    commit = _head(folder)
    names = git.run(
        [f"--git-dir={folder}", "rev-list", "--objects", "--no-walk", "--no-object-names", commit]
    )
    pack = git.run([f"--git-dir={folder}", "pack-objects", "--stdout", "-q"], stdin=names)
    store.git("index-pack", "--stdin", stdin=pack)
    (store.folder / "shallow").write_text(f"{commit}\n", encoding="ascii")


def check_source(source: Path, base: Base) -> None:
    """Refuse a tree of the user's own that is not exactly `base`. It is read, never written.

    A checkout must have the base's files at HEAD and no changes; a tree without git history must
    hash to the base's tree.
    """
    if not (source / "CMakeLists.txt").is_file() or not (source / "ggml").is_dir():
        raise DflashError(f"{source} is not a llama.cpp source tree", hint="--source takes its top folder")
    folder = _git_folder(source)
    if folder is None:
        _check_plain(source, base)
        return
    found = _tree_of(folder)
    if found != base.tree:
        raise _other_commit(source, base, found, f"commit {_head(folder)[:12]}")
    names = _changes(source, folder)
    if names:
        raise DflashError(
            f"{source} has changes of its own ({_some(names)}), so it is not the base {base.tag}",
            hint="undo or stash them, or leave out --source; our patches go on top of the clean commit",
        )


def _changes(source: Path, folder: Path) -> list[str]:
    """The files of a checkout that differ from HEAD or are new; with a new index git hashes every file."""
    with tempfile.TemporaryDirectory(prefix="index-", dir=paths.cache_dir("sources")) as scratch:
        index = str(Path(scratch, "index"))
        git.run([f"--git-dir={folder}", "read-tree", "HEAD"], GIT_INDEX_FILE=index)
        rows = git.run(
            [f"--git-dir={folder}", f"--work-tree={source}", "status", "--porcelain", "-z", "--no-renames"],
            GIT_INDEX_FILE=index,
        )
    return [row[3:] for row in rows.decode(errors="replace").split("\0") if row]


def _check_plain(source: Path, base: Base) -> None:
    with tempfile.TemporaryDirectory(prefix="tree-", dir=paths.cache_dir("sources")) as scratch:
        found = _add_files(ObjectStore.create(Path(scratch, "store.git")), source)
    if found != base.tree:
        raise _other_commit(source, base, found, f"a tree without git history, of hash {found[:12]},")


def _other_commit(source: Path, base: Base, tree: str, what: str) -> DflashError:
    for other in all_bases():
        if other.tree == tree:
            return DflashError(
                f"{source} is the base {other.tag}, not {base.tag}", hint=f"pass --base {other.tag}"
            )
    return DflashError(
        f"{source} is {what} and not the base {base.tag} ({base.commit[:12]}, {base.date})",
        hint=f"check out {base.commit} there, or leave out --source to have it fetched",
    )


def _git_folder(source: Path) -> Path | None:
    """The git folder of the checkout at `source` itself; None when it has none or lies in a foreign one."""
    if not (source / ".git").exists():
        return None
    try:
        answer = git.run(
            ["-C", str(source), "-c", "safe.directory=*", "rev-parse", "--absolute-git-dir", "HEAD"]
        )
    except DflashError:
        return None
    return Path(answer.decode().splitlines()[0])


def _head(folder: Path) -> str:
    return git.run([f"--git-dir={folder}", "rev-parse", "HEAD"]).decode().strip()


def _tree_of(folder: Path) -> str:
    return git.run([f"--git-dir={folder}", "rev-parse", "HEAD^{tree}"]).decode().strip()


def _add_files(store: ObjectStore, source: Path) -> str:
    """Put the files of `source` into `store` and return their tree's hash; build folders are left out."""
    builds = [entry.name for entry in os.scandir(source) if entry.is_dir() and entry.name.startswith("build")]
    index = str(store.folder / "add.index")
    work = f"--work-tree={source}"
    store.git(
        *(work, "-C", str(source), "add", "--all", "--force", "--", "."),
        *(f":(exclude,top){name}" for name in builds),
        GIT_INDEX_FILE=index,
    )
    return store.git("write-tree", GIT_INDEX_FILE=index).decode().strip()


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:3])
    return f"{shown} and {len(names) - 3} more" if len(names) > 3 else shown
