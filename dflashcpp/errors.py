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
        self.message = _printable(message)
        self.hint = hint if hint is None else _printable(hint)


class UsageError(DflashError):
    """The command was called with arguments that cannot mean anything; exit code 2."""

    exit_code = 2


def _printable(text: str) -> str:
    """Names out of files may hold what no terminal takes (lone surrogates); shown as `\\udc80`."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")
