"""Where the target is looked for when the user does not name it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dflashcpp import pairs, target_search
from dflashcpp.checkpoint import open_checkpoint
from dflashcpp.conversion import convert
from dflashcpp.errors import DflashError
from dflashcpp.progress import Progress
from tests.support.checkpoints import random_entries, t1, write_checkpoint, write_target
from tests.support.fake_hub import COMMIT, fake_hub
from tests.unit.test_checkpoint_flavours import speculators


class Heard(Progress):
    """Remembers what was said."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, text: str) -> None:
        self.lines.append(text)


def tiny_pair(**facts: Any) -> pairs.Pair:
    """A pair whose drafter is T1 and whose target is on the Hub."""
    place = pairs.Source(
        kind="hub", file="t.gguf", repo="tiny/Target-GGUF", revision=COMMIT, files=("t.gguf",)
    )
    known = {"drafter": {"taps": [2, 4]}, "target": {"hidden": 256, "layers": 6, "vocab": 512}}
    return pairs.Pair("tiny", "tiny", place, place, facts={**known, **facts})


def test_a_known_pairs_target_is_read_by_its_header_not_downloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = write_target(tmp_path / "t" / "t.gguf", weights=False)
    with fake_hub() as hub, open_checkpoint(write_checkpoint(tmp_path / "d")) as checkpoint:
        hub.add("tiny/Target-GGUF", target.parent)
        hub.repos["tiny/Target-GGUF"]["t.gguf"] += b"\0" * (16 << 20)
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        monkeypatch.setattr(pairs, "list_pairs", lambda: [tiny_pair()])
        monkeypatch.setattr(pairs, "local_target", lambda pair: None)
        heard = Heard()
        found = target_search.find_target(checkpoint, checkpoint.path, None, heard)
        assert found.tokens == 512 and "known pair tiny" in heard.lines[0]
        assert hub.sent < 4 << 20


@pytest.mark.parametrize(
    "facts",
    [
        {"drafter": {"taps": [2, 5]}},
        {"target": {"hidden": 512, "layers": 6, "vocab": 512}},
        {"target": {"hidden": 256, "layers": 7, "vocab": 512}},
        {"target": {"hidden": 256, "layers": 6, "vocab": 600}},
    ],
)
def test_a_pair_of_another_drafter_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, facts: dict[str, Any]
) -> None:
    monkeypatch.setattr(pairs, "list_pairs", lambda: [tiny_pair(**facts)])
    with pytest.raises(DflashError, match="no target was given"):
        convert(write_checkpoint(tmp_path / "d"), type="BF16", output=tmp_path / "x")


def test_the_target_that_a_drafter_names_is_found_in_the_hub_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    from tests.unit.test_convert_tokenizer import folder_of, tokenizer_json

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    repo = tmp_path / "hub" / "models--tiny--Target-1B"
    folder_of(repo / "snapshots" / COMMIT, tokenizer_json())
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(COMMIT)
    source = write_checkpoint(tmp_path / "d", speculators(t1()), entries=random_entries(t1()))
    result = convert(source, type="BF16", output=tmp_path / "x.gguf")
    assert COMMIT in result.target


def test_several_gguf_files_beside_the_checkpoint_are_a_question(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "d")
    for name in ("a.gguf", "b.gguf"):
        write_target(source / name, weights=False)
    with pytest.raises(DflashError, match=r"a\.gguf.*b\.gguf"):
        convert(source, type="BF16", output=tmp_path / "x")


def test_the_pairs_of_the_table_are_recognised_by_their_drafters() -> None:
    pair = pairs.load_pair()
    source = pairs.local_source(pair)
    assert source is not None
    with open_checkpoint(source) as checkpoint:
        matching = [p.name for p in pairs.list_pairs() if target_search._is_drafter_of(checkpoint.drafter, p)]
        other = replace(checkpoint.drafter, taps=(1, 2, 3))
    assert matching == [pair.name]
    assert not any(target_search._is_drafter_of(other, p) for p in pairs.list_pairs())
