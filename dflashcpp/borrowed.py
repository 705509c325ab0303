"""Tensors copied from the target into the drafter's file, which llama.cpp then takes instead of the target's.

MiMo's drafters need the embedding with another vector for the mask: to change one row, embedding and head
travel byte for byte as the target has them. And any drafter may bring the head in a smaller type: it is
read whole for every draft, and where it is large that is most of the time of a draft.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from dflashcpp.checkpoint import Checkpoint
from dflashcpp.drafter import Drafter
from dflashcpp.errors import DflashError
from dflashcpp.gguf_file import Header, TensorInfo, TensorType, read_header
from dflashcpp.progress import Progress, Task

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
    type: TensorType | None = None  # the type it gets, None: its own

    @property
    def recoded(self) -> bool:
        """Whether its numbers are read and written anew."""
        return self.type is not None and self.type != self.info.type

    def choice(self) -> Choice:
        """The tensor as `choose_types` would list it: its type is decided."""
        from dflashcpp.quantize import Choice

        kind = TensorType(self.info.type) if self.type is None else self.type
        return Choice(self.name, self.info.ne, kind, kind, quantisable=False)


def borrow(
    checkpoint: Checkpoint, drafter: Drafter, target_source: str, head_type: str | None = None
) -> tuple[Drafter, list[Borrowed]]:
    """What is copied from the target: for a mask embedding, and the head when it is wanted in `head_type`.

    Raises DflashError when the target is not a complete GGUF on this machine, or the head cannot be had
    in that type.
    """
    masked = checkpoint.mask_embedding is not None and not drafter.own_embedding
    if not masked and head_type is None:
        return drafter, []
    if head_type is not None and (drafter.own_head or drafter.own_embedding):
        raise DflashError(f"{checkpoint.path} brings a head of its own: --head is for the target's")
    if not Path(target_source).is_file():
        mask = "brings its own vector for the mask token (mask_embedding.pt)"
        wants = mask if masked else "is to get the target's head"
        raise DflashError(
            f"{checkpoint.path} {wants}: that is copied from the target, so its GGUF must be on this machine",
            hint="pass it with --target FILE.gguf",
        )
    header = read_header(target_source)
    embedding = _tensor(header, _EMBEDDING)
    head = header.tensors.get(_HEAD, embedding)
    copies = [Borrowed(_EMBEDDING, header, embedding, drafter.mask_token_id)] if masked else []
    copies.append(Borrowed(_HEAD, header, head, type=_head_type(head, head_type)))
    return replace(drafter, own_embedding=drafter.own_embedding or masked, own_head=True), copies


def _head_type(head: TensorInfo, name: str | None) -> TensorType | None:
    """The type of that name; DflashError when the head's rows do not fit its blocks."""
    from dflashcpp.gguf_file import block_size
    from dflashcpp.quantize import tensor_type

    if name is None:
        return None
    kind = tensor_type(name, f"--head {name}")
    if head.ne[0] % block_size(kind):
        raise DflashError(
            f"--head {name}: rows of {head.ne[0]} are no multiple of its blocks of {block_size(kind)}",
            hint="take Q4_0, Q8_0 or BF16",
        )
    return kind


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
            if item.recoded:
                _recode(item, writer, library, task)
                continue
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


def _recode(item: Borrowed, writer: GgufWriter, library: LibGgml | None, task: Task) -> None:
    """The rows of the target's tensor in another type."""
    import numpy as np

    from dflashcpp.gguf_file import row_bytes
    from dflashcpp.quantize import decode, encode

    length, count = item.info.ne[:2]
    kind, old = item.type or item.info.type, row_bytes(item.info.type, length)
    step = max(1, _CHUNK // (4 * length))
    with Path(item.header.source).open("rb") as file:
        file.seek(item.header.data_start + item.info.offset)
        for start in range(0, count, step):
            data = np.frombuffer(file.read(min(step, count - start) * old), np.uint8).reshape(-1, old)
            rows = decode(item.info.type, data, f"{item.header.source}: tensor {item.info.name}")
            writer.write(item.name, start * row_bytes(kind, length), encode(kind, rows, library).tobytes())
            task.advance(data.nbytes)


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
    """Whether encoding the mask's row, or the head anew, takes libggml."""
    from dflashcpp.gguf_file import is_quantised

    kinds = [item.info.type for item in copies if item.row is not None]
    kinds += [item.type for item in copies if item.type is not None and item.recoded]
    return any(is_quantised(kind) for kind in kinds)
