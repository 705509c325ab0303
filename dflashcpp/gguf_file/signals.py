"""SIGTERM and SIGHUP as exceptions while a file is being written, so that `with` blocks clean up."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any


class StopSignals:
    """Turns signals that would end the process at once into SystemExit, in the main thread only.

    A program that handles these signals itself keeps its handlers.
    """

    _NAMES = ("SIGTERM", "SIGHUP")

    def __init__(self) -> None:
        self._before: dict[int, Any] = {}

    def catch(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        for name in self._NAMES:
            number = getattr(signal, name, None)
            if number is not None and signal.getsignal(number) is signal.SIG_DFL:
                self._before[number] = signal.signal(number, _stop)

    def release(self) -> None:
        """Put back what was there before."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()


def _stop(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)
