"""The beginning of a local file, read in growing steps."""

from __future__ import annotations

import os
from pathlib import Path
from types import TracebackType

from dflashcpp.errors import DflashError

_FIRST = 1 << 20  # bytes; the header of a file without a large vocabulary


class LocalSource:
    """A local file for `parse`; use it as a context manager. DflashError when it cannot be read."""

    def __init__(self, path: Path) -> None:
        self.name = str(path)
        if path.is_dir():
            raise DflashError(f"{path} is a folder; a GGUF file was expected")
        try:
            self._file = path.open("rb", buffering=0)
        except FileNotFoundError:
            raise DflashError(f"{path} does not exist") from None
        except OSError as error:
            raise DflashError(f"{path} cannot be read: {error.strerror}") from None
        self.size = os.fstat(self._file.fileno()).st_size
        self._data = bytearray()

    def upto(self, end: int) -> bytearray:
        """At least the first `end` bytes; reads twice as much each time it has to read."""
        goal = min(self.size, max(end, _FIRST, 2 * len(self._data)))
        while len(self._data) < goal:
            try:
                piece = self._file.read(goal - len(self._data))
            except OSError as error:
                raise DflashError(f"{self.name} cannot be read: {error.strerror}") from None
            if not piece:
                raise DflashError(f"{self.name} became shorter while it was read")
            self._data += piece
        return self._data

    def __enter__(self) -> LocalSource:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
