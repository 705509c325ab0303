"""The source of a base: fetched in two ways or taken from a tree, proved by git's hashes, kept."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from dflashcpp.errors import DflashError
from dflashcpp.llamacpp import sdist
from dflashcpp.llamacpp.bases import Base, find_base
from dflashcpp.llamacpp.git import ObjectStore
from dflashcpp.llamacpp.patches import Files
from dflashcpp.llamacpp.source import check_source, obtain
from dflashcpp.llamacpp.tree import StoreTree, sync
from dflashcpp.llamacpp.unified_diff import File
from dflashcpp.progress import Progress, Task
from tests.support import fake_tools
from tests.support.stand_in import FILES, StandIn, git, write_files


class Heard(Progress):
    """Remembers labels of tasks, what was said, and how far each task came."""

    def __init__(self) -> None:
        self.labels: list[str] = []
        self.said: list[str] = []
        self.amount = 0

    def say(self, text: str) -> None:
        self.said.append(text)

    def task(self, label: str, total: int | None = None, unit: str = "steps") -> Task:
        self.labels.append(label)
        heard = self

        class Counted(Task):
            def advance(self, amount: int = 1) -> None:
                heard.amount += amount

        return Counted()


@pytest.fixture
def base(stand_in: StandIn) -> Base:
    return find_base()


@pytest.fixture
def no_pip(monkeypatch: pytest.MonkeyPatch, stand_in: StandIn, tmp_path: Path) -> None:
    """pip finds no package."""
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))


@pytest.fixture
def no_repository(monkeypatch: pytest.MonkeyPatch, stand_in: StandIn) -> None:
    """The repository is not where it was."""
    path = stand_in.patches / "bases.toml"
    path.write_text(path.read_text().replace(stand_in.repository.as_uri(), "file:///nowhere/llama.cpp"))


def checkout(stand_in: StandIn, folder: Path) -> Path:
    """A clone of the stand-in, as a user would have one."""
    git(folder.parent, "clone", "-q", str(stand_in.repository), str(folder))
    return folder


def exported(store: ObjectStore, base: Base, folder: Path) -> dict[str, str]:
    sync(store, base.tree, folder, {})
    return {name: (folder / name).read_text() for name in FILES}


def test_the_sdist_gives_exactly_the_commit(no_repository: None, base: Base, tmp_path: Path) -> None:
    heard = Heard()
    store = obtain(find_base(), progress=heard)
    assert exported(store, base, tmp_path / "out") == FILES
    assert os.access(tmp_path / "out" / "build-xcframework.sh", os.X_OK)
    assert store.git("rev-parse", base.commit).decode().strip() == base.commit
    assert heard.labels[0] == "downloading llama-cpp-python==99.1"
    assert heard.amount == base.sdist_bytes


def test_nothing_of_the_sdist_is_run_or_obeyed(no_repository: None, base: Base) -> None:
    store = obtain(find_base())
    assert "fsmonitor" not in (store.folder / "config").read_text()
    assert not Path("/tmp/obeyed").exists()
    assert not (store.folder / "hooks").exists()


def test_without_the_sdist_the_repository_is_asked(no_pip: None, base: Base, tmp_path: Path) -> None:
    heard = Heard()
    store = obtain(base, progress=heard)
    assert exported(store, base, tmp_path / "out") == FILES
    assert heard.labels[-1].startswith(f"fetching {base.commit[:12]}")


def test_when_every_way_fails_each_is_told_and_nothing_is_left(
    no_pip: None, no_repository: None, own_cache
) -> None:
    with pytest.raises(DflashError) as caught:
        obtain(find_base())
    assert "the sdist: pip could not get llama-cpp-python==99.1" in caught.value.message
    assert "the repository: git fetch" in caught.value.message
    assert "--source DIR" in (caught.value.hint or "")
    assert [path.suffix for path in (own_cache / "sources").iterdir()] == [".lock"]


def test_a_second_call_needs_no_network(base: Base, monkeypatch, tmp_path: Path, stand_in: StandIn) -> None:
    first = obtain(base)
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.setattr(sdist, "fill_from_sdist", lambda *_: pytest.fail("fetched again"))
    assert obtain(base) == first


def test_an_sdist_with_another_hash_is_refused(no_repository: None, stand_in: StandIn) -> None:
    from dflashcpp import knowledge

    path = stand_in.patches / "bases.toml"
    text = path.read_text()
    digest = find_base().sdist_sha256
    path.write_text(text.replace(digest, "0" * 64))
    knowledge.table.cache_clear()
    with pytest.raises(DflashError, match="pip could not get"):
        obtain(find_base())


def test_objects_of_another_commit_are_refused(no_repository: None, stand_in: StandIn) -> None:
    from dflashcpp import knowledge

    path = stand_in.patches / "bases.toml"
    path.write_text(path.read_text().replace(stand_in.tree, "1" * 40).replace(stand_in.commit, "2" * 40))
    knowledge.table.cache_clear()
    with pytest.raises(DflashError, match="git fsck"):
        obtain(find_base())


def test_a_damaged_cache_is_noticed_and_fetched_again(base: Base, tmp_path: Path) -> None:
    store = obtain(base)
    (pack,) = store.folder.glob("objects/pack/*.pack")
    data = bytearray(pack.read_bytes())
    data[len(data) // 2] ^= 0xFF
    pack.chmod(0o644)
    pack.write_bytes(data)
    heard = Heard()
    again = obtain(base, progress=heard)
    assert "is damaged" in heard.said[0]
    assert exported(again, base, tmp_path / "out") == FILES


def test_an_archive_cut_short_is_told(stand_in: StandIn, tmp_path: Path) -> None:
    whole = next(stand_in.sdists.iterdir()).read_bytes()
    cut = tmp_path / "cut.tar.gz"
    cut.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DflashError, match=r"cut\.tar\.gz is damaged"):
        sdist.extract_objects(cut, ObjectStore.create(tmp_path / "store"))


def test_members_that_climb_out_of_the_archive_are_ignored(tmp_path: Path) -> None:
    path = tmp_path / "evil.tar.gz"
    with tarfile.open(path, "w:gz") as tar:
        for name in (
            "x/.git/modules/vendor/llama.cpp/objects/../../../../../../escaped",
            "../escaped",
            "/escaped",
        ):
            tar.addfile(tarfile.TarInfo(name))
        link = tarfile.TarInfo("x/.git/modules/vendor/llama.cpp/objects/pack")
        link.type, link.linkname = tarfile.SYMTYPE, str(tmp_path)
        tar.addfile(link)
    store = ObjectStore.create(tmp_path / "a" / "b" / "store")
    with pytest.raises(DflashError, match="no git objects"):
        sdist.extract_objects(path, store)
    assert not list(tmp_path.rglob("escaped"))


def test_the_users_git_settings_change_nothing(base: Base, monkeypatch, tmp_path: Path) -> None:
    config = tmp_path / "home" / ".gitconfig"
    write_files(
        config.parent,
        {".gitconfig": "[core]\n\tautocrlf = true\n\tfsmonitor = false\n[init]\n\tdefaultBranch = x\n"},
    )
    monkeypatch.setenv("HOME", str(config.parent))
    monkeypatch.setenv("GIT_DIR", "/nowhere")
    monkeypatch.setenv("GIT_INDEX_FILE", "/nowhere/index")
    assert exported(obtain(base), base, tmp_path / "out") == FILES


def test_without_git_the_command_that_installs_it_is_told(base: Base, monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(DflashError, match="git is not installed") as caught:
        obtain(base)
    assert "sudo apt-get install git" in str(caught.value.hint)


# --- a tree of the user's own


def test_a_clean_checkout_is_taken_and_not_touched(
    no_pip: None, no_repository: None, stand_in, base, tmp_path
) -> None:
    folder = checkout(stand_in, tmp_path / "my llama.cpp")
    write_files(folder, {"build/CMakeCache.txt": "ignored by .gitignore"})
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    store = obtain(base, source=folder)
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before
    shutil.rmtree(folder)
    assert exported(store, base, tmp_path / "out") == FILES


@pytest.mark.parametrize("change", ["edit", "new file", "staged"])
def test_a_checkout_with_changes_is_refused_and_they_are_named(
    stand_in, base, tmp_path: Path, change: str
) -> None:
    folder = checkout(stand_in, tmp_path / "mine")
    name = "main.cpp" if change == "edit" else "extra.cpp"
    (folder / name).write_text("// mine\n")
    if change == "staged":
        git(folder, "add", name)
    with pytest.raises(DflashError, match=rf"changes of its own \({name}\)"):
        obtain(base, source=folder)


def test_an_edit_that_keeps_size_and_time_is_noticed(stand_in, base, tmp_path: Path) -> None:
    folder = checkout(stand_in, tmp_path / "mine")
    path = folder / "ggml" / "ggml.cpp"
    os.utime(path, (10**9, 10**9))
    git(folder, "update-index", "--refresh")
    path.write_text(path.read_text().replace("42", "43"))
    os.utime(path, (10**9, 10**9))
    with pytest.raises(DflashError, match=r"changes of its own \(ggml/ggml\.cpp\)"):
        check_source(folder, base)


def test_another_commit_is_refused_with_both_named(stand_in, base, tmp_path: Path) -> None:
    folder = checkout(stand_in, tmp_path / "mine")
    (folder / "main.cpp").write_text("// mine\n")
    git(folder, "commit", "-qam", "mine")
    head = git(folder, "rev-parse", "HEAD")
    with pytest.raises(DflashError, match=f"commit {head[:12]} and not the base abc1234") as caught:
        obtain(base, source=folder)
    assert base.commit in (caught.value.hint or "")


def test_the_same_files_under_another_commit_are_the_base(
    no_pip: None, no_repository: None, stand_in, base, tmp_path
) -> None:
    folder = checkout(stand_in, tmp_path / "mine")
    git(folder, "commit", "-q", "--amend", "-m", "imported")
    assert exported(obtain(base, source=folder), base, tmp_path / "out") == FILES


def test_a_tree_without_git_is_proved_by_its_hash(
    no_pip: None, no_repository: None, stand_in, base, tmp_path
) -> None:
    folder = tmp_path / "unpacked"
    write_files(folder, FILES)
    (folder / "build-xcframework.sh").chmod(0o755)
    (folder / ".git").write_text("gitdir: ../../.git/modules/vendor/llama.cpp\n")
    write_files(folder, {"build/CMakeCache.txt": "left out"})
    assert exported(obtain(base, source=folder), base, tmp_path / "out") == FILES
    (folder / "main.cpp").write_text("// mine\n")
    with pytest.raises(DflashError, match=r"a tree without git history.*not the base abc1234"):
        obtain(base, source=folder)


def test_a_tree_without_git_inside_a_foreign_repository_is_not_taken_for_it(
    stand_in, base, tmp_path: Path
) -> None:
    git(tmp_path, "init", "-q")
    git(tmp_path, "commit", "-q", "--allow-empty", "-m", "foreign")
    write_files(tmp_path / "vendored", FILES | {"main.cpp": "// mine\n"})
    with pytest.raises(DflashError, match="a tree without git history"):
        check_source(tmp_path / "vendored", base)


def test_what_is_no_llama_cpp_is_refused(base: Base, tmp_path: Path) -> None:
    with pytest.raises(DflashError, match=r"not a llama\.cpp source tree"):
        check_source(tmp_path, base)
    with pytest.raises(DflashError, match=r"not a llama\.cpp source tree"):
        check_source(tmp_path / "not there", base)


def test_a_checkout_of_another_owner_is_read(
    no_pip: None, no_repository: None, stand_in, base, tmp_path
) -> None:
    if os.getuid() != 0:
        pytest.skip("only root can give a file away")
    folder = checkout(stand_in, tmp_path / "theirs")
    subprocess.run(["chown", "-R", "12345:12345", str(folder)], check=True)
    assert exported(obtain(base, source=folder), base, tmp_path / "out") == FILES


# --- the tree that is compiled


def test_sync_writes_only_what_differs(base: Base, tmp_path: Path) -> None:
    store, folder = obtain(base), tmp_path / "work" / "llama.cpp"
    changes: Files = {
        "main.cpp": File("100644", b"// ours\n"),
        "new/a.h": File("100644", b"x"),
        "ggml/ggml.cpp": None,
    }
    sync(store, base.tree, folder, changes)
    assert (folder / "main.cpp").read_text() == "// ours\n"
    assert not (folder / "ggml/ggml.cpp").exists()
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}
    sync(store, base.tree, folder, changes)
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()} == before


def test_sync_undoes_other_changes(base: Base, tmp_path: Path) -> None:
    store, folder = obtain(base), tmp_path / "work" / "llama.cpp"
    sync(
        store, base.tree, folder, {"main.cpp": File("100644", b"// ours\n"), "new/a.h": File("100644", b"x")}
    )
    (folder / "common/arg.cpp").write_text("edited")
    (folder / "CMakeLists.txt").unlink()
    (folder / "build-xcframework.sh").chmod(0o644)
    write_files(folder, {"build/stray.txt": "x", "src/glob.cpp": "x"})
    assert exported(store, base, folder) == FILES
    left = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert left == set(FILES)
    assert os.access(folder / "build-xcframework.sh", os.X_OK)


def test_files_are_read_straight_from_the_objects(base: Base) -> None:
    tree = StoreTree(obtain(base), base.tree)
    assert tree.file("common/arg.cpp") == File("100644", FILES["common/arg.cpp"].encode())
    assert tree.file("build-xcframework.sh") == File("100755", FILES["build-xcframework.sh"].encode())
    assert tree.file("notes/no newline.txt") == File("100644", FILES["notes/no newline.txt"].encode())
    assert tree.file("absent") is None
    assert tree.file("ggml") is None


def test_what_a_killed_fetch_left_is_swept_away(base: Base, own_cache: Path) -> None:
    write_files(own_cache / "sources" / "fetch-abc1234.x1", {"store.git/objects/half": "x"})
    obtain(base)
    assert not list((own_cache / "sources").glob("fetch-*"))


def test_an_environment_without_pip_uses_the_one_in_path(
    no_repository: None, monkeypatch, tmp_path: Path
) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        sdist.importlib.util, "find_spec", lambda name: None if name == "pip" else find_spec(name)
    )
    monkeypatch.setenv("PATH", f"{tmp_path}:/nowhere")
    fake_tools.script(tmp_path, "git", 'exec /usr/bin/git "$@"')
    with pytest.raises(DflashError, match="the sdist: there is no pip"):
        obtain(find_base())
    fake_tools.script(tmp_path, "pip3", f'exec "{sys.executable}" -m pip "$@"')
    assert obtain(find_base()).folder.is_dir()
