"""Log files of servers: where they are, how they are kept small, how they are followed.

The server writes to the file itself (opened for appending), so nothing of ours can hold it up; to rotate, the
file is copied and then cut to nothing, and the server goes on at its beginning.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

MAX_BYTES = 16 * 2**20
KEEP = 3


def rotate(log: Path, *, keep: int = KEEP) -> None:
    """Move `log` aside as `log.1`, `log.1` as `log.2` ...; the oldest goes. For a log nobody writes to."""
    if not log.exists() or log.stat().st_size == 0:
        return
    _shift(log, keep)
    log.replace(_numbered(log, 1))


def rotate_live(log: Path, *, limit: int = MAX_BYTES, keep: int = KEEP) -> bool:
    """Copy a log that a server is writing to and cut it, when it is larger than `limit` bytes."""
    try:
        if log.stat().st_size <= limit:
            return False
        _shift(log, keep)
        shutil.copyfile(log, _numbered(log, 1))
        os.truncate(log, 0)
    except OSError:
        return False  # the disk is full or the file gone: serving matters more than its log
    return True


def _numbered(log: Path, number: int) -> Path:
    return log.with_name(f"{log.name}.{number}")


def _shift(log: Path, keep: int) -> None:
    _numbered(log, keep).unlink(missing_ok=True)
    for number in range(keep - 1, 0, -1):
        older = _numbered(log, number)
        if older.exists():
            older.replace(_numbered(log, number + 1))


def follow(log: Path, *, start: int = 0, over: Callable[[], bool], every: float = 0.1) -> Iterator[str]:
    """Lines of a growing log from byte `start`, across rotations, until `over()` and nothing is left."""
    position, rest = start, b""
    while True:
        ending = over()
        size = log.stat().st_size if log.exists() else 0
        if size < position:
            position, rest = 0, b""
        if size > position:
            with log.open("rb") as file:
                file.seek(position)
                chunk = file.read()
            position += len(chunk)
            *lines, rest = (rest + chunk).split(b"\n")
            yield from (line.decode("utf-8", errors="replace") for line in lines)
        elif ending:
            if rest:
                yield rest.decode("utf-8", errors="replace")
            return
        else:
            time.sleep(every)
