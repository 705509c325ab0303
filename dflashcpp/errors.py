"""What goes wrong, said so that the reader knows what to do next."""

from __future__ import annotations


class DflashError(Exception):
    """A failure with one clear sentence and, where there is one, the next step.

    `message` names the file, tensor or key and what was expected; `hint` says what to do.
    The command line prints both and exits with `exit_code`.
    """

    exit_code = 1

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class UsageError(DflashError):
    """The command was called with arguments that cannot mean anything; exit code 2."""

    exit_code = 2
