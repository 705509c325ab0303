"""Progress of long work, told to whoever wants to show it.

Library functions take a `Progress` and call `task`; this base class shows nothing. The command
line passes one that draws bars on stderr (`dflashcpp.cli._output`).
"""

from __future__ import annotations

from types import TracebackType


class Task:
    """One long step. Use it as a context manager; `advance` may be called from any thread."""

    def advance(self, amount: int = 1) -> None:
        """`amount` more units (bytes, files, tensors ...) are done."""

    def total(self, amount: int) -> None:
        """The whole is now known to be `amount` units."""

    def note(self, text: str) -> None:
        """What is being worked on right now."""

    def __enter__(self) -> Task:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None


class Progress:
    """Shows nothing; subclasses show something."""

    def task(self, label: str, total: int | None = None, unit: str = "steps") -> Task:
        """Begin a step. `unit` is `bytes` (shown as MiB and MiB/s) or a plural noun."""
        return Task()

    def say(self, text: str) -> None:
        """One line of talk for a person (stderr)."""


SILENT = Progress()
