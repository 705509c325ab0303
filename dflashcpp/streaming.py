"""Weights from checkpoint to GGUF in chunks of rows, on all cores, with bounded memory."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dflashcpp.checkpoint import Checkpoint, SourceTensor
from dflashcpp.errors import DflashError
from dflashcpp.progress import Progress, Task

if TYPE_CHECKING:
    import numpy as np

    from dflashcpp.gguf_file import GgufWriter
    from dflashcpp.quantize import Choice, LibGgml

CHUNK = 2 << 20  # numbers at once: 8 MiB as float32, per thread
_OVERFLOW = {"F16": 65520.0, "BF16": 3.3961775e38}  # from here on rounding gives infinity
_LARGEST = {"F16": "65504", "BF16": "3.3895e38"}
_SCALES_HOLD = 65504.0  # quantised blocks have F16 scales: below this no scale overflows


@dataclass(frozen=True)
class _Item:
    tensor: SourceTensor
    start: int
    stop: int


def stream(
    checkpoint: Checkpoint,
    choices: dict[str, Choice],
    writer: GgufWriter,
    library: LibGgml | None,
    threads: int,
    progress: Progress,
) -> None:
    """Read, check, quantise and write every tensor of `checkpoint` into the begun `writer`.

    Raises the first error of any thread once all have stopped; Ctrl-C stops them too.
    """
    total = sum(tensor.nbytes for tensor in checkpoint.tensors.values())
    with progress.task("converting", total, "bytes") as task:
        _Pool(checkpoint, choices, writer, library, task).run(max(1, threads))


class _Pool:
    """Threads that take chunks in file order until none is left or one has failed."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        choices: dict[str, Choice],
        writer: GgufWriter,
        library: LibGgml | None,
        task: Task,
    ) -> None:
        self.checkpoint, self.choices, self.writer, self.library, self.task = (
            checkpoint,
            choices,
            writer,
            library,
            task,
        )
        self._items = _items(checkpoint)
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._error: BaseException | None = None

    def run(self, threads: int) -> None:
        workers = [threading.Thread(target=self._work, daemon=True) for _ in range(threads)]
        for worker in workers:
            worker.start()
        try:
            for worker in workers:
                while worker.is_alive():
                    worker.join(0.2)  # short, so that Ctrl-C and SIGTERM get through
        finally:
            self._stop.set()
            for worker in workers:
                worker.join()
        if self._error is not None:
            raise self._error

    def _work(self) -> None:
        while not self._stop.is_set():
            with self._lock:
                item = next(self._items, None)
            if item is None:
                return
            try:
                self._convert(item)
            except BaseException as error:
                self._error = self._error or error
                self._stop.set()

    def _convert(self, item: _Item) -> None:
        from dflashcpp.gguf_file import is_quantised
        from dflashcpp.quantize import encode

        tensor, choice = item.tensor, self.choices[item.tensor.name]
        self.task.note(tensor.name)
        if tensor.store == "i64":
            self.writer.write(tensor.name, 0, tensor.made)
            return
        rows = self.checkpoint.read_rows(tensor.name, item.start, item.stop)
        check_numbers(rows, tensor, item.start, choice.type.name)
        data = encode(choice.type, rows, self.library)
        if is_quantised(choice.type):
            check_scales(rows, data, tensor, item.start, choice.type)
        self.writer.write(tensor.name, item.start * data.shape[1], data)
        self.task.advance(tensor.nbytes * (item.stop - item.start) // max(tensor.rows, 1))


def _items(checkpoint: Checkpoint) -> Iterator[_Item]:
    """Chunks in the order of the source's bytes, so that the disk is read forward."""
    tensors = sorted(checkpoint.tensors.values(), key=lambda tensor: (os.fspath(tensor.file), tensor.offset))
    for tensor in tensors:
        step = max(1, CHUNK // tensor.columns)
        if tensor.interleaved_heads:
            step = max(step // tensor.interleaved_heads, 1) * tensor.interleaved_heads
        for start in range(0, tensor.rows, step):
            yield _Item(tensor, start, min(start + step, tensor.rows))


def check_numbers(rows: np.ndarray, tensor: SourceTensor, first: int, kind: str) -> None:
    """Raise DflashError naming tensor and index of a NaN, an infinity, or what F16 cannot hold."""
    import numpy as np

    if rows.size == 0:
        return
    largest = max(float(rows.max()), -float(rows.min()))
    limit = _OVERFLOW.get(kind, float("inf"))
    if largest < limit:  # false for NaN too
        return
    bad = ~(np.abs(rows) < limit)
    row, column = (int(number) for number in np.argwhere(bad)[0])
    value = float(rows[row, column])
    where = _index(tensor, first + row, column)
    if np.isfinite(value):
        raise _too_large(tensor, where, value, f"{kind} cannot hold ({_LARGEST[kind]} at most)")
    raise DflashError(
        f"{tensor.source_name}{where} is {value}: the checkpoint {tensor.file} is damaged",
        hint="download it again; if its publisher's file is like that, no engine can run it",
    )


def check_scales(rows: np.ndarray, data: np.ndarray, tensor: SourceTensor, first: int, kind: int) -> None:
    """Raise DflashError naming the number that made a block's F16 scale overflow, so that it reads back
    as infinity or NaN. Only chunks with numbers that large are looked at."""
    import numpy as np

    from dflashcpp.gguf_file import TensorType

    if rows.size == 0 or max(float(rows.max()), -float(rows.min())) < _SCALES_HOLD:
        return
    back = _read_back(data, kind)
    bad = np.abs(rows) >= _SCALES_HOLD if back is None else ~np.isfinite(back.reshape(rows.shape))
    if not bad.any():
        return
    row, column = np.unravel_index(np.argmax(np.where(bad, np.abs(rows), -1.0)), rows.shape)
    where = _index(tensor, first + int(row), int(column))
    why = f"a block of {TensorType(kind).name} cannot hold"
    raise _too_large(tensor, where, float(rows[row, column]), why)


def _read_back(data: np.ndarray, kind: int) -> np.ndarray | None:
    """What the blocks say, as float32; None for a type that gguf-py cannot read."""
    import numpy as np
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    try:
        with np.errstate(all="ignore"):
            return dequantize(data, GGMLQuantizationType(int(kind)))
    except (ValueError, NotImplementedError):
        return None


def _too_large(tensor: SourceTensor, where: str, value: float, why: str) -> DflashError:
    return DflashError(
        f"{tensor.file}: {tensor.source_name}{where} is {value:g}, which {why}",
        hint="convert with -q F32, or give this tensor another type with --tensor-type",
    )


def _index(tensor: SourceTensor, row: int, column: int) -> str:
    """`[row, column]` in the tensor's own dimensions."""
    import numpy as np

    lead = (
        [int(number) for number in np.unravel_index(row, tensor.shape[:-1])] if len(tensor.shape) > 1 else []
    )
    return str([*lead, column])
