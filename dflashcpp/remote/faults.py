"""From OpenSSH's stderr to what is wrong and what to do; the texts are in faults.toml."""

from __future__ import annotations

import functools
import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dflashcpp.errors import DflashError

_HARMLESS = re.compile(
    r"^(Warning: Permanently added|debug\d:|Authenticated to|Transferred:|\s*$)", re.IGNORECASE
)
_NOTHING_LISTENS = re.compile(r"channel \d+: open failed: connect failed:", re.IGNORECASE)


@dataclass(frozen=True)
class Fault:
    """A fault of the connection: its state, in words, and whether trying again can help."""

    state: str
    message: str
    hint: str
    lasting: bool
    said: str = ""

    @property
    def sentence(self) -> str:
        """What is wrong, with ssh's own last words."""
        return f"{self.message} (ssh: {self.said})" if self.said else self.message


class FaultError(DflashError):
    """A fault of the connection, raised."""

    def __init__(self, fault: Fault) -> None:
        super().__init__(f"{fault.state}: {fault.sentence}", hint=fault.hint or None)
        self.fault = fault


@dataclass(frozen=True)
class _Row:
    state: str
    pattern: re.Pattern[str]
    message: str
    hint: str
    lasting: bool
    when: str | None


@functools.cache
def _rows() -> tuple[_Row, ...]:
    with Path(__file__).with_name("faults.toml").open("rb") as file:
        rows = tomllib.load(file)["fault"]
    return tuple(
        _Row(
            row["state"],
            re.compile(row["pattern"], re.IGNORECASE),
            row["message"],
            row["hint"],
            row.get("lasting", False),
            row.get("when"),
        )
        for row in rows
    )


def classify(
    lines: Sequence[str], *, host: str, local_port: int = 0, remote_port: int = 0, connected: bool = False
) -> Fault | None:
    """The fault that `lines` of ssh's stderr tell of, or None when they name none we know.

    `connected` says that the login had worked before: a closed connection then is a lost one.
    """
    text = "\n".join(line for line in lines if not _HARMLESS.match(line))
    for row in _rows():
        found = row.pattern.search(text)
        if found and not (row.when == "connecting" and connected):
            values = {"host": host, "local_port": local_port, "remote_port": remote_port}
            said = text[text.rfind("\n", 0, found.start()) + 1 :].partition("\n")[0].strip()
            return Fault(
                row.state, row.message.format(**values), row.hint.format(**values), row.lasting, said
            )
    return None


def of_exit(lines: Sequence[str], status: int, *, host: str, connected: bool, **ports: int) -> Fault:
    """The fault of an ssh that ended with `status`; a general one when its words are unknown."""
    fault = classify(lines, host=host, connected=connected, **ports)
    if fault:
        return fault
    told = [line.strip() for line in lines if not _HARMLESS.match(line)]
    state = "connection lost" if connected else "host unreachable"
    how = f"was ended by signal {-status}" if status < 0 else f"ended with status {status}"
    return Fault(state, f"ssh to {host} {how}", f"try  ssh -v {host}", False, told[-1] if told else "")


def nothing_listens(line: str) -> bool:
    """Whether `line` says that the far side refused the connection behind the tunnel."""
    return bool(_NOTHING_LISTENS.search(line))
