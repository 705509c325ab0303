"""`serve` on the far side: prepare, plan, start, tunnel, prove, watch, stop."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from dflashcpp import paths
from dflashcpp.client import Client, ClientError
from dflashcpp.config import Profile
from dflashcpp.errors import DflashError
from dflashcpp.progress import SILENT, Progress
from dflashcpp.remote import engine, files, models, server
from dflashcpp.remote.command import Ssh
from dflashcpp.remote.faults import FaultError
from dflashcpp.remote.host import Facts, Host
from dflashcpp.remote.models import Store
from dflashcpp.remote.tunnel import Report, Tunnel, backoff
from dflashcpp.server import readiness
from dflashcpp.server.acceptance import AcceptanceWatch
from dflashcpp.server.diagnose import explain_exit
from dflashcpp.server.flags import Given
from dflashcpp.server.launch import Launch, check_allowed, compose, read_api_key
from dflashcpp.server.ports import free_port

if TYPE_CHECKING:
    from dflashcpp.memory import Plan
    from dflashcpp.memory.engine import EngineMemory

_UP_SECONDS = 120.0
_LAST_LINES_SECONDS = 5.0
_MAX_FAILED_STARTS = 5
_STEADY_SECONDS = 300.0
_PROOF_TRIES = 5
_LINK_FAULTS = ("unreachable", "cut", "timeout")
_WRITE_SECRET = 'umask 077 && mkdir -p "$(dirname "$1")" && cat >"$1"'


@dataclass(frozen=True)
class Wanted:
    """What `serve --ssh` was asked for. `words`: a pair's name and llama-server's flags, as on the line."""

    words: tuple[str, ...] = ()
    with_draft: bool = True
    draft_type: str | None = None
    push: bool = False
    dry_run: bool = False
    port: int | None = None
    remote_port: int | None = None
    server: str | None = None


@dataclass(frozen=True)
class Prepared:
    """Everything found out before a start: the launch over there, the plan, the facts."""

    host: Host
    facts: Facts
    launch: Launch
    local_port: int
    plan: Plan | None
    room_mib: float | None
    origin: str


def prepare(profile: Profile, ssh: Ssh, wanted: Wanted, progress: Progress = SILENT) -> Prepared:
    """Find or build llama-server there, see that the files are there and fit together, plan the memory.

    Nothing is started. Raises DflashError: for the connection (FaultError), a missing file or build, a
    pair that does not fit together, flags that this llama-server does not know.
    """
    host = Host(ssh)
    with progress.task(f"looking at {host.name}"):
        facts = host.facts()
    named = wanted.server or profile.server
    found = engine.find(host, facts, named=named, may_build=not wanted.dry_run, progress=progress)
    parsed = found.table.split([*wanted.words, *_defaults_of(profile, wanted, found)])
    check_allowed(found.table, parsed.flags, parsed.verbatim)
    store = Store(host, facts, profile.directory, wanted.push, progress, wanted.dry_run)
    remote_port = wanted.remote_port or profile.remote_port
    given = [flag for flag in parsed.flags if not found.table.same(flag.name, "--host")]
    local_port, given = _local_port(found, given, wanted, profile)
    given.append(Given("--port", str(remote_port)))
    if profile.api_key_file and not any(found.table.same(flag.name, "--api-key-file") for flag in given):
        given.append(Given("--api-key-file", profile.api_key_file))
    launch, plan, room = _launch(store, found, given, parsed.words, parsed.verbatim, wanted, profile)
    return Prepared(host, facts, _with_key(facts, launch), local_port, plan, room, found.origin)


def _defaults_of(profile: Profile, wanted: Wanted, found: engine.RemoteEngine) -> list[str]:
    """The profile's arguments, without those that were given on the line as well."""
    given = found.table.split(list(wanted.words)).flags
    standing = found.table.split(list(profile.arguments)).flags
    left = [flag for flag in standing if not any(found.table.same(flag.name, one.name) for one in given)]
    return [word for flag in left for word in flag.argv()]


def _local_port(
    found: engine.RemoteEngine, given: list[Given], wanted: Wanted, profile: Profile
) -> tuple[int, list[Given]]:
    """`--port` is this machine's port; over there `--remote-port` counts."""
    ports = [flag.value for flag in given if found.table.same(flag.name, "--port")]
    rest = [flag for flag in given if not found.table.same(flag.name, "--port")]
    text = ports[-1] if ports else None
    if text is not None and not text.isdigit():
        raise DflashError(f"--port {text}: that is no port")
    chosen = wanted.port if wanted.port is not None else (int(text) if text is not None else None)
    return profile.local_port if chosen is None else (chosen or free_port()), rest


def _launch(
    store: Store,
    found: engine.RemoteEngine,
    given: list[Given],
    words: Sequence[str],
    verbatim: Sequence[str],
    wanted: Wanted,
    profile: Profile,
) -> tuple[Launch, Plan | None, float | None]:
    model, draft, pair = _files(store, found, given, words, wanted, profile)
    with contextlib.ExitStack() as stack:
        model_here = stack.enter_context(files.header_copy(store.host, model))
        draft_here = stack.enter_context(files.header_copy(store.host, draft)) if draft else None
        from dflashcpp.server.preflight import check_files

        checked = check_files(model_here, draft_here, found.base)
        launch = compose(
            found.table,
            Path(found.binary),
            given,
            verbatim,
            model=Path(model.path),
            draft=Path(draft.path) if draft else None,
            depth=checked.drafter.max_draft if checked.drafter else None,
            version=checked.drafter.version if checked.drafter else None,
            trained_context=checked.target_context,
            recommended=pair.flags if pair else None,
            alias=pair.name if pair else None,
        )
        launch = dataclasses.replace(launch, warnings=(*checked.warnings, *launch.warnings))
        plan, room = _plan(store.facts, launch, model_here, draft_here, patched=found.origin != "named")
    return launch, plan, room


def _files(
    store: Store,
    found: engine.RemoteEngine,
    given: list[Given],
    words: Sequence[str],
    wanted: Wanted,
    profile: Profile,
) -> tuple[files.RemoteFile, files.RemoteFile | None, Any]:
    def value(name: str) -> str | None:
        return next((flag.value for flag in reversed(given) if found.table.same(flag.name, name)), None)

    model, draft = value("--model"), value("--model-draft")
    if model is not None:
        if words:
            raise DflashError(f"either a pair ({words[0]}) or -m {model}, not both")
        drafted = store.named(draft, "-md") if draft and wanted.with_draft else None
        return store.named(model, "-m"), drafted, None
    from dflashcpp import config
    from dflashcpp.pairs import load_pair

    pair = load_pair(words[0] if words else profile.pair or config.default_pair())
    own = store.named(draft, "-md") if draft and wanted.with_draft else None
    target, drafter = models.of_pair(store, pair, wanted.draft_type, with_draft=wanted.with_draft and not own)
    return target, own or drafter, pair


def _plan(
    facts: Facts, launch: Launch, model: Path, draft: Path | None, *, patched: bool
) -> tuple[Plan | None, float | None]:
    """The memory plan against the free memory of the GPUs there, else its main memory. MiB."""
    from dflashcpp.memory import plan
    from dflashcpp.memory.settings import from_flags

    if facts.gpus:
        room: float | None = float(sum(gpu.free_mib for gpu in facts.gpus))
    else:
        room = facts.memory / 2**20 if facts.memory else None
    costly = [flag.argv() for flag in launch.flags if not from_flags(flag.argv())[1]]
    flags = [word for words in costly for word in words]
    return plan(target=model, drafter=draft, flags=flags, device_memory=room, patched=patched), room


def _key_place(facts: Facts, port: int) -> str:
    return files.absolute(f".local/state/dflashcpp/remote/{port}.key", facts.home)


def _with_key(facts: Facts, launch: Launch) -> Launch:
    """The argv names the copy of the API key's file that `start` puts on the far side."""
    if launch.api_key_file is None:
        return launch
    place, here = _key_place(facts, launch.port), str(launch.api_key_file)
    flags = tuple(Given(flag.name, place) if flag.value == here else flag for flag in launch.flags)
    return dataclasses.replace(launch, flags=flags)


def send_key(host: Host, facts: Facts, launch: Launch) -> None:
    """Copy the API key's file to the far side, readable for the user only; `stop` removes it there."""
    if launch.api_key_file is not None:
        key = launch.api_key_file.read_bytes()
        files.write_small(host, _key_place(facts, launch.port), key, _WRITE_SECRET)


class RemoteServer:
    """A llama-server on the far side with its tunnel and its log here. A context manager that stops it.

    `with RemoteServer(prepared) as server: server.client().chat(...)`. `close` leaves it running.
    """

    def __init__(
        self,
        prepared: Prepared,
        *,
        on_change: Callable[[Report], None] | None = None,
        on_log: Callable[[str], None] | None = None,
        progress: Progress = SILENT,
        stall: float = readiness.STALL_SECONDS,
    ) -> None:
        self.prepared, self.launch, self.host = prepared, prepared.launch, prepared.host
        self.tunnel = Tunnel(self.host.ssh, prepared.local_port, self.launch.port, on_change)
        self.log = _log_place(self.host.name, self.launch.port)
        self.process: server.RemoteProcess | None = None
        self.adopted = False
        self.proof: readiness.Proof | None = None
        self.memory: EngineMemory | None = None
        self.gpu_used_mib: dict[int, int] = {}
        self._progress, self._stall, self._on_log = progress, stall, on_log
        self._stream: server.LogStream | None = None
        self._log_lock = threading.Lock()
        self._tunnelled = False
        self._partial = b""

    @property
    def url(self) -> str:
        """The near end of the tunnel."""
        return self.tunnel.url

    def client(self, **options: Any) -> Client:
        """A Client for this server, through the tunnel."""
        return Client(self.url, read_api_key(self.launch.api_key_file), **options)

    def start(self) -> RemoteServer:
        """Start or adopt it, open the tunnel, wait until ready, prove drafting.

        Raises DflashError; a server that was started here is ended then, an adopted one is left alone.
        """
        try:
            self._open()
        except BaseException:
            if self.adopted or self.process is None:
                self.close()
            else:
                self.stop()
            raise
        return self

    def _open(self) -> None:
        facts: dict[str, Any] = {"work": self.launch.same_work(), "nonce": self.launch.nonce}
        facts |= {"alias": self.launch.alias, "spec_type": self.launch.spec_type}
        facts |= {"model": self.launch.model, "draft": self.launch.draft}
        send_key(self.host, self.prepared.facts, self.launch)
        self.process, self.adopted = server.start(self.host, self.launch.port, self.launch.argv, facts)
        self._follow()
        self._prove()

    def restart(self) -> None:
        """Start it again after it ended. Raises DflashError; it is ended then, and the tunnel stays."""
        if self._stream:
            self._stream.close()
        try:
            self._open()
        except BaseException:
            with contextlib.suppress(DflashError):
                server.stop(self.host, self.launch.port)
            raise

    def _follow(self) -> None:
        self.log.write_bytes(b"")
        self._stream = server.LogStream(self.host, self.launch.port, self._keep_log).start()
        if not self._tunnelled:
            self._tunnelled = True
            self.tunnel.start()
        self.tunnel.wait_up(_UP_SECONDS)

    def _keep_log(self, piece: bytes) -> None:
        with self._log_lock, self.log.open("ab") as log:
            log.write(piece)
        if self._on_log:
            *lines, self._partial = (self._partial + piece).split(b"\n")
            for line in lines:
                self._on_log(line.decode("utf-8", errors="replace"))

    def _prove(self) -> None:
        """Prove it through the tunnel; a link that breaks meanwhile is not the server's fault."""
        for left in range(_PROOF_TRIES - 1, -1, -1):
            try:
                self._prove_once()
                return
            except ClientError as error:
                if not left or error.kind not in _LINK_FAULTS or self.failure() is not None:
                    raise
                self.tunnel.wait_up(_UP_SECONDS)

    def _prove_once(self) -> None:
        client = self.client(retries=0)
        nonce = str(self.process.facts.get("nonce")) if self.process else self.launch.nonce
        readiness.wait_ready(
            client, nonce, self.log, ended=self.failure, stall=self._stall, progress=self._progress
        )
        if self.launch.draft is not None:
            rests = self.adopted or self.proof is not None
            self.proof = readiness.prove_drafting(client, self.failure, may_rest=rests)
        self._account()

    def _account(self) -> None:
        """What llama-server says of its memory, and what the GPUs there have lost since before the start."""
        from dflashcpp.memory.engine import parse_log

        with self.log.open(encoding="utf-8", errors="replace") as lines:
            self.memory = parse_log(lines)
        if self.prepared.facts.gpus and not self.adopted:
            before = {gpu.index: gpu.free_mib for gpu in self.prepared.facts.gpus}
            now = {gpu.index: gpu.free_mib for gpu in self.host.facts().gpus}
            self.gpu_used_mib = {index: before[index] - now.get(index, before[index]) for index in before}

    def failure(self) -> DflashError | None:
        """Why it cannot go on: the server there ended, or the tunnel ended for good; None while it can."""
        if self._stream and self.ended:
            found = self._stream.process
            code = found.returncode if found and found.returncode is not None else 1
            error = explain_exit(self.log, code, when=f"on {self.host.name}")
            return DflashError(f"{self.host.name}: {error.message}", hint=error.hint)
        report = self.tunnel.report
        if report.final:
            return DflashError(f"{report.state}: {report.message}", hint=report.hint or None)
        return None

    @property
    def ended(self) -> bool:
        """Whether the server there has ended (the tunnel may still stand)."""
        return self._stream is not None and self._stream.ended.is_set()

    def watch(self, *, restart: bool = False, say: Callable[[str], None] = lambda text: None) -> None:
        """Stay until the server there or the tunnel ends for good; raises DflashError saying why.

        With `restart` a server that ended is started again, after a wait that grows and falls back after five
        good minutes; five failed starts in a row end it. A link that is down is no failed start.
        """
        failed, tries, began = 0, 0, time.monotonic()
        drafts, client = AcceptanceWatch(self.log), self.client(retries=0)
        while True:
            reason = self.failure()
            if reason is None:
                told = drafts.look(client)
                if told is not None:
                    say(f"warning: {told}")
                time.sleep(0.2)
                continue
            if not (restart and self.ended and failed < _MAX_FAILED_STARTS):
                raise reason
            tries = 0 if time.monotonic() - began > _STEADY_SECONDS else tries
            delay = backoff(tries)
            say(f"{reason.message}; starting it again in {delay:.0f} s")
            time.sleep(delay)
            tries, began = tries + 1, time.monotonic()
            try:
                self.restart()
                failed = 0
                say(f"llama-server is up again at {self.url}")
            except DflashError as error:
                failed += not (isinstance(error, FaultError) and not error.fault.lasting)
                say(error.message)

    def report(self) -> dict[str, Any]:
        """What a start showed, as plain values; memory in MiB."""
        from dflashcpp.memory import as_dict

        process, prepared = self.process, self.prepared
        return {
            "url": self.url,
            "host": self.host.name,
            "remote_port": self.launch.port,
            "pid": process.pid if process else None,
            "adopted": self.adopted,
            "spec_type": self.launch.spec_type,
            "memory": self.memory.as_dict() if self.memory else {},
            "rows": self.memory.table()[1] if self.memory else [],
            "plan": as_dict(prepared.plan) if prepared.plan else None,
            "gpus": [asdict(gpu) for gpu in prepared.facts.gpus],
            "gpu_used_mib": self.gpu_used_mib,
            "proof": asdict(self.proof) if self.proof else None,
            "argv": process.argv if process else self.launch.argv,
            "log": str(self.log),
            "warnings": list(self.launch.warnings),
        }

    def stop(self) -> server.RemoteProcess | None:
        """End the server there, tunnel and log. Raises DflashError when it could not be reached."""
        self.tunnel.close()
        try:
            found = server.stop(self.host, self.launch.port)
            if self._stream:
                self._stream.ended.wait(_LAST_LINES_SECONDS)
            return found
        except DflashError as error:
            raise DflashError(
                f"the server on {self.host.name} may still run: {error.message}",
                hint=f"when the host can be reached again: dflashcpp stop --ssh {self.host.name}",
            ) from error
        finally:
            self.close()

    def close(self) -> None:
        """End tunnel and log here; the server there goes on."""
        self.tunnel.close()
        if self._stream:
            self._stream.close()

    def __enter__(self) -> RemoteServer:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def _log_place(host: str, port: int) -> Path:
    """Where the far side's log is mirrored."""
    return paths.state_dir("remote", f"{re.sub(r'[^A-Za-z0-9._-]', '_', host)}-{port}") / "server.log"
