"""Commands on the far side: a script goes in by stdin, an answer comes out, nothing is left behind."""

from __future__ import annotations

import contextlib
import functools
import re
import secrets
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from dflashcpp.errors import DflashError
from dflashcpp.remote import command, faults
from dflashcpp.remote.carrier import no_ssh
from dflashcpp.remote.command import Ssh
from dflashcpp.remote.faults import FaultError

_GPU_FIELDS = "index,name,memory.total,memory.free,driver_version"
Sink = Callable[[bytes], None]


@dataclass(frozen=True)
class Outcome:
    """What a script printed and its exit status."""

    status: int
    out: bytes
    err: str

    @property
    def text(self) -> str:
        """The output as text."""
        return self.out.decode("utf-8", errors="replace")

    @property
    def last_words(self) -> str:
        """The last line of stderr, for an error's sentence."""
        return next((line.strip() for line in reversed(self.err.splitlines()) if line.strip()), "")

    def values(self) -> dict[str, str]:
        """Output of `key=value` lines as a dictionary; a repeated key keeps its last value."""
        return dict(line.partition("=")[::2] for line in self.text.splitlines() if "=" in line)


@dataclass(frozen=True)
class Gpu:
    """One GPU over there as nvidia-smi tells it; memory in MiB."""

    index: int
    name: str
    total_mib: int
    free_mib: int
    driver: str


@dataclass(frozen=True)
class Facts:
    """What is known about the far side; None where it does not tell. Sizes in bytes."""

    system: str
    home: str
    cores: int | None
    memory: int | None
    free_disk: int | None
    tools: dict[str, str]
    gpus: tuple[Gpu, ...] = ()
    gpu_problem: str = ""


@functools.cache
def script(name: str) -> str:
    """A script of `remote/scripts/` with the functions that all of them share."""
    folder = Path(__file__).with_name("scripts")
    return f"{(folder / 'common.sh').read_text()}\n{(folder / f'{name}.sh').read_text()}"


class Host:
    """One machine behind SSH."""

    def __init__(self, ssh: Ssh) -> None:
        self.ssh = ssh

    @property
    def name(self) -> str:
        """Its name, as ssh takes it."""
        return self.ssh.host

    def run(
        self,
        name: str,
        *arguments: str,
        timeout: float | None = 90.0,
        sink: Sink | None = None,
        errors: Callable[[str], None] | None = None,
        stop: threading.Event | None = None,
    ) -> Outcome:
        """Run the script `name` there with `arguments` and wait for its end.

        With `sink` the output is handed over piece by piece and not kept; with `errors` so is each line
        of stderr. `stop` ends it early. Raises FaultError when the connection fails, DflashError when
        `timeout` seconds pass; a status of the script itself is no error here.
        """
        return _Session(self.ssh, name, arguments).run(timeout, sink, errors, stop)

    def ask(self, name: str, *arguments: str, timeout: float | None = 90.0) -> Outcome:
        """As `run`, but a status other than 0 raises DflashError with the script's last words."""
        outcome = self.run(name, *arguments, timeout=timeout)
        if outcome.status != 0:
            said = outcome.last_words or f"status {outcome.status}"
            raise DflashError(f"{self.name}: {said}")
        return outcome

    def facts(self) -> Facts:
        """System, tools, free memory and disk, GPUs."""
        outcome = self.ask("facts", _GPU_FIELDS)
        values = outcome.values()
        lines = [line[4:] for line in outcome.text.splitlines() if line.startswith("gpu=")]
        gpus = [_gpu(line) for line in lines]
        return Facts(
            system=values.get("system", ""),
            home=values.get("home", ""),
            cores=_number(values.get("cores")),
            memory=_scaled(values.get("memory_kib")),
            free_disk=_scaled(values.get("free_kib")),
            tools={key[5:]: value for key, value in values.items() if key.startswith("tool.") and value},
            gpus=tuple(gpu for gpu in gpus if gpu),
            gpu_problem="; ".join(line for line, gpu in zip(lines, gpus, strict=True) if not gpu),
        )


def _number(text: str | None) -> int | None:
    return int(text) if text and text.strip().isdigit() else None


def _scaled(kib: str | None) -> int | None:
    number = _number(kib)
    return None if number is None else number * 1024


def _gpu(line: str) -> Gpu | None:
    parts = [part.strip() for part in line.split(",")]
    if len(parts) != 5 or not all(parts[i].isdigit() for i in (0, 2, 3)):
        return None
    return Gpu(int(parts[0]), parts[1], int(parts[2]), int(parts[3]), parts[4])


@dataclass
class _Session:
    """One ssh with one script: sends it, keeps stdin open as the leash, reads the framed answer."""

    ssh: Ssh
    name: str
    arguments: tuple[str, ...]
    mark: str = field(default_factory=lambda: f"dflashcpp-{secrets.token_hex(8)}")
    err: list[str] = field(default_factory=list)

    def run(
        self,
        timeout: float | None,
        sink: Sink | None,
        errors: Callable[[str], None] | None,
        stop: threading.Event | None,
    ) -> Outcome:
        kept = bytearray()
        process = self._start()
        timer = _Timer(process, timeout, stop)
        reader = threading.Thread(target=self._read_errors, args=(process, errors), daemon=True)
        try:
            reader.start()
            text = command.script_text(script(self.name), self.arguments, self.mark)
            self._send(process, text.encode("utf-8", errors="surrogateescape"))
            status = self._read(process, sink or kept.extend)
        finally:
            timer.cancel()
            _end(process)
            reader.join(5.0)
        if status is None or timer.fired:
            raise self._broken(process.returncode, timer.fired, timeout)
        return Outcome(status, bytes(kept), "\n".join(self.err))

    def _start(self) -> subprocess.Popen[bytes]:
        argv = command.script_argv(self.ssh)
        try:
            return subprocess.Popen(
                argv,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
        except OSError as error:
            raise no_ssh(argv[0], error) from None

    def _send(self, process: subprocess.Popen[bytes], data: bytes) -> None:
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # ssh ended: its stderr says why
            process.stdin.write(data)
            process.stdin.flush()

    def _read_errors(self, process: subprocess.Popen[bytes], errors: Callable[[str], None] | None) -> None:
        assert process.stderr is not None
        for raw in process.stderr:
            line = raw.decode("utf-8", errors="replace").rstrip("\r\n")
            self.err = [*self.err[-200:], line]
            if errors:
                errors(line)

    def _read(self, process: subprocess.Popen[bytes], sink: Sink) -> int | None:
        """Hand on what stands between the marks; the status in the end mark, None when it never came."""
        assert process.stdout is not None
        begin, end = f"{self.mark} begin\n".encode(), f"{self.mark} end ".encode()
        buffer, begun = b"", False
        while piece := process.stdout.read1(1 << 16):  # type: ignore[attr-defined]
            buffer += piece
            if not begun:
                begun = begin in buffer
                buffer = buffer.partition(begin)[2] if begun else buffer
            if begun:
                body, found, rest = buffer.partition(end)
                if found:
                    sink(body)
                    return _status(rest, process)
                kept = _held_back(buffer, end)
                sink(buffer[: len(buffer) - kept])
                buffer = buffer[len(buffer) - kept :]
        if begun and buffer:
            sink(buffer)
        return None

    def _broken(self, returncode: int | None, fired: bool, timeout: float | None) -> DflashError:
        if fired:
            return DflashError(
                f"{self.ssh.host} did not answer within {timeout:g} s ({self.name})",
                hint=f"see how it is: ssh {self.ssh.host} uptime",
            )
        return FaultError(faults.of_exit(self.err, returncode or 0, host=self.ssh.host, connected=False))


def _held_back(buffer: bytes, end: bytes) -> int:
    """How many of the last bytes may be the beginning of `end`; the most that may."""
    start = buffer.find(end[:1], max(0, len(buffer) - len(end)))
    while start >= 0 and not end.startswith(buffer[start:]):
        start = buffer.find(end[:1], start + 1)
    return len(buffer) - start if start >= 0 else 0


def _status(rest: bytes, process: subprocess.Popen[bytes]) -> int | None:
    assert process.stdout is not None
    while b"\n" not in rest:
        piece = process.stdout.read1(64)  # type: ignore[attr-defined]
        if not piece:
            return None
        rest += piece
    found = re.match(rb"(\d+)\n", rest)
    return int(found[1]) if found else None


class _Timer:
    """Ends a process when time is up or when asked to."""

    def __init__(
        self, process: subprocess.Popen[bytes], timeout: float | None, stop: threading.Event | None
    ) -> None:
        self.fired = False
        self._process, self._timeout = process, timeout
        self._cancelled, self._stop = threading.Event(), stop
        threading.Thread(target=self._wait, daemon=True).start()

    def cancel(self) -> None:
        self._cancelled.set()

    def _wait(self) -> None:
        until = None if self._timeout is None else time.monotonic() + self._timeout
        while not self._cancelled.wait(0.1):
            late = until is not None and time.monotonic() > until
            if late or (self._stop and self._stop.is_set()):
                self.fired = late
                _let_go(self._process)
                self._process.kill()
                return


def _let_go(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None
    with contextlib.suppress(OSError, ValueError):
        process.stdin.close()


def _end(process: subprocess.Popen[bytes]) -> None:
    """Let go of the leash, then wait for ssh; one that hangs is killed."""
    _let_go(process)
    try:
        process.wait(5.0)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
