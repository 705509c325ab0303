"""What the fuzzer and the corpus test feed with bytes: the readers that take any file.

A target returns when the bytes were read or refused with a DflashError whose sentence can be printed.
Anything else (another exception, a crash, a hang, memory out of proportion) is a fault.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Callable
from pathlib import Path

from dflashcpp.errors import DflashError


class _Bytes:
    """A GGUF source in memory."""

    def __init__(self, data: bytes) -> None:
        self.name, self.size, self._data = "input.gguf", len(data), data

    def upto(self, end: int) -> bytes:
        assert 0 <= end <= self.size, "read beyond the file"
        return self._data[: max(end, 64)]


def gguf_header(data: bytes) -> None:
    """A header and every value in it, decoded; then what makes a drafter and a dialect of it."""
    from dflashcpp.dialects import detect, translate
    from dflashcpp.gguf_file.parse import parse
    from dflashcpp.inspection import inspect_gguf

    header = parse(_Bytes(data))
    for value in header.kv.values():
        _ = value.value
    with _refusal():
        found = inspect_gguf(header)
        json.dumps(found.to_dict(), default=str).encode()
    dialect = detect(header)
    if dialect is not None:
        translate(header, dialect)


def safetensors_header(data: bytes) -> None:
    """One .safetensors file."""
    from dflashcpp.checkpoint.safetensors_file import read_safetensors

    path = _folder() / "one" / "model.safetensors"
    path.write_bytes(data)
    read_safetensors(path)


def index(data: bytes) -> None:
    """model.safetensors.index.json beside two good shards."""
    from dflashcpp.checkpoint.files import locate

    folder = _folder() / "sharded"
    (folder / "model.safetensors.index.json").write_bytes(data)
    locate(folder)


def config(data: bytes) -> None:
    """config.json beside good weights, up to the drafter."""
    from dflashcpp.checkpoint import open_checkpoint

    folder = _folder() / "checkpoint"
    (folder / "config.json").write_bytes(data)
    with open_checkpoint(folder) as checkpoint:
        json.dumps(checkpoint.drafter.to_dict()).encode()


READERS: dict[str, Callable[[bytes], None]] = {
    "gguf": gguf_header,
    "safetensors": safetensors_header,
    "index": index,
    "config": config,
}


def _guarded(reader: Callable[[bytes], None]) -> Callable[[bytes], None]:
    def target(data: bytes) -> None:
        with _refusal():
            reader(data)

    return target


TARGETS = {name: _guarded(reader) for name, reader in READERS.items()}


class _refusal(contextlib.AbstractContextManager[None]):
    """Swallows a DflashError, after making sure that a terminal can show it."""

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if not isinstance(error, DflashError):
            return False
        (error.message + (error.hint or "")).encode()
        assert len(error.message) < 20_000, "a sentence of no sensible length"
        return True


_made: list[tempfile.TemporaryDirectory[str]] = []


def _folder() -> Path:
    """A folder in memory where there is one, with the good files the targets need."""
    if not _made:
        memory = Path("/dev/shm")
        made = tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None, prefix="dflashcpp-fuzz-")
        _made.append(made)
        _fill(Path(made.name))
    return Path(_made[0].name)


def _fill(folder: Path) -> None:
    from tests.support.checkpoints import t1, write_checkpoint

    small = t1(hidden_size=32, intermediate_size=32, num_attention_heads=2, head_dim=16, vocab_size=64)
    small["dflash_config"]["mask_token_id"] = 50
    (folder / "one").mkdir()
    write_checkpoint(folder / "checkpoint", small)
    write_checkpoint(folder / "sharded", small, shards=("model-1.safetensors", "model-2.safetensors"))
    _good["index"] = (folder / "sharded" / "model.safetensors.index.json").read_bytes()
    _good["config"] = (folder / "checkpoint" / "config.json").read_bytes()


def seeds(name: str) -> list[bytes]:
    """Good inputs to begin with; the corpus of found cases is added by the caller."""
    folder = _folder()
    if name == "gguf":
        return [_small_gguf("dflash"), _small_gguf("dflash-draft")]
    if name == "safetensors":
        data = (folder / "checkpoint" / "model.safetensors").read_bytes()
        end = 8 + int.from_bytes(data[:8], "little")
        return [_small_safetensors(), data[:end]]
    if name == "index":
        return [_good["index"]]
    return [_good["config"], _v2_config()]


_good: dict[str, bytes] = {}  # files that targets write over, as they were


def _v2_config() -> bytes:
    from tests.support.checkpoints import t1_v2

    return json.dumps(t1_v2()).encode()


def _small_safetensors() -> bytes:
    header = json.dumps({"a": {"dtype": "BF16", "shape": [2, 2], "data_offsets": [0, 8]}}).encode()
    return len(header).to_bytes(8, "little") + header + bytes(8)


def _small_gguf(arch: str) -> bytes:
    from dflashcpp.gguf_file import GgufWriter, Kv, ValueType
    from tests.support.gguf_drafters import Shape, metadata, tensors

    shape = Shape(hidden=32, ffn=32, heads=2, kv_heads=1, head_dim=16, layers=1, taps=1, vocab=8, rank=32)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "x.gguf")
        with GgufWriter(path) as out:
            for key, value in metadata(shape).items():
                foreign = key.replace("dflash.", f"{arch}.", 1) if key.startswith("dflash.") else key
                out.add(foreign, Kv.string(arch) if key == "general.architecture" else value)
            out.add("tokenizer.ggml.tokens", Kv.array(ValueType.STRING, list("abcdefgh")))
            out.add("tokenizer.ggml.mask_token_id", Kv.u32(7))
            out.add(f"{arch}.dflash.target_layer_ids", Kv.array(ValueType.INT32, [1]))
            for info in tensors(shape)[:6]:
                out.declare(info.name, info.ne, info.type)
            out.begin()
            for info in out.header.tensors.values():
                out.write(info.name, 0, bytes(info.nbytes))
            out.commit()
        return path.read_bytes()
