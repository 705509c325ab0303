"""A series as a whole: read, checked against a tree before anything is written, recognised in a tree."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from dflashcpp.cli.app import run
from dflashcpp.errors import DflashError
from dflashcpp.llamacpp import patches
from dflashcpp.llamacpp.bases import all_bases, find_base
from dflashcpp.llamacpp.patches import FolderTree, MemoryTree, PatchError, Series
from dflashcpp.llamacpp.unified_diff import File
from tests.support.stand_in import HEADER, SPEC_TYPE_PATCH, StandIn, git, write_files

OLD = "".join(f"line {number}\n" for number in range(1, 41))


def edit(
    line: int, text: str, *, path: str = "src/a.cpp", was: str | None = None, header: str = HEADER
) -> str:
    """A patch that replaces one line of a 40-line file, with one line of context."""
    old = was or f"line {line}"
    context = [f"line {line - 1}", f"line {line + 1}"]
    return (
        f"{header}\n--- a/{path}\n+++ b/{path}\n@@ -{line - 1},3 +{line - 1},3 @@\n"
        f" {context[0]}\n-{old}\n+{text}\n {context[1]}\n"
    )


def series(folder: Path, texts: dict[str, str], sources: dict[str, str] | None = None) -> Series:
    """Write `texts` as the series of the default base and load it."""
    base = find_base()
    write_files(folder / base.tag, texts)
    (folder / base.tag / "series").write_text("".join(f"{name}\n" for name in texts))
    write_files(folder / "src", sources or {})
    return patches.load_series(base, folder)


def tree(**changes: str) -> MemoryTree:
    return MemoryTree({"src/a.cpp": File("100644", (changes.get("a") or OLD).encode())})


def snapshot(folder: Path) -> dict[str, tuple[bytes, int]]:
    found = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): (path.read_bytes(), path.stat().st_mtime_ns) for path in found}


def test_patches_build_on_each_other_in_the_order_of_the_series(tmp_path: Path) -> None:
    made = series(tmp_path, {"0002-b.patch": edit(9, "one"), "0001-a.patch": edit(9, "two", was="one")})
    plan = patches.plan(made, tree())
    assert plan.state == {"0002-b.patch": "applies", "0001-a.patch": "applies"}
    file = plan.files["src/a.cpp"]
    assert file is not None
    assert file.data.decode() == OLD.replace("line 9\n", "two\n")


def test_the_header_is_read_with_its_continuation_lines(tmp_path: Path) -> None:
    (patch,) = series(tmp_path, {"0001-a.patch": edit(9, "one")}).patches
    assert patch.description == "the spec type of DFlash"
    assert patch.header["Description"].endswith("\nOne more name in the table.")
    assert patch.header["Last-Update"] == "2026-11-29"
    assert patch.touched == ("src/a.cpp",)
    assert patches.header_problems(patch) == []


@pytest.mark.parametrize("name", patches.FIELDS)
def test_a_missing_header_field_is_named(tmp_path: Path, name: str) -> None:
    lines = [line for line in HEADER.splitlines() if not line.startswith((f"{name}:", " "))]
    (patch,) = series(tmp_path, {"0001-a.patch": edit(9, "x", header="\n".join(lines))}).patches
    assert patches.header_problems(patch) == [f"0001-a.patch: the field {name} is missing"]


def test_git_format_patch_headers_are_taken_for_author_and_description(tmp_path: Path) -> None:
    header = "From: A <a@b.c>\nSubject: does it\nForwarded: no\nLast-Update: 2026-01-01\nDrop-When: never\n"
    header += "---\n f | 2 +-\n"
    (patch,) = series(tmp_path, {"0001-a.patch": edit(9, "x", header=header)}).patches
    assert patches.header_problems(patch) == []
    assert patch.description == "does it"


def test_a_patch_that_does_not_fit_is_named_with_file_and_hunk_and_nothing_is_written(tmp_path: Path) -> None:
    texts = {"0001-a.patch": edit(9, "one"), "0002-b.patch": edit(20, "x", was="other content")}
    made = series(tmp_path / "patches", texts)
    write_files(tmp_path / "tree", {"src/a.cpp": OLD})
    before = snapshot(tmp_path / "tree")
    with pytest.raises(PatchError) as caught:
        patches.plan(made, FolderTree(tmp_path / "tree"))
    assert caught.value.message.startswith(
        "0002-b.patch does not apply: src/a.cpp: hunk 1 (line 19) does not fit"
    )
    assert "nothing was changed" in (caught.value.hint or "")
    assert snapshot(tmp_path / "tree") == before


def test_a_tree_inside_a_foreign_repository_is_really_changed(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q")
    (tmp_path / ".gitignore").write_text("vendor/\n")
    write_files(tmp_path / "vendor" / "llama.cpp", {"src/a.cpp": OLD})
    folder = tmp_path / "vendor" / "llama.cpp"
    made = series(tmp_path / "patches", {"0001-a.patch": edit(9, "one")}, {"walk.h": "// walk\n"})
    patches.write(patches.plan(made, FolderTree(folder)).files, folder)
    assert (folder / "src/a.cpp").read_text() == OLD.replace("line 9\n", "one\n")
    assert (folder / "dflashcpp/walk.h").read_text() == "// walk\n"


def test_a_series_that_is_applied_already_changes_nothing(tmp_path: Path) -> None:
    texts = {
        "0001-a.patch": edit(9, "one"),
        "0002-b.patch": edit(9, "two", was="one"),
        "0003-c.patch": edit(30, "x"),
    }
    made = series(tmp_path / "patches", texts, {"walk.h": "// walk\n"})
    write_files(tmp_path / "tree", {"src/a.cpp": OLD})
    patches.write(patches.plan(made, FolderTree(tmp_path / "tree")).files, tmp_path / "tree")
    again = patches.plan(made, FolderTree(tmp_path / "tree"))
    assert set(again.state.values()) == {"already applied"}
    assert again.files == {}


@pytest.mark.parametrize("count", [1, 2])
def test_a_tree_with_the_first_patches_gets_the_rest(tmp_path: Path, count: int) -> None:
    texts = {
        "0001-a.patch": edit(9, "one"),
        "0002-b.patch": edit(9, "two", was="one"),
        "0003-c.patch": edit(30, "x"),
    }
    made = series(tmp_path, texts)
    part = patches.plan(Series("x", made.patches[:count], {}), tree()).files["src/a.cpp"]
    assert part is not None
    plan = patches.plan(made, MemoryTree({"src/a.cpp": part}))
    assert list(plan.state.values()) == ["already applied"] * count + ["applies"] * (3 - count)
    whole = patches.plan(made, tree())
    assert plan.files["src/a.cpp"] == whole.files["src/a.cpp"]


def test_one_patch_that_upstream_took_is_left_out_even_where_lines_moved(tmp_path: Path) -> None:
    made = series(tmp_path, {"0001-a.patch": edit(20, "x"), "0002-b.patch": edit(9, "one")})
    upstream = OLD.replace("line 20\n", "x\n").replace("line 12\n", "line 12\nline 12b\n")
    plan = patches.plan(made, tree(a=upstream))
    assert plan.state == {"0001-a.patch": "already applied", "0002-b.patch": "applies"}


def test_a_base_that_knows_the_feature_is_told_and_the_patch_left_out(tmp_path: Path) -> None:
    header = HEADER + "Skip-If: src/a.cpp contains draft-dflash\n"
    made = series(tmp_path, {"0001-a.patch": edit(9, "draft-dflash", header=header)})
    plan = patches.plan(made, tree(a=OLD + 'types = "draft-dflash"\n'))
    assert plan.state == {"0001-a.patch": "not needed: src/a.cpp has 'draft-dflash'"}
    assert plan.files == {}
    assert patches.plan(made, tree()).state == {"0001-a.patch": "applies"}


def test_a_condition_that_cannot_be_read_is_a_problem(tmp_path: Path) -> None:
    (patch,) = series(tmp_path, {"0001-a.patch": edit(9, "x", header=HEADER + "Skip-If: maybe\n")}).patches
    assert "Skip-If is 'maybe'" in patches.header_problems(patch)[0]


def test_a_file_of_ours_never_overwrites_one_of_the_tree(tmp_path: Path) -> None:
    made = series(tmp_path / "patches", {"0001-a.patch": edit(9, "one")}, {"walk.h": "// ours\n"})
    theirs = MemoryTree(
        {"src/a.cpp": File("100644", OLD.encode()), "dflashcpp/walk.h": File("100644", b"// theirs\n")}
    )
    with pytest.raises(PatchError, match=r"dflashcpp/walk\.h.*not ours"):
        patches.plan(made, theirs)


def test_a_write_that_fails_half_way_puts_the_tree_back(tmp_path: Path, monkeypatch) -> None:
    write_files(tmp_path, {"a": "a\n", "b": "b\n"})
    before = {name: data for name, (data, _) in snapshot(tmp_path).items()}
    replace = Path.replace

    def full(self: Path, target: Path) -> Path:
        if Path(target).name == "b" and b"new" in self.read_bytes():
            raise OSError(28, "No space left on device", str(target))
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", full)
    changes = {"c": File("100644", b"new\n"), "a": None, "b": File("100644", b"new\n")}
    with pytest.raises(DflashError, match="No space left on device; the tree is as it was"):
        patches.write(changes, tmp_path)
    assert {name: data for name, (data, _) in snapshot(tmp_path).items()} == before


def test_modes_are_written(tmp_path: Path) -> None:
    patches.write({"run.sh": File("100755", b"x"), "f": File("100644", b"x")}, tmp_path)
    assert os.access(tmp_path / "run.sh", os.X_OK)
    assert not (tmp_path / "f").stat().st_mode & 0o111


def test_a_symbolic_link_out_of_the_tree_is_not_followed(tmp_path: Path) -> None:
    write_files(tmp_path, {"outside/a.cpp": OLD})
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / "src").symlink_to(tmp_path / "outside")
    made = series(tmp_path / "patches", {"0001-a.patch": edit(9, "one")})
    with pytest.raises(PatchError, match="symbolic link"):
        patches.plan(made, FolderTree(tmp_path / "tree"))


def test_the_digest_changes_with_patches_order_and_source_files(tmp_path: Path) -> None:
    texts = {"0001-a.patch": edit(9, "one"), "0002-b.patch": edit(20, "two")}
    digests = {
        series(tmp_path / "1", texts).digest,
        series(tmp_path / "2", dict(reversed(texts.items()))).digest,
        series(tmp_path / "3", texts, {"walk.h": "1"}).digest,
        series(tmp_path / "4", texts, {"walk.h": "2", "tests/walk-test.cpp": "1"}).digest,
        series(tmp_path / "5", {**texts, "0002-b.patch": edit(20, "three")}).digest,
    }
    assert len(digests) == 5
    assert series(tmp_path / "6", texts).digest in digests
    assert series(tmp_path / "7", texts, {"walk.h": "2", "tests/walk-test.cpp": "2"}).digest in digests


def test_the_series_file_takes_comments_and_refuses_options(tmp_path: Path) -> None:
    (tmp_path / "series").write_text("# first\n\n0001-a.patch  # why\n  0002-b.patch\n")
    assert patches.series_names(tmp_path) == ["0001-a.patch", "0002-b.patch"]
    (tmp_path / "series").write_text("0001-a.patch -p0\n")
    with pytest.raises(PatchError, match="line 1"):
        patches.series_names(tmp_path)


def test_a_listed_patch_without_file_is_told(tmp_path: Path) -> None:
    base = find_base()
    write_files(tmp_path / base.tag, {"series": "0001-gone.patch\n"})
    with pytest.raises(PatchError, match=r"lists 0001-gone\.patch"):
        patches.load_series(base, tmp_path)


def test_check_finds_every_kind_of_fault_and_fails(stand_in: StandIn, capsys) -> None:
    stand_in.write_series(
        {
            "0001-spec-type.patch": SPEC_TYPE_PATCH.replace("Author: A Tester\n", ""),
            "0002-b.patch": edit(9, "x"),
        }
    )
    write_files(
        stand_in.patches, {"abc1234/0009-forgotten.patch": "x", "0ld0000/series": "", "README.md": "0002-b"}
    )
    assert run(["patches", "--check", "--json"]) == 1
    problems = "\n".join(json.loads(capsys.readouterr().out)["problems"])
    for words in (
        "0001-spec-type.patch: the field Author is missing",
        "abc1234/0009-forgotten.patch is not in the series",
        "0002-b.patch does not apply: src/a.cpp: the patch changes this file, but it is not there",
        "0001-spec-type: patches/README.md has no row for it",
        "0ld0000/series is there, but bases.toml has no such base",
    ):
        assert words in problems


def test_check_passes_a_good_series_and_leaves_no_tree(stand_in: StandIn, own_cache: Path, capsys) -> None:
    stand_in.write_series({"0001-spec-type.patch": SPEC_TYPE_PATCH})
    assert run(["patches", "--check", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["problems"] == []
    assert shown["bases"][0]["patches"][0]["state"] == "applies"
    assert not (own_cache / "work").exists()


def test_the_list_needs_no_source(stand_in: StandIn, own_cache: Path, capsys) -> None:
    stand_in.write_series({"0001-spec-type.patch": SPEC_TYPE_PATCH})
    assert run(["patches"]) == 0
    shown = capsys.readouterr().out
    assert "0001-spec-type.patch" in shown
    assert "not checked" in shown
    assert list((own_cache / "sources").iterdir()) == []


def test_every_shipped_series_is_complete_on_paper() -> None:
    from dflashcpp import knowledge

    root = knowledge.folder("patches")
    for base in all_bases():
        if not patches.has_series(base):
            continue
        assert patches.unlisted(root / base.tag) == []
        for patch in patches.load_series(base).patches:
            assert patches.header_problems(patch) == []
