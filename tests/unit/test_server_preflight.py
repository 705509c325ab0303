from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dflashcpp import knowledge
from dflashcpp.conversion import convert
from dflashcpp.errors import DflashError
from dflashcpp.server.preflight import check_files
from tests.support import checkpoints


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("a pair")


@pytest.fixture(scope="module")
def target(folder: Path) -> Path:
    return checkpoints.write_target(folder / "target.gguf")


@pytest.fixture(scope="module")
def drafter(folder: Path, target: Path) -> Path:
    source = checkpoints.write_checkpoint(folder / "v2", checkpoints.t1_v2())
    return convert(source, target=target, type="BF16", output=folder / "draft.gguf").file


def other_target(folder: Path, name: str, **edits: Any) -> Path:
    return checkpoints.write_target(folder / f"{name}.gguf", weights=False, **edits)


def test_a_pair_that_fits_passes_without_a_word(target: Path, drafter: Path) -> None:
    checked = check_files(target, drafter, "0c1e570")
    assert checked.drafter is not None
    assert checked.drafter.version == 2
    assert checked.warnings == ()


@pytest.mark.parametrize(
    ("edits", "text"),
    [
        ({"hidden": 128}, "hidden size 256, the target's is 128"),
        ({"layers": 3}, "a tap at layer 4, the target has 3 layers"),
        ({"layers": 8}, "target of 6 layers, this one has 8"),
        ({"vocab": 480}, "mask token 500, the target has 480 tokens"),
        ({"vocab": 520}, "vocabulary of 512 tokens, the target's has 520"),
    ],
)
def test_a_pair_that_does_not_fit_is_refused_with_both_numbers(
    folder: Path, drafter: Path, edits: dict[str, int], text: str
) -> None:
    other = other_target(folder, "-".join(f"{key}{size}" for key, size in edits.items()), **edits)
    with pytest.raises(DflashError, match=text) as caught:
        check_files(other, drafter)
    assert str(drafter) in caught.value.message
    assert str(other) in caught.value.message


def test_the_two_files_changed_about_are_recognised(target: Path, drafter: Path) -> None:
    with pytest.raises(DflashError, match="is a drafter, not a target"):
        check_files(drafter, target)
    with pytest.raises(DflashError, match="not a drafter"):
        check_files(target, target)


@pytest.mark.parametrize("which", ["target", "drafter"])
def test_a_file_that_is_cut_off_is_named(folder: Path, target: Path, drafter: Path, which: str) -> None:
    whole = {"target": target, "drafter": drafter}
    cut = folder / f"cut {which}.gguf"
    cut.write_bytes(whole[which].read_bytes()[:-1000])
    files = {**whole, which: cut}
    with pytest.raises(DflashError, match="cut off") as caught:
        check_files(files["target"], files["drafter"])
    assert str(cut) in caught.value.message


@pytest.mark.parametrize(
    "content", [b"", b"GG", b"NOPE" * 20, b"version https://git-lfs.github.com/spec/v1\n"]
)
def test_a_file_that_is_no_gguf_is_named(folder: Path, drafter: Path, content: bytes) -> None:
    bad = folder / "bad.gguf"
    bad.write_bytes(content)
    with pytest.raises(DflashError) as caught:
        check_files(bad, drafter)
    assert str(bad) in caught.value.message


def test_a_dflash2_file_on_a_build_that_only_knows_dflash_is_refused_before_launch(
    folder: Path, target: Path, drafter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_files(target, drafter, "4df29be")
    monkeypatch.delitem(knowledge.table("patches/bases.toml")["bases"]["4df29be"], "adds")
    with pytest.raises(
        DflashError, match=r"is a DFlash-2 drafter and the build is llama.cpp 4df29be"
    ) as caught:
        check_files(target, drafter, "4df29be")
    assert "dflashcpp build --base" in str(caught.value.hint)
    first = checkpoints.write_checkpoint(folder / "v1", checkpoints.t1())
    made = convert(first, target=target, type="BF16", output=folder / "v1.gguf").file
    check_files(target, made, "4df29be")


def test_a_target_whose_layers_are_not_exposed_is_warned_about(folder: Path, drafter: Path) -> None:
    other = other_target(folder, "arch", arch="gemma2")
    assert any("gemma2" in text for text in check_files(other, drafter).warnings)


def test_tokens_that_differ_are_counted_and_padding_is_none(folder: Path, drafter: Path) -> None:
    shorter = other_target(folder, "tokens", tokens=505)
    assert check_files(shorter, drafter).warnings == ()
