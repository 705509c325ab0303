"""Tensors copied from the target: MiMo's drafters need its embedding with another vector for the mask.

llama.cpp takes embedding and head from the target unless the drafter has both, so to change one row
both travel in the drafter's file, byte for byte as the target has them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from dflashcpp.checkpoint import Checkpoint
from dflashcpp.drafter import Drafter
from dflashcpp.errors import DflashError
from dflashcpp.gguf_file import Header, TensorInfo, read_header
from dflashcpp.progress import Progress

if TYPE_CHECKING:
    from dflashcpp.gguf_file import GgufWriter
    from dflashcpp.quantize import Choice, LibGgml

_EMBEDDING, _HEAD = "token_embd.weight", "output.weight"
_CHUNK = 8 << 20


@dataclass(frozen=True)
class Borrowed:
    """One tensor of the target's GGUF under the name it gets in the drafter's."""

    name: str
    header: Header
    info: TensorInfo
    row: int | None = None  # the row that is replaced by the mask embedding

    def choice(self) -> Choice:
        """The tensor as `choose_types` would list it: its type stays."""
        from dflashcpp.gguf_file import TensorType
        from dflashcpp.quantize import Choice

        kind = TensorType(self.info.type)
        return Choice(self.name, self.info.ne, kind, kind, quantisable=False)


def borrow(checkpoint: Checkpoint, drafter: Drafter, target_source: str) -> tuple[Drafter, list[Borrowed]]:
    """What must be copied from the target for a checkpoint with a mask embedding; else nothing.

    Raises DflashError when the target is not a complete GGUF on this machine.
    """
    if checkpoint.mask_embedding is None or drafter.own_embedding:
        return drafter, []
    if not Path(target_source).is_file():
        raise DflashError(
            f"{checkpoint.path} brings its own vector for the mask token (mask_embedding.pt): the target's "
            "embedding and head must be copied, so its GGUF must be on this machine",
            hint="pass it with --target FILE.gguf",
        )
    header = read_header(target_source)
    embedding = _tensor(header, _EMBEDDING)
    head = header.tensors.get(_HEAD, embedding)
    copies = [
        Borrowed(_EMBEDDING, header, embedding, drafter.mask_token_id),
        Borrowed(_HEAD, header, head),
    ]
    return replace(drafter, own_embedding=True, own_head=True), copies


def _tensor(header: Header, name: str) -> TensorInfo:
    found = header.tensors.get(name)
    if found is None:
        raise DflashError(f"{header.source} has no tensor {name}", hint="take the first file of a split GGUF")
    return found


def copy(
    copies: list[Borrowed],
    checkpoint: Checkpoint,
    writer: GgufWriter,
    library: LibGgml | None,
    progress: Progress,
) -> None:
    """Write the borrowed tensors, the mask's row re-encoded in the tensor's own type."""
    with progress.task("copying from the target", sum(item.info.nbytes for item in copies), "bytes") as task:
        for item in copies:
            rows = item.info.nbytes // item.info.ne[1]
            patch = _mask_row(item, checkpoint, library)
            with Path(item.header.source).open("rb") as file:
                file.seek(item.header.data_start + item.info.offset)
                step = max(1, _CHUNK // rows) * rows
                for start in range(0, item.info.nbytes, step):
                    data = bytearray(file.read(min(step, item.info.nbytes - start)))
                    _apply(data, start, rows, item.row, patch)
                    writer.write(item.name, start, data)
                    task.advance(len(data))


def _mask_row(item: Borrowed, checkpoint: Checkpoint, library: LibGgml | None) -> bytes:
    from dflashcpp.quantize import encode

    if item.row is None or checkpoint.mask_embedding is None:
        return b""
    return encode(item.info.type, checkpoint.mask_embedding.reshape(1, -1), library).tobytes()


def _apply(data: bytearray, start: int, row_bytes: int, row: int | None, patch: bytes) -> None:
    if row is None:
        return
    at = row * row_bytes - start
    if 0 <= at < len(data):
        data[at : at + row_bytes] = patch


def needs_library(copies: list[Borrowed]) -> bool:
    """Whether re-encoding the mask's row takes libggml."""
    from dflashcpp.gguf_file import is_quantised

    return any(item.row is not None and is_quantised(item.info.type) for item in copies)
