"""The one place that prints. Data goes to stdout, talk to stderr.

With `--json` stdout carries exactly one JSON object, whatever happens.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any

from dflashcpp.errors import DflashError
from dflashcpp.progress import Progress, Task


class Output:
    """What a command says: data, tables, talk, progress, errors."""

    answered = False  # whether this command has printed its one JSON object

    def __init__(self, *, as_json: bool = False, quiet: bool = False) -> None:
        self.as_json = as_json
        self.quiet = quiet
        self._lock = threading.RLock()

    def result(self, data: Mapping[str, Any], text: str | None = None) -> None:
        """The command's result: `data` with `--json`, else `text` (or one `key: value` a line)."""
        if self.as_json:
            Output.answered = True
            self._stdout(json.dumps(data, ensure_ascii=False, default=str))
        elif text is not None:
            self._stdout(text)
        else:
            self._stdout("\n".join(f"{key}: {value}" for key, value in data.items()))

    def text(self, text: str) -> None:
        """A block of data for a person; silent with `--json`."""
        if not self.as_json:
            self._stdout(text)

    def stream(self, piece: str) -> None:
        """A piece of streamed text, shown at once; silent with `--json`."""
        if not self.as_json:
            with self._lock:
                sys.stdout.write(piece)
                sys.stdout.flush()

    def aside(self, piece: str) -> None:
        """A piece of streamed talk, such as a model's reasoning, shown at once on stderr."""
        if not self.quiet:
            with self._lock:
                sys.stderr.write(piece)
                sys.stderr.flush()

    def table(
        self, headers: Sequence[str], rows: Iterable[Sequence[Any]], *, title: str | None = None
    ) -> None:
        """A table for a person, numbers to the right; silent with `--json`."""
        if self.as_json:
            return
        from rich.console import Console
        from rich.table import Table

        table = Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="bold")
        body = [list(row) for row in rows]
        for index, name in enumerate(headers):
            numeric = bool(body) and all(_is_number(row[index]) for row in body)
            table.add_column(name, justify="right" if numeric else "left", overflow="fold")
        for row in body:
            table.add_row(*[str(cell) for cell in row])
        with self._lock:
            Console(file=sys.stdout, width=None if sys.stdout.isatty() else 160, highlight=False).print(table)

    def status(self, text: str) -> None:
        """One line of talk: what is being done."""
        if not self.quiet:
            self._stderr(text)

    def warning(self, text: str) -> None:
        """Something the person should know though the command goes on."""
        self._stderr(f"warning: {text}")

    def error(self, error: DflashError) -> None:
        """A failure: the sentence, then the next step. With `--json` also an object on stdout, unless the
        result stands there already (a server that was up and died later).
        """
        self._stderr(f"error: {error.message}")
        if error.hint:
            self._stderr(f"  {error.hint}")
        if self.as_json and not Output.answered:
            self._stdout(json.dumps({"error": error.message, "hint": error.hint}, ensure_ascii=False))

    def progress(self) -> Progress:
        """Progress on stderr: bars on a terminal, else a line now and then."""
        return Progress() if self.quiet else _Shown(self)

    def _stdout(self, text: str) -> None:
        with self._lock:
            print(text, file=sys.stdout, flush=True)

    def _stderr(self, text: str) -> None:
        with self._lock:
            print(text, file=sys.stderr, flush=True)


def _is_number(cell: object) -> bool:
    text = str(cell).replace(",", "").rstrip("%x")
    return text in {"", "-", "n/a"} or text.lstrip("+-").replace(".", "", 1).isdigit()


class _Shown(Progress):
    def __init__(self, output: Output) -> None:
        self._output = output

    def say(self, text: str) -> None:
        self._output.status(text)

    def task(self, label: str, total: int | None = None, unit: str = "steps") -> Task:
        if sys.stderr.isatty():
            return _Bar(label, total, unit)
        return _Lines(self._output, label, total, unit)


class _Bar(Task):
    """A rich bar on a terminal."""

    def __init__(self, label: str, total: int | None, unit: str) -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
            TransferSpeedColumn,
        )

        counts = (
            [DownloadColumn(binary_units=True), TransferSpeedColumn()]
            if unit == "bytes"
            else [MofNCompleteColumn()]
        )
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            *counts,
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}"),
            console=Console(stderr=True),
        )
        self._id = self._bar.add_task(label, total=total, note="")

    def advance(self, amount: int = 1) -> None:
        self._bar.advance(self._id, amount)

    def total(self, amount: int) -> None:
        self._bar.update(self._id, total=amount)

    def note(self, text: str) -> None:
        self._bar.update(self._id, note=text)

    def __enter__(self) -> Task:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()


class _Lines(Task):
    """A line every few seconds where there is no terminal (logs, CI)."""

    _EVERY_SECONDS = 5.0

    def __init__(self, output: Output, label: str, total: int | None, unit: str) -> None:
        import time

        self._clock = time.monotonic
        self._output, self._label, self._total, self._unit = output, label, total, unit
        self._done = 0
        self._note = ""
        self._began = self._said = self._clock()
        self._lock = threading.Lock()

    def advance(self, amount: int = 1) -> None:
        with self._lock:
            self._done += amount
            if self._clock() - self._said >= self._EVERY_SECONDS:
                self._said = self._clock()
                self._output.status(self._line())

    def total(self, amount: int) -> None:
        self._total = amount

    def note(self, text: str) -> None:
        self._note = text

    def __enter__(self) -> Task:
        self._output.status(f"{self._label} ...")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        word = "done" if kind is None else "stopped"
        self._output.status(f"{self._label}: {word} after {self._clock() - self._began:.1f} s")

    def _line(self) -> str:
        spent = self._clock() - self._began
        text = f"{self._label}: {self._amount(self._done)}"
        if self._total:
            done = text.removesuffix(f" {self._unit}").removesuffix(" MiB")
            text = f"{done} of {self._amount(self._total)} ({100 * self._done / self._total:.0f} %)"
            if self._done:
                text += f", {spent * (self._total - self._done) / self._done:.0f} s left"
        return f"{text} {self._note}".rstrip()

    def _amount(self, count: int) -> str:
        return f"{count / 2**20:.1f} MiB" if self._unit == "bytes" else f"{count} {self._unit}"
