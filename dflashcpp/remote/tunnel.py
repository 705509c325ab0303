"""A supervised forward to llama-server on the far side, whose state is always known and said.

`ready` is a valid answer of llama-server through the tunnel. What trying again can mend is tried
again, with back-off and jitter; what it cannot mend ends the tunnel with its own message.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType

from dflashcpp.errors import DflashError
from dflashcpp.remote import command, probe
from dflashcpp.remote.carrier import Carrier, OwnConnection, SharedMaster
from dflashcpp.remote.command import Ssh
from dflashcpp.remote.faults import Fault, FaultError
from dflashcpp.server.ports import check_port, free_port

CONNECTING = "connecting"
NOTHING = "tunnel up, nothing listening"
LOADING = probe.LOADING
READY = probe.READY
HALF_OPEN = "half open"
OTHER = probe.OTHER
LOST = "connection lost"
PORT_TAKEN = "local port taken"
CLOSED = "closed"
UP = (NOTHING, LOADING, READY, HALF_OPEN, OTHER)

PATIENCE_SECONDS = 30.0
_LONGEST_DELAY = 30.0
_LOGIN_SECONDS = 60.0
_PROBE_SECONDS = 5.0
_EVERY = {READY: 5.0, CONNECTING: 0.2}
# ssh gives up a dead link by itself within this time; a tunnel that is still there then has a live link.
_LINK_SECONDS = command.ALIVE_SECONDS * (command.ALIVE_COUNT + 1)
_HUNG = "it accepts connections but its sshd hangs; look at the machine's console"
_RETRIED_ONCE_UP = frozenset({"authentication", PORT_TAKEN})


@dataclass(frozen=True)
class Report:
    """The state of a tunnel in one word or three, in a sentence, and what to do. `final`: it has ended."""

    state: str
    message: str
    hint: str = ""
    model: str = ""
    final: bool = False

    def text(self) -> str:
        """One line for a person."""
        return f"{self.state}: {self.message}" + (f" ({self.hint})" if self.hint else "")


def backoff(attempt: int, rng: Callable[[], float] = random.random) -> float:
    """Seconds before the next try: 1, 2, 4 ... 30 for `attempt` 0, 1, 2 ..., less up to half by chance."""
    return min(_LONGEST_DELAY, 2.0 ** min(attempt, 10)) * (1.0 - 0.5 * rng())


class Tunnel:
    """Forwards `127.0.0.1:local_port` to `127.0.0.1:remote_port` on the host, until `close`.

    `on_change` is called, from the tunnel's own thread, with every new Report. A `local_port` of 0
    takes any free one. Until it has stood once, faults are borne for `patience` seconds; later for ever.
    """

    def __init__(
        self,
        ssh: Ssh,
        local_port: int,
        remote_port: int,
        on_change: Callable[[Report], None] | None = None,
        *,
        patience: float = PATIENCE_SECONDS,
    ) -> None:
        self.ssh = ssh
        self.local_port = local_port or free_port()
        self.remote_port = remote_port
        self.report = Report(CONNECTING, f"opening a connection to {ssh.host}")
        self.on_change = on_change
        self._patience = patience
        self._stop = threading.Event()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._was_up = False
        self._silent_since: float | None = None
        self._was_up_now = False

    @property
    def url(self) -> str:
        """The near end, for a Client."""
        return f"http://127.0.0.1:{self.local_port}"

    @property
    def remote(self) -> str:
        """The far end, for a person."""
        return f"{self.ssh.host}:127.0.0.1:{self.remote_port}"

    def start(self) -> Tunnel:
        """Begin. Returns at once; `wait_up` and `wait_ready` wait."""
        self._thread = threading.Thread(target=self._supervise, name="tunnel", daemon=True)
        self._thread.start()
        return self

    def close(self) -> None:
        """End ssh and wait until it is gone."""
        self._stop.set()
        if self._thread and self._thread is not threading.current_thread():
            self._thread.join()

    def __enter__(self) -> Tunnel:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def wait_up(self, timeout: float | None = None) -> Report:
        """Wait until the forward stands. Raises DflashError when it ends or `timeout` seconds pass."""
        return self._wait(UP, timeout)

    def wait_ready(self, timeout: float | None = None) -> Report:
        """Wait for llama-server's valid answer. Raises DflashError as `wait_up` does."""
        return self._wait((READY,), timeout)

    def wait_settled(self) -> Report:
        """The first Report that says how it stands: the forward is up in some way, or has ended."""
        return self._wait_for(lambda: self.report.final or self.report.state in UP, None)

    def wait_end(self, timeout: float | None = None) -> Report | None:
        """The last Report once the tunnel has ended; None when it still runs after `timeout` seconds."""
        report = self._wait_for(lambda: self.report.final, timeout)
        return report if report.final else None

    def _wait_for(self, condition: Callable[[], bool], timeout: float | None) -> Report:
        with self._changed:
            self._changed.wait_for(condition, timeout)
            return self.report

    def _wait(self, states: tuple[str, ...], timeout: float | None) -> Report:
        report = self._wait_for(lambda: self.report.final or self.report.state in states, timeout)
        if report.state in states:
            return report
        late = "" if report.final else f" (after {timeout:g} s)"
        raise DflashError(f"{report.state}: {report.message}{late}", hint=report.hint or None)

    # -- the supervisor's thread -----------------------------------------------------------------

    def _supervise(self) -> None:
        try:
            self._keep_up()
        except BaseException as error:  # nobody may wait for a tunnel whose thread is gone
            self._say(Report("failed", f"the tunnel's supervisor failed: {error!r}", final=True))
            raise

    def _keep_up(self) -> None:
        attempt, began = 0, time.monotonic()
        while not self._stop.is_set():
            self._was_up_now = False
            fault = self._connection()
            if self._stop.is_set():
                break
            tired = not self._was_up and time.monotonic() - began >= self._patience
            if tired or self._is_final(fault, attempt):
                self._say(self._report_of(fault, final=True))
                return
            attempt = 0 if self._was_up_now else attempt + 1
            delay = backoff(attempt)
            self._say(self._report_of(fault, f"; trying again in {delay:.0f} s"))
            self._stop.wait(delay)
        self._say(Report(CLOSED, "the tunnel was closed", final=True))

    def _is_final(self, fault: Fault, attempt: int) -> bool:
        if not fault.lasting:
            return False
        patient = self._was_up and fault.state in _RETRIED_ONCE_UP
        return not (patient and (fault.state != PORT_TAKEN or attempt < 5))

    def _connection(self) -> Fault:
        """One life of a connection; returns why it ended."""
        try:
            check_port("127.0.0.1", self.local_port)
        except DflashError as error:
            return Fault(PORT_TAKEN, error.message, error.hint or "", True)
        fault = self._carried(OwnConnection(self.ssh, self.local_port, self.remote_port))
        if fault.state == "authentication" and not self._stop.is_set() and SharedMaster.runs(self.ssh):
            return self._carried(SharedMaster(self.ssh, self.local_port, self.remote_port))
        return fault

    def _carried(self, carrier: Carrier) -> Fault:
        try:
            carrier.open()
            return self._watch(carrier)
        except FaultError as error:
            return error.fault
        finally:
            carrier.close()

    def _watch(self, carrier: Carrier) -> Fault:
        self._silent_since = None
        began = time.monotonic()
        while not self._stop.is_set():
            fault = carrier.fault()
            if fault:
                return fault
            if carrier.listens():
                report = self._look(carrier)
            elif time.monotonic() - began < _LOGIN_SECONDS:
                report = self.report  # the last fault stays in view while it is tried again
            else:
                return Fault("host unreachable", f"{self.ssh.host} does not finish the login", _HUNG, False)
            fault = carrier.fault()  # the probe may have brought ssh's reason to light
            if fault:
                return fault
            self._say(report)
            self._pause(carrier, _EVERY.get(report.state, 1.0) if carrier.listens() else _EVERY[CONNECTING])
        return Fault(CLOSED, "the tunnel was closed", "", False)

    def _pause(self, carrier: Carrier, seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until and not self._stop.wait(min(0.25, seconds)):
            if isinstance(carrier, OwnConnection) and carrier.fault():
                return

    def _look(self, carrier: Carrier) -> Report:
        self._was_up = self._was_up_now = True
        answer = probe.probe(self.local_port, _PROBE_SECONDS)
        refused = carrier.refused()
        if answer.state != probe.SILENT:
            self._silent_since = None
        if answer.state == probe.READY:
            return Report(
                READY, f"{answer.model or 'llama-server'} answers at {self.url}", model=answer.model
            )
        if answer.state == probe.LOADING:
            return Report(LOADING, "llama-server is loading its model")
        if answer.state == probe.OTHER:
            return Report(OTHER, answer.detail, f"another program holds port {self.remote_port} there")
        if answer.state == probe.SILENT:
            return self._half_open(answer)
        return self._nothing(answer, refused)

    def _nothing(self, answer: probe.Answer, refused: bool) -> Report:
        why = "refuses the connection" if refused else "closes the connection at once"
        return Report(
            NOTHING,
            f"port {self.remote_port} on {self.ssh.host} {why}",
            f"start the server there: dflashcpp serve --ssh {self.ssh.host}",
        )

    def _half_open(self, answer: probe.Answer) -> Report:
        now = time.monotonic()
        self._silent_since = self._silent_since or now
        if now - self._silent_since > _LINK_SECONDS:
            return Report(
                HALF_OPEN,
                "ssh's keep-alive is answered but llama-server does not answer: it hangs or is frozen",
                f"look at it: dflashcpp logs --ssh {self.ssh.host}",
            )
        return Report(
            HALF_OPEN,
            answer.detail,
            f"if the link is dead, ssh notices within {_LINK_SECONDS} s and is started again",
        )

    def _report_of(self, fault: Fault, more: str = "", *, final: bool = False) -> Report:
        return Report(fault.state, f"{fault.sentence}{more}", fault.hint, final=final)

    def _say(self, report: Report) -> None:
        with self._changed:
            if report == self.report:
                return
            news = report.state != self.report.state or report.message != self.report.message
            self.report = report
            self._changed.notify_all()
        if news and self.on_change:
            self.on_change(report)
