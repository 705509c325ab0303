"""Writing a GGUF file: laid out beforehand, filled from any thread, there under its name only when complete.

Layout: llama.cpp ggml/src/gguf.cpp (`gguf_write_out`), commit 0c1e570.
"""

from __future__ import annotations

import errno
import hashlib
import os
import secrets
import shutil
import struct
import threading
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from dflashcpp.errors import DflashError
from dflashcpp.gguf_file.header import Header, Kv, TensorInfo
from dflashcpp.gguf_file.parse import DEFAULT_ALIGNMENT, MAX_DIMS, MAX_NAME
from dflashcpp.gguf_file.signals import StopSignals
from dflashcpp.gguf_file.types import tensor_bytes

_LIMITS = {
    errno.EDQUOT: "the disk quota is used up",
    errno.EFBIG: "the file system or `ulimit -f` allows no file of that size",
}
_PART_START, _PART_END = ".dflashcpp-", ".partial"
_MARGIN = 1 << 20  # bytes beside the file itself that the disk must have


class GgufWriter:
    """One GGUF file in the making. Use it as a context manager:

        with GgufWriter(path) as out:
            out.add("general.architecture", Kv.string("dflash"))
            out.declare("fc.weight", (5120, 1024), TensorType.Q4_K)
            out.begin()
            out.write("fc.weight", 0, data)     # any thread, any order
            out.commit()

    Until `commit` the bytes stand in a hidden file beside `path`. Leaving the block without `commit`
    (an error, Ctrl-C, SIGTERM) removes it, and a file that was there before stays as it was. What a
    killed process left behind is removed by the next `begin` in the same folder.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(os.path.realpath(path))  # a link keeps pointing at the new file
        self._kv: dict[str, Kv] = {}
        self._tensors: dict[str, TensorInfo] = {}
        self._end = 0  # bytes of data declared so far, padded
        self._written: dict[str, int] = {}
        self._header = b""
        self._fd: int | None = None
        self._part: Path | None = None
        self._busy = 0
        self._calm = threading.Condition()
        self._signals = StopSignals()

    # -- what goes in ---------------------------------------------------------------------------------

    def add(self, key: str, value: Kv) -> None:
        """A metadata value; each key once."""
        self._still_open_for_declarations()
        if key == "general.alignment" and value.value != DEFAULT_ALIGNMENT:
            raise DflashError(f"{self.path}: only an alignment of {DEFAULT_ALIGNMENT} is written")
        if not key or key in self._kv:
            raise DflashError(
                f"{self.path}: the metadata key {key!r} " + ("is set twice" if key else "is empty")
            )
        self._kv[key] = value

    def declare(self, name: str, ne: Sequence[int], kind: int) -> None:
        """A tensor of ggml shape `ne` (row length first); the order of calls is the order in the file."""
        self._still_open_for_declarations()
        if name in self._tensors:
            raise DflashError(f"{self.path}: the tensor {name} is declared twice")
        if not name or len(name.encode()) >= MAX_NAME:
            raise DflashError(f"{self.path}: a tensor name has 1 to {MAX_NAME - 1} bytes: {name!r}")
        if not 1 <= len(ne) <= MAX_DIMS or min(ne) < 1:
            raise DflashError(f"{self.path}: tensor {name} has an impossible shape {list(ne)}")
        try:
            size = tensor_bytes(kind, ne)
        except DflashError as error:
            raise DflashError(f"{self.path}: tensor {name}: {error.message}") from None
        self._tensors[name] = TensorInfo(name, tuple(ne), int(kind), self._end, size)
        self._end = _padded(self._end + size)

    @property
    def header(self) -> Header:
        """What a reader will find: for reports before anything is written."""
        encoded = self._header or self._encode()
        return Header(
            str(self.path), 3, dict(self._kv), dict(self._tensors), len(encoded), len(encoded) + self._end
        )

    # -- the file -------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Check the room on disk, make the hidden file, write the header. No declarations after this."""
        self._still_open_for_declarations()
        self._header = self._encode()
        check_place(self.path)
        _remove_leftovers(self.path.parent)
        self._check_room()
        self._signals.catch()
        self._open_part()
        assert self._fd is not None
        self._guarded(os.ftruncate, self._fd, self._size)
        self._put(self._header, 0)

    def write(self, name: str, offset: int, data: Any) -> None:
        """Bytes of tensor `name` from byte `offset` on; `data` is any contiguous buffer. Thread-safe."""
        info = self._tensors[name]
        view = memoryview(data).cast("B")
        if offset < 0 or offset + view.nbytes > info.nbytes:
            raise DflashError(
                f"{self.path}: tensor {name} has {info.nbytes} bytes; "
                f"{view.nbytes} at offset {offset} do not fit"
            )
        self._put(view, len(self._header) + info.offset + offset)
        with self._calm:
            self._written[name] = self._written.get(name, 0) + view.nbytes

    def commit(self) -> None:
        """Everything is written: flush to disk and give the file its name, replacing an older one."""
        missing = [n for n, info in self._tensors.items() if self._written.get(n, 0) != info.nbytes]
        if missing:
            raise DflashError(f"{self.path}: not all bytes were written of: {', '.join(missing[:8])}")
        assert self._fd is not None and self._part is not None
        self._guarded(os.fsync, self._fd)
        self._close()
        self._guarded(os.replace, self._part, self.path)
        self._part = None
        _sync_folder(self.path.parent)
        self._signals.release()

    def abandon(self) -> None:
        """Remove the hidden file. Safe to call at any time, also after `commit`."""
        self._close()
        if self._part is not None:
            self._part.unlink(missing_ok=True)
            self._part = None
        self._signals.release()

    def __enter__(self) -> GgufWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abandon()

    # -- inside ---------------------------------------------------------------------------------------

    @property
    def _size(self) -> int:
        return len(self._header) + self._end

    def _still_open_for_declarations(self) -> None:
        if self._header:
            raise DflashError(f"{self.path}: the file is already laid out")

    def _encode(self) -> bytes:
        parts = [b"GGUF", struct.pack("<IQQ", 3, len(self._tensors), len(self._kv))]
        for key, value in self._kv.items():
            parts += [_text(key), value.encoded()]
        for info in self._tensors.values():
            parts.append(_text(info.name))
            parts.append(struct.pack(f"<I{len(info.ne)}QIQ", len(info.ne), *info.ne, info.type, info.offset))
        joined = b"".join(parts)
        return joined.ljust(_padded(len(joined)), b"\0") if self._tensors else joined

    def _check_room(self) -> None:
        free = shutil.disk_usage(self.path.parent).free
        if free < self._size + _MARGIN:
            raise self._no_room(free)

    def _no_room(self, free: int) -> DflashError:
        return DflashError(
            f"{self.path}: no room: the file needs {self._size / 2**20:.1f} MiB, "
            f"{self.path.parent} has {free / 2**20:.1f} MiB free",
            hint="free some space or choose another place with -o",
        )

    def _open_part(self) -> None:
        """A hidden file, locked. Between its birth and its lock another process may take it for a leftover
        and remove it; then there is another one. Its name is kept before it is born: a signal that comes
        right after must still find what to remove."""
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
        while self._fd is None:
            self._part = self.path.parent / (_part_prefix(self.path) + secrets.token_hex(8) + _PART_END)
            fd = self._guarded(os.open, self._part, flags, 0o666)
            _lock(fd, wait=True)
            if os.fstat(fd).st_nlink:
                self._fd = fd
            else:
                os.close(fd)

    def _put(self, data: Any, at: int) -> None:
        with self._calm:
            if self._fd is None:
                raise DflashError(f"{self.path}: the file is not open for writing")
            fd = self._fd
            self._busy += 1
        try:
            view = memoryview(data)
            while view:
                done = self._guarded(os.pwrite, fd, view, at)
                view, at = view[done:], at + done
        finally:
            with self._calm:
                self._busy -= 1
                self._calm.notify_all()

    def _guarded(self, call: Any, *arguments: Any) -> Any:
        """A system call whose failure becomes a sentence."""
        try:
            return call(*arguments)
        except OSError as error:
            if error.errno == errno.ENOSPC:
                raise self._no_room(shutil.disk_usage(self.path.parent).free) from None
            if error.errno in _LIMITS:
                why = f"{_LIMITS[error.errno]}; it needs {self._size / 2**20:.1f} MiB"
                raise DflashError(f"{self.path} cannot be written: {why}") from None
            raise DflashError(f"{self.path} cannot be written: {error.strerror}") from None

    def _close(self) -> None:
        """Close once no thread is writing: a closed descriptor's number may become another file's."""
        with self._calm:
            fd, self._fd = self._fd, None
            self._calm.wait_for(lambda: self._busy == 0)
        if fd is not None:
            os.close(fd)


def check_place(path: Path) -> Path:
    """`path` without links, where a file can be made or replaced; DflashError says why not."""
    real = Path(os.path.realpath(path))
    try:
        if not real.parent.is_dir():
            raise DflashError(
                f"{path}: the folder {real.parent} does not exist", hint=f"mkdir -p {real.parent}"
            )
        if real.is_dir():
            raise DflashError(f"{path} is a folder; give the name of a file")
        if real.exists() and not real.is_file():
            raise DflashError(
                f"{path} is no ordinary file and would be replaced", hint="give the name of a file"
            )
    except OSError as error:
        raise DflashError(f"{path} cannot be written: {error.strerror}") from None
    if not os.access(real.parent, os.W_OK):
        raise DflashError(
            f"{path} cannot be written: no permission for the folder {real.parent}",
            hint="choose another place with -o",
        )
    return real


def _text(text: str) -> bytes:
    data = text.encode("utf-8", "surrogateescape")
    return struct.pack("<Q", len(data)) + data


def _padded(size: int) -> int:
    return -(-size // DEFAULT_ALIGNMENT) * DEFAULT_ALIGNMENT


def _part_prefix(path: Path) -> str:
    return f"{_PART_START}{hashlib.sha256(path.name.encode(errors='surrogateescape')).hexdigest()[:12]}-"


def _lock(fd: int, *, wait: bool = False) -> bool:
    """Mark the hidden file as in use; False when another process has it (or locks are not to be had)."""
    try:
        import fcntl
    except ImportError:  # Windows: leftovers stay until the user removes them
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError:
        return False
    return True


def _remove_leftovers(folder: Path) -> None:
    """Hidden files of any name whose process is gone (kill -9, power cut): nobody holds their lock."""
    for old in folder.glob(f"{_PART_START}*{_PART_END}"):
        try:
            fd = os.open(old, os.O_RDWR)
        except OSError:
            continue
        try:
            if _lock(fd):
                old.unlink(missing_ok=True)
        finally:
            os.close(fd)


def _sync_folder(folder: Path) -> None:
    """Make the new name itself durable, where folders can be synced."""
    try:
        fd = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(fd)
    except OSError:
        pass
    finally:
        os.close(fd)
