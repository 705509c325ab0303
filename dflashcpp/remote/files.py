"""Files on the far side: are they there and whole, copying one with resume, reading a GGUF header."""

from __future__ import annotations

import contextlib
import os
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO

from dflashcpp.errors import DflashError
from dflashcpp.progress import SILENT, Progress, Task
from dflashcpp.remote import command, faults
from dflashcpp.remote.carrier import no_ssh
from dflashcpp.remote.faults import FaultError
from dflashcpp.remote.host import Host
from dflashcpp.remote.tunnel import backoff

_BLOCK = 1 << 20
_TRIES_WITHOUT_PROGRESS = 5
_SMALL_SECONDS = 600
_HEADER_STEPS = (1 << 20, 8 << 20, 64 << 20, 256 << 20)
_WRITE = 'exec dd of="$1" bs=1048576 seek="$2" conv=notrunc'
_READ = 'exec head -c "$2" <"$1"'


@dataclass(frozen=True)
class RemoteFile:
    """A file over there: its absolute path and its size in bytes."""

    path: str
    size: int


def absolute(path: str, home: str) -> str:
    """A path over there made absolute: `~/x` and `x` are below the home folder."""
    text = path[2:] if path.startswith("~/") else "." if path == "~" else path
    return str(PurePosixPath(home, text))


def look(host: Host, path: str) -> RemoteFile | None:
    """The file at an absolute path, None when there is none. Raises DflashError for a folder."""
    kind, _, size = host.ask("stat", path).text.strip().partition(" ")
    if kind == "missing":
        return None
    if kind != "file" or not size.strip().isdigit():
        raise DflashError(f"{host.name}:{path} is {'a folder' if kind == 'folder' else 'not readable'}")
    return RemoteFile(path, int(size))


def digest(host: Host, path: str, progress: Progress = SILENT) -> str:
    """The sha256 of a file over there, computed there and remembered there until the file changes."""
    with progress.task(f"checking {host.name}:{path}"):
        return host.ask("digest", path, timeout=None).text.strip()


def push(host: Host, local: Path, path: str, progress: Progress = SILENT) -> RemoteFile:
    """Copy a local file to an absolute path over there, unless the same bytes are there already.

    The copy grows under a partial name that holds the digest, so that a broken copy is taken up where it
    stopped; the final name appears only with the right sha256. Raises DflashError when there is no room,
    when nothing can be written, or when the link breaks again and again without progress.
    """
    from dflashcpp.pairs import file_sha256

    size, wanted = local.stat().st_size, file_sha256(local, progress)
    there = look(host, path)
    if there and there.size == size and digest(host, path, progress) == wanted:
        return there
    final = PurePosixPath(path)
    part = str(final.with_name(f".{final.name}.{wanted[:16]}.part"))
    with progress.task(f"copying {local.name} to {host.name}", size, "bytes") as task:
        _Copy(host, local, path, part, size, task).run()
    found = digest(host, part, progress)
    if found != wanted:
        host.run("remove", part)
        raise DflashError(
            f"{host.name}:{part} arrived with another sha256 than {local} has; it was removed",
            hint="did the file change meanwhile? push it again",
        )
    host.ask("push_end", path, part)
    return RemoteFile(path, size)


@dataclass
class _Copy:
    """One copy that survives broken links; `shown` is how much of it the task has been told of."""

    host: Host
    local: Path
    path: str
    part: str
    size: int
    task: Task
    shown: int = 0

    def run(self) -> None:
        failures, reached = 0, -1
        while True:
            try:
                have = self._begin()
                if have == self.size:
                    return
                failures = 0 if have > reached else failures
                reached = have
                self._send(have // _BLOCK)
            except FaultError as error:
                failures += 1
                if error.fault.lasting or failures > _TRIES_WITHOUT_PROGRESS:
                    raise
                self.task.note("the link broke; going on where it stopped")
                time.sleep(backoff(failures - 1))

    def _begin(self) -> int:
        """How many bytes are there already, after a look whether the rest has room."""
        values = self.host.ask("push_begin", self.path, self.part).values()
        have, free = int(values["have"]), values.get("free_kib", "")
        if have > self.size:
            self.host.ask("remove", self.part)
            have = 0
        if free.isdigit() and int(free) * 1024 < self.size - have:
            raise DflashError(
                f"{self.host.name}:{values['folder']} has {int(free) / 1024:.0f} MiB free,"
                f" {self.local.name} still needs {(self.size - have) / 2**20:.0f} MiB",
                hint="make room there, or set another directory in the profile",
            )
        self._show(have)
        return have

    def _show(self, done: int) -> None:
        self.task.advance(done - self.shown)
        self.shown = done

    def _send(self, blocks: int) -> None:
        argv = command.data_argv(self.host.ssh, _WRITE, [self.part, str(blocks)])
        with tempfile.TemporaryFile() as said, self.local.open("rb") as source:
            source.seek(blocks * _BLOCK)
            process = _started(argv, said)
            try:
                self._feed(process, source)
                status = process.wait()
            finally:
                process.kill()
                process.wait()
            said.seek(0)
            self._judge(status, said.read().decode("utf-8", errors="replace").splitlines())

    def _feed(self, process: subprocess.Popen[bytes], source: IO[bytes]) -> None:
        assert process.stdin is not None
        self._show(source.tell())
        with contextlib.suppress(BrokenPipeError):
            while piece := source.read(1 << 18):
                process.stdin.write(piece)
                self._show(self.shown + len(piece))
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()

    def _judge(self, status: int, lines: list[str]) -> None:
        said = next((line for line in lines if "dd:" in line or "head:" in line), None)
        if said:
            raise DflashError(
                f"{self.host.name}: {self.part} cannot be written: {said}",
                hint="what has arrived is kept; make room and push again to go on from there",
            )
        if status != 0:
            raise FaultError(faults.of_exit(lines, status, host=self.host.name, connected=True))


def _started(argv: list[str], errors: IO[bytes]) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=errors)
    except OSError as error:
        raise no_ssh(argv[0], error) from None


@contextlib.contextmanager
def header_copy(host: Host, file: RemoteFile) -> Iterator[Path]:
    """A local stand-in for a GGUF over there: its header's bytes, and its full size as a sparse file.

    Whatever needs only the header (checks of a pair, the memory plan) reads it like the file itself.
    """
    from dflashcpp.gguf_file import read_header

    with tempfile.TemporaryDirectory(prefix="dflashcpp-header-") as folder:
        copy = Path(folder, PurePosixPath(file.path).name)
        for step in _HEADER_STEPS:
            copy.write_bytes(_first_bytes(host, file.path, step))
            os.truncate(copy, file.size)
            try:
                whole = read_header(copy).data_start <= step
            except DflashError:
                if step >= min(file.size, _HEADER_STEPS[-1]):
                    raise
                whole = False
            if whole:
                break
        yield copy


def _first_bytes(host: Host, path: str, count: int) -> bytes:
    return _small(host, _READ, [path, str(count)], b"", f"{path} cannot be read")


def write_small(host: Host, path: str, data: bytes, script: str) -> None:
    """Write a few bytes over there by a one-line `script` that reads stdin and gets the path."""
    _small(host, script, [path], data, f"{path} cannot be written")


def _small(host: Host, script: str, arguments: list[str], data: bytes, failed: str) -> bytes:
    """Run a one-line script that takes and gives a moderate amount of data; what it gave."""
    argv = command.data_argv(host.ssh, script, arguments)
    try:
        done = subprocess.run(argv, input=data, capture_output=True, timeout=_SMALL_SECONDS)
    except subprocess.TimeoutExpired:
        raise DflashError(f"{host.name}: {failed}: no end within {_SMALL_SECONDS} s") from None
    except OSError as error:
        raise no_ssh(argv[0], error) from None
    lines = done.stderr.decode("utf-8", errors="replace").splitlines()
    if done.returncode == 255:
        raise FaultError(faults.of_exit(lines, 255, host=host.name, connected=True))
    if done.returncode != 0:
        raise DflashError(f"{host.name}: {failed}: {lines[-1] if lines else f'status {done.returncode}'}")
    return done.stdout
