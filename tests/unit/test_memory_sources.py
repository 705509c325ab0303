"""Where a plan gets its models: files, URLs, checkpoints, parts of a split file; and what it refuses."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from dflashcpp.errors import DflashError
from dflashcpp.gguf_file import Kv
from dflashcpp.knowledge import folder
from dflashcpp.memory import plan, planning, sources
from dflashcpp.memory.settings import Settings
from tests.support.gguf_shapes import TARGETS, Target, plain_block, write_sparse, write_target
from tests.support.sparse_models import TINY, write_drafter
from tests.support.sparse_models import write_target as write_plain

SMALL = Target("llama", 256, 512, 4, 2, 64, 512, layers=2, block=plain_block)


class _Ranges(BaseHTTPRequestHandler):
    """Serves one file and answers ranges; counts what it sent."""

    sent = 0

    def __init__(self, *arguments: object, file: Path) -> None:
        self._file = file
        super().__init__(*arguments)  # type: ignore[arg-type]

    def do_GET(self) -> None:
        size = self._file.stat().st_size
        first, last = 0, size - 1
        asked = self.headers.get("Range")
        if asked:
            begin, _, end = asked.removeprefix("bytes=").partition("-")
            first, last = int(begin), min(int(end) if end else size - 1, size - 1)
        with self._file.open("rb") as file:
            file.seek(first)
            data = file.read(last - first + 1)
        type(self).sent += len(data)
        self.send_response(206 if asked else 200)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("Content-Range", f"bytes {first}-{last}/{size}")
        self.send_header("Accept-Ranges", "bytes")
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        return


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    file = write_target(tmp_path / "target.gguf", TARGETS["qwen3-4b"])
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Ranges, file=file))  # type: ignore[arg-type]
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/target.gguf"
    server.shutdown()


def test_a_remote_file_gives_the_same_plan_as_the_local_one_from_its_header_alone(
    url: str, tmp_path: Path
) -> None:
    settings = Settings(context=4096, on_device=False)
    _Ranges.sent = 0
    far = planning.make_lines(sources.from_gguf(url), None, settings)
    assert far == planning.make_lines(sources.from_gguf(tmp_path / "target.gguf"), None, settings)
    assert _Ranges.sent < (tmp_path / "target.gguf").stat().st_size / 4


def test_a_checkpoint_is_planned_as_it_will_be_after_converting() -> None:
    shipped = folder("models") / "smollm2-135m-dflash2" / "model.safetensors"
    model = sources.drafter_of(shipped, "Q8_0")
    size = sum(tensor.nbytes for tensor in model.tensors.values()) / 2**20
    assert size == pytest.approx(14.98, abs=0.01)
    smaller = sources.drafter_of(shipped, "Q4_0")
    assert sum(tensor.nbytes for tensor in smaller.tensors.values()) < 0.7 * size * 2**20


def test_the_parts_of_a_split_file_are_read_together(tmp_path: Path) -> None:
    whole = write_target(tmp_path / "whole.gguf", SMALL)
    names = list(sources.from_gguf(whole).tensors)
    metadata = _metadata(whole) | {"split.count": Kv.u32(2)}
    for number, part in ((1, names[: len(names) // 2]), (2, names[len(names) // 2 :])):
        tensors = {name: tuple(sources.from_gguf(whole).tensors[name].ne) for name in part}
        write_sparse(tmp_path / f"m-{number:05d}-of-00002.gguf", metadata, tensors, SMALL.weights)
    joined = sources.from_gguf(tmp_path / "m-00001-of-00002.gguf")
    assert set(joined.tensors) == set(names)
    assert joined.tokens == SMALL.vocab


def _metadata(path: Path) -> dict[str, Kv]:
    from dflashcpp.gguf_file import read_header

    return dict(read_header(path).kv)


def test_an_unknown_architecture_is_said_to_be_unknown_and_gets_a_wide_band(tmp_path: Path) -> None:
    file = write_target(tmp_path / "odd.gguf", replace(SMALL, arch="brand-new"))
    made = plan(target=file, flags=("-c", "1024"), device_memory=4096)
    assert any("unknown" in text and "brand-new" in text for text in made.warnings)
    low, high = made.band
    assert low < 0.9 * made.total and high > 1.1 * made.total
    assert {line.origin for line in made.lines if line.kind == "kv"} == {"guess"}
    guessed = {"kv", "kv_swa", "recurrent", "compute", "extraction"}
    assert {line.origin for line in made.lines if line.context == "target" and line.kind in guessed} == {
        "guess"
    }


def test_an_architecture_whose_layers_cannot_be_read_is_warned_about(tmp_path: Path) -> None:
    target = write_target(tmp_path / "t.gguf", replace(SMALL, arch="qwen2", embd=512, heads=8))
    drafter = write_drafter(tmp_path / "d.gguf", replace(TINY, vocab=512), 1)
    made = plan(target=target, drafter=drafter, flags=("-c", "1024"), device_memory=4096)
    assert any("cannot read the layers" in text for text in made.warnings)


def test_an_ordinary_model_is_refused_as_drafter(tmp_path: Path) -> None:
    target = write_target(tmp_path / "t.gguf", SMALL)
    with pytest.raises(DflashError, match="not a DFlash drafter"):
        plan(target=target, drafter=target, device_memory=4096)


def test_a_drafter_is_refused_as_target(tmp_path: Path) -> None:
    drafter = write_drafter(tmp_path / "d.gguf", TINY, 1)
    with pytest.raises(DflashError, match="is a drafter, not a target"):
        plan(target=drafter, device_memory=4096)


def test_a_projector_adds_its_weights_and_an_open_amount_for_images(tmp_path: Path) -> None:
    target = write_target(tmp_path / "t.gguf", SMALL)
    projector = write_target(tmp_path / "mmproj.gguf", replace(SMALL, layers=1))
    without = plan(target=target, flags=("-c", "1024"), device_memory=4096, with_savings=False)
    made = plan(target=target, mmproj=projector, flags=("-c", "1024"), device_memory=4096, with_savings=False)
    exact = sum(tensor.nbytes for tensor in sources.from_gguf(projector).tensors.values()) / 2**20
    assert made.mib("mmproj", "weights") == round(exact, 2)
    low, _ = made.band
    assert low == pytest.approx(without.band[0] + exact, abs=0.05)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(DflashError, match=r"nothing\.gguf"):
        plan(target=tmp_path / "nothing.gguf", device_memory=4096)


def test_a_model_without_a_needed_tensor_is_refused_by_its_name(tmp_path: Path) -> None:
    file = tmp_path / "t.gguf"
    whole = sources.from_gguf(write_target(file, SMALL))
    tensors = {name: tuple(tensor.ne) for name, tensor in whole.tensors.items() if "attn_k" not in name}
    write_sparse(tmp_path / "holed.gguf", _metadata(file), tensors, SMALL.weights)
    with pytest.raises(DflashError, match=r"blk\.0\.attn_k\.weight"):
        plan(target=tmp_path / "holed.gguf", device_memory=4096)


def test_layers_on_the_host_take_their_weights_and_cache_there(tmp_path: Path) -> None:
    target = sources.from_gguf(write_plain(tmp_path / "t.gguf", TINY))
    all_there = planning.make_lines(target, None, Settings(context=1024))
    half = planning.make_lines(target, None, Settings(context=1024, gpu_layers=4))
    for kind in ("weights", "kv"):
        device = sum(line.mib for line in half if (line.kind, line.place) == (kind, "device"))
        host = sum(line.mib for line in half if (line.kind, line.place) == (kind, "host"))
        before = sum(line.mib for line in all_there if line.kind == kind)
        assert device + host == pytest.approx(before)
        assert 0 < device < before
    kv = sum(line.mib for line in half if (line.kind, line.place) == ("kv", "device"))
    assert kv == pytest.approx(sum(line.mib for line in all_there if line.kind == "kv") * 3 / 6)


def test_recurrent_planes_grow_with_every_drafted_token(tmp_path: Path) -> None:
    target = sources.from_gguf(write_target(tmp_path / "t.gguf", TARGETS["qwen3.5-27b"]))
    drafter = sources.from_gguf(
        write_drafter(tmp_path / "d.gguf", replace(TINY, hidden=5120, vocab=248320, target_layers=3), 1)
    )
    sizes = [
        sum(
            line.mib
            for line in planning.make_lines(target, drafter, Settings(context=4096, draft_max=count))
            if line.kind == "recurrent"
        )
        for count in (3, 7, 15)
    ]
    assert [size / sizes[0] for size in sizes] == pytest.approx([1, 2, 4])
