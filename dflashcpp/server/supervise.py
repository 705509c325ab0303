"""Staying with a server until it is told to end: signals, log rotation, restarts with back-off."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from types import FrameType, TracebackType
from typing import Any

from dflashcpp.errors import DflashError
from dflashcpp.server import logs
from dflashcpp.server.acceptance import AcceptanceWatch
from dflashcpp.server.llama_server import LlamaServer

FIRST_WAIT = 1.0
LONGEST_WAIT = 60.0
STEADY_SECONDS = 300.0
MAX_FAILED_STARTS = 5


class Told(KeyboardInterrupt):
    """A signal asked us to end. As Ctrl-C it is no error, so that no handler of errors takes it for one."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


class Signals:
    """Inside this block SIGINT, SIGTERM and SIGHUP (a closed terminal) raise `Told` in the main thread.

    Only the first does; later ones are ignored while the child is being ended.
    """

    def __init__(self) -> None:
        self._before: dict[signal.Signals, Any] = {}
        self._told = False

    def __enter__(self) -> Signals:
        if threading.current_thread() is threading.main_thread():
            for name in ("SIGINT", "SIGTERM", "SIGHUP"):
                number = getattr(signal, name, None)
                if number is not None:
                    self._before[number] = signal.signal(number, self._tell)
        return self

    def _tell(self, number: int, frame: FrameType | None) -> None:
        if not self._told:
            self._told = True
            raise Told(number)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


def watch(
    server: LlamaServer,
    *,
    restart: bool = False,
    say: Callable[[str], None] = lambda text: None,
    first_wait: float = FIRST_WAIT,
    log_limit: int = logs.MAX_BYTES,
) -> None:
    """Stay with a started server until it ends, or is stopped from another thread.

    Without `restart` its end raises DflashError with the reason. With it the server is started again, after
    a wait that doubles each time and falls back after five good minutes; five failed starts in a row end it.
    Every reason is kept in the pidfile.
    """
    wait, failed = first_wait, 0
    while True:
        began = time.monotonic()
        _until_ended(server, log_limit, say)
        if server.stopped:
            return
        reason = server.failure("while serving")
        assert reason is not None
        if not restart:
            raise reason
        if time.monotonic() - began > STEADY_SECONDS:
            wait, failed = first_wait, 0
        while True:
            server.reasons.append(reason.message)
            say(f"{reason.message}; starting it again in {wait:g} s")
            time.sleep(wait)
            if server.stopped:
                return
            wait = min(2 * wait, LONGEST_WAIT)
            try:
                server.start_again()
                say(f"llama-server is up again at {server.url} (pid {server.pid})")
                break
            except DflashError as error:
                reason, failed = error, failed + 1
                if failed >= MAX_FAILED_STARTS:
                    raise DflashError(
                        f"llama-server could not be started again {failed} times: {error.message}",
                        hint=error.hint,
                    ) from error


def _until_ended(server: LlamaServer, log_limit: int, say: Callable[[str], None]) -> None:
    looked, drafts, client = 0.0, AcceptanceWatch(server.log), server.client(retries=0)
    while server.returncode is None:
        time.sleep(0.1)
        told = drafts.look(client)
        if told is not None:
            say(f"warning: {told}")
        if time.monotonic() - looked > 5:
            looked = time.monotonic()
            grown = server.growth_note()
            if grown is not None:
                say(f"warning: {grown}")
            logs.rotate_live(server.log, limit=log_limit)


def show_log(server: LlamaServer, line: Callable[[str], None]) -> threading.Thread:
    """Give every line of the server's log to `line`, from a thread of its own, until the server ends."""

    def run() -> None:
        with suppress(OSError, ValueError):  # a closed terminal must not end the server
            for text in logs.follow(server.log, over=lambda: server.returncode is not None):
                line(text)

    thread = threading.Thread(target=run, name="log", daemon=True)
    thread.start()
    return thread
