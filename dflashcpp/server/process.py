"""One child process: started in a session of its own, known by more than its pid, ended with its parent.

On Linux the kernel kills the child when its parent dies, also by `kill -9` (`prctl(PR_SET_PDEATHSIG)`). The
kernel means the *thread* that forked, so a thread that lives as long as the child does the forking.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

from dflashcpp.errors import DflashError

_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Identity:
    """One process and no other: a pid alone may be used again."""

    pid: int
    started: str
    exe: str

    @classmethod
    def of(cls, pid: int) -> Identity | None:
        """The process that has this pid now; None when there is none (a zombie is none)."""
        import psutil

        try:
            process = psutil.Process(pid)
            with process.oneshot():
                if process.status() == psutil.STATUS_ZOMBIE:
                    return None
                return cls(pid, _start_time(process), process.exe())
        except (psutil.Error, OSError):
            return None

    @classmethod
    def of_this(cls) -> Identity | None:
        """This very process."""
        return cls.of(os.getpid())

    def alive(self) -> bool:
        """Whether this very process runs."""
        return Identity.of(self.pid) == self

    def send(self, number: signal.Signals) -> bool:
        """Signal this process; False when it is gone."""
        if not self.alive():
            return False
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)
            return True
        return False


def _start_time(process: object) -> str:
    """Clock ticks since boot where the system tells them: they don't move with the wall clock."""
    pid = process.pid  # type: ignore[attr-defined]
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        return f"ticks {int(fields[19])}"
    except (OSError, IndexError, ValueError):
        return f"time {process.create_time():.2f}"  # type: ignore[attr-defined]


class Child:
    """A running program of ours. `tied`: it dies when this process dies, however that happens."""

    def __init__(
        self,
        argv: Sequence[str],
        log: Path,
        *,
        environment: Mapping[str, str] | None = None,
        tied: bool = True,
    ) -> None:
        self.argv = list(argv)
        self.log = log
        self._environment = dict(os.environ if environment is None else environment)
        self._tied = tied
        self._process: subprocess.Popen[bytes] | None = None
        self._error: OSError | None = None
        self._started = threading.Event()
        self.identity: Identity | None = None

    def start(self) -> None:
        """Start it. Raises DflashError when the program cannot be run."""
        threading.Thread(target=self._keep, name="child-keeper", daemon=True).start()
        self._started.wait()
        if self._error is not None:
            reason = self._error.strerror or str(self._error)
            raise DflashError(
                f"{self.argv[0]} cannot be run: {reason}", hint="build it with: dflashcpp build"
            )
        assert self._process is not None
        self.identity = Identity.of(self._process.pid)

    def _keep(self) -> None:
        try:
            with self.log.open("ab") as log:
                self._process = self._spawn(log)
            if self._tied:
                _LIVING.add(self)
        except OSError as error:
            self._error = error
        finally:
            self._started.set()
        while self._process is not None and self._process.poll() is None:
            time.sleep(0.1)

    def _spawn(self, log: IO[bytes]) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            self.argv,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=self._environment,
            start_new_session=True,
            preexec_fn=_tie(os.getpid()) if self._tied else None,
        )

    def look(self) -> Identity | None:
        """Who it is now: a wrapper script has become the program it runs, with the same pid and start."""
        self.identity = Identity.of(self.pid) if self.returncode is None else self.identity
        return self.identity

    @property
    def pid(self) -> int:
        """Its process id."""
        assert self._process is not None, "not started"
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """None while it runs; negative when a signal ended it."""
        return self._process.poll() if self._process else None

    def wait(self, timeout: float | None = None) -> int | None:
        """Its exit code; None when it still runs after `timeout` seconds."""
        until = None if timeout is None else time.monotonic() + timeout
        while self.returncode is None and (until is None or time.monotonic() < until):
            time.sleep(0.02)
        return self.returncode

    def stop(self, grace: float = 10.0) -> int | None:
        """End it: asked first, after `grace` seconds killed. Its exit code, None if it never ran."""
        if self._process is None:
            return None
        if self.returncode is None:
            self._signal(signal.SIGTERM)
            self._signal(signal.SIGCONT)  # a stopped process does not see SIGTERM
            if self.wait(grace) is None:
                self._signal(signal.SIGKILL)
        _LIVING.discard(self)
        return self._process.wait()

    def _signal(self, number: signal.Signals) -> None:
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, number)


_LIVING: weakref.WeakSet[Child] = weakref.WeakSet()


@atexit.register
def _stop_all() -> None:
    for child in list(_LIVING):
        child.stop(grace=5.0)


def _tie(parent: int) -> Callable[[], None] | None:
    """What the child does between fork and exec: ask to be killed when the parent dies."""
    if not sys.platform.startswith("linux"):
        return None
    import ctypes

    prctl = ctypes.CDLL(None, use_errno=True).prctl  # looked up before the fork: after it only calls are safe

    def tie() -> None:
        prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        if os.getppid() != parent:  # it died in between
            os._exit(1)

    return tie


# -- pidfiles --------------------------------------------------------------------------------------


def write_pidfile(path: Path, identity: Identity, **facts: object) -> None:
    """Note who runs, in one step; `facts` are kept beside it."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.part")
    temporary.write_text(json.dumps({**facts, "process": asdict(identity)}, default=str, indent=1))
    temporary.chmod(0o600)
    temporary.replace(path)


def read_pidfile(path: Path) -> tuple[Identity, dict[str, object]] | None:
    """Who was noted, and the facts; None when there is no such file or it holds something else."""
    try:
        facts = json.loads(path.read_text())
        return Identity(**facts.pop("process")), facts
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
