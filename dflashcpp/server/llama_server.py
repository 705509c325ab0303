"""`LlamaServer`: one llama-server child, started, proved, watched and ended."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from dflashcpp import paths
from dflashcpp.client import Client
from dflashcpp.errors import DflashError
from dflashcpp.progress import SILENT, Progress
from dflashcpp.server import diagnose, logs, readiness
from dflashcpp.server.flags import FlagTable, Given, Parsed, from_options, read_flags
from dflashcpp.server.launch import Launch, compose, environment, read_api_key
from dflashcpp.server.ports import check_port
from dflashcpp.server.preflight import check_files
from dflashcpp.server.process import Child, Identity, read_pidfile, write_pidfile

if TYPE_CHECKING:
    from dflashcpp.llamacpp import Build
    from dflashcpp.memory.account import Account, Watch
    from dflashcpp.memory.engine import EngineMemory
    from dflashcpp.memory.planning import Plan
    from dflashcpp.pairs import Pair

Value = str | int | float | bool | None


@dataclass(frozen=True)
class Engine:
    """A llama-server to run: its file, its flags, its base if known, whether our patches are in it."""

    binary: Path
    table: FlagTable
    base: str | None = None
    patched: bool = False


def find_engine(build: Build | Path | str | None = None) -> Engine:
    """The llama-server to run: of this build, at this path, or of the newest build in the cache.

    Raises DflashError when there is none.
    """
    if isinstance(build, str | Path):
        binary = Path(build).expanduser()
        return Engine(binary, read_flags(binary))
    if build is None:
        from dflashcpp.llamacpp import find_build

        build = find_build()
        if build is None:
            raise DflashError("llama.cpp is not built yet", hint="build it with: dflashcpp build")
    binary = build.binary("llama-server")
    return Engine(binary, read_flags(binary), build.base, bool(build.patches))


class LlamaServer:
    """A context manager around one llama-server.

        with LlamaServer("target.gguf", "dflash.gguf", spec_draft_n_max=4) as server:
            print(server.client().chat("Hello").text)

    `flags` are llama-server's long names with underscores (`ctx_size=4096`, `flash_attn="on"`, True for a
    switch); `extra` is passed on as it is. `port=0` takes a free one. `build`: a Build, the path of a
    llama-server, or the newest build in the cache. Entering starts it and waits until it has generated a
    token and, with a drafter, made a draft; leaving ends it. `memory_seconds`: how often its memory is
    looked at.
    """

    memory_seconds = 5.0

    def __init__(
        self,
        model: str | Path,
        draft: str | Path | None = None,
        *,
        port: int = 0,
        host: str = "127.0.0.1",
        alias: str | None = None,
        build: Build | Path | str | None = None,
        extra: Sequence[str] = (),
        log: Path | None = None,
        stall: float = readiness.STALL_SECONDS,
        progress: Progress = SILENT,
        **flags: Value,
    ) -> None:
        engine = find_engine(build)
        given = [*from_options(flags, engine.table), Given("--port", str(port)), Given("--host", host)]
        launch = prepare(engine, Parsed(tuple(given), (), tuple(extra)), model, draft, alias=alias)
        self._setup(launch, log, stall, progress)

    @classmethod
    def of(
        cls,
        launch: Launch,
        *,
        log: Path | None = None,
        stall: float = readiness.STALL_SECONDS,
        progress: Progress = SILENT,
    ) -> LlamaServer:
        """A server for a launch that was put together already."""
        made = cls.__new__(cls)
        made._setup(launch, log, stall, progress)
        return made

    def _setup(self, launch: Launch, log: Path | None, stall: float, progress: Progress) -> None:
        self.launch = launch
        self.log = log or folder_of(launch.port) / "server.log"
        self.proof: readiness.Proof | None = None
        self._noted: Identity | None = None
        self.reasons: list[str] = []
        self.stopped = False
        self.supervisor: Identity | None = None
        self._stall, self._progress = stall, progress
        self._child: Child | None = None
        self._memory: EngineMemory | None = None
        self._samples: Watch | None = None

    @property
    def url(self) -> str:
        """The server's address."""
        return self.launch.url

    @property
    def argv(self) -> list[str]:
        """Its command line."""
        return self.launch.argv

    @property
    def warnings(self) -> tuple[str, ...]:
        """Risks that were taken."""
        return self.launch.warnings

    @property
    def pid(self) -> int:
        """The child's process id."""
        return self._running().pid

    @property
    def returncode(self) -> int | None:
        """None while it runs (or before it was started); negative when a signal ended it."""
        return self._child.returncode if self._child else None

    @property
    def pidfile(self) -> Path:
        """Where this server is noted while it runs."""
        return folder_of(self.launch.port) / "server.json"

    @property
    def memory(self) -> Account | None:
        """Memory planned, told by llama-server, and held by its process until now; None before a start."""
        return self.account()

    @functools.cached_property
    def plan(self) -> Plan | None:
        """The memory this launch will need, from the headers of its files; None where that cannot be told."""
        from dflashcpp.memory import plan

        launch = self.launch
        flags = [word for flag in launch.flags if _counts_for_memory(flag) for word in flag.argv()]
        try:
            return plan(
                target=launch.model,
                drafter=launch.draft,
                mmproj=next((flag.value for flag in launch.flags if flag.name == "--mmproj"), None),
                flags=flags,
                patched=launch.patched,
                with_savings=False,
            )
        except DflashError:
            return None

    def shortage(self) -> str | None:
        """One sentence when the plan says that the launch does not fit; None when it fits or nobody knows."""
        made = self.plan
        if made is None or made.room is None or made.fits is not False:
            return None
        return (
            f"this needs about {made.total:.0f} MiB and {made.room.name} has {made.room.free:.0f} MiB free, "
            f"{made.short:.0f} MiB too little: `dflashcpp plan` shows what saves memory"
        )

    def account(self) -> Account | None:
        """The same as `memory`."""
        if self._memory is None:
            return None
        from dflashcpp.memory.account import Account, sample

        held = sample(self._child.pid) if self._child and self.returncode is None else None
        before = self._samples.samples if self._samples else ()
        return Account(self._memory, self.plan, (*before, held) if held else before)

    def growth_note(self) -> str | None:
        """One sentence each time its memory grew by much since the last; None otherwise."""
        return self._samples.growth_note() if self._samples else None

    def client(self, **options: Any) -> Client:
        """A Client for this server."""
        return Client(self.url, read_api_key(self.launch.api_key_file), **options)

    def start(self) -> LlamaServer:
        """Start, wait until ready, prove drafting. Raises DflashError; the child is ended then."""
        self.stopped, self.proof = False, None
        try:
            return self.start_again()
        except BaseException:
            self._forget()
            raise

    def start_again(self) -> LlamaServer:
        """The same after the child ended by itself: it stays noted, and `stopped` if it was stopped."""
        check_port(self.launch.host, self.launch.port)
        self.log.parent.mkdir(parents=True, exist_ok=True)
        logs.rotate(self.log)
        child = Child(self.argv, self.log, environment=environment())
        try:
            child.start()
            self._child = child
            self._note(ready=False)
            self._prove()
            self._note(ready=True)
        except BaseException:
            child.stop()
            raise
        return self

    def _prove(self) -> None:
        client = self.client(retries=0)
        readiness.wait_ready(
            client,
            self.launch.nonce,
            self.log,
            ended=self.failure,
            stall=self._stall,
            progress=self._progress,
        )
        if self.launch.draft is not None:
            again = self.proof is not None
            self.proof = readiness.prove_drafting(client, self.failure, may_rest=again)
        self._memory = self._read_memory(client)
        self._watch_memory()

    def _read_memory(self, client: Client) -> EngineMemory:
        from dflashcpp.memory.engine import parse_log, with_props

        with self.log.open(encoding="utf-8", errors="replace") as lines:
            log = parse_log(lines)
        with suppress(DflashError):  # the log is enough
            return with_props(log, client.props().get("memory"))
        return log

    def _watch_memory(self) -> None:
        from dflashcpp.memory.account import Watch

        if self._samples is not None:
            self._samples.stop()
        self._samples = Watch(self.pid, self.memory_seconds).start()
        self._learn_memory()

    def _end_watching(self) -> None:
        if self._samples is None or not self._samples.stop():
            return
        from dflashcpp.memory.account import growth

        self._learn_memory()
        grown = growth(self._samples.samples)
        if grown is not None and grown.samples > 1:
            self._progress.say(
                f"its memory: {grown.first:.0f} MiB after the start, {grown.peak:.0f} at most, "
                f"{grown.last:.0f} at the end"
            )

    def _learn_memory(self) -> None:
        """Keep what the device held beyond the buffers, for the next plan."""
        from dflashcpp.memory import residuals

        account = self.account()
        if account is not None:
            with suppress(OSError):
                residuals.learn(account.residual, residuals.build_of(self.launch.binary))

    def _note(self, *, ready: bool) -> None:
        identity = self._running().look()
        if identity is None:
            return  # it ended at once: waiting for it will say why
        launch = self.launch
        facts: dict[str, Any] = {
            "url": launch.url,
            "port": launch.port,
            "alias": launch.alias,
            "model": launch.model,
        }
        facts |= {"draft": launch.draft, "argv": self.argv, "work": launch.same_work(), "log": self.log}
        facts |= {"api_key_file": launch.api_key_file, "ready": ready, "restarts": self.reasons}
        facts |= {"supervisor": asdict(self.supervisor) if self.supervisor else None}
        write_pidfile(self.pidfile, identity, **facts)
        self._noted = identity

    def _forget(self) -> None:
        """Take our note away. What another server on this port noted there stays: it is found by it."""
        noted = read_pidfile(self.pidfile)
        if self._noted is not None and (noted is None or noted[0] == self._noted):
            self.pidfile.unlink(missing_ok=True)

    def failure(self, when: str = "") -> DflashError | None:
        """Why the child ended; None while it runs."""
        code = self.returncode
        return None if code is None else diagnose.explain_exit(self.log, code, when=when)

    def stop(self, grace: float = 10.0) -> int | None:
        """End the child and only it; its exit code. One that is looked after is not started again."""
        self.stopped = True
        if self._child is None:
            return None
        self._end_watching()
        code = self._child.stop(grace)
        self._forget()
        return code

    def report(self) -> dict[str, Any]:
        """What a start showed, as plain values: address, pid, argv, proof of drafting, memory in MiB."""
        memory = self.memory
        headers, rows = memory.table() if memory else ([], [])
        return {
            "url": self.url,
            "pid": self.pid,
            "spec_type": self.launch.spec_type,
            "memory": memory.as_dict() if memory else {},
            "headers": headers,
            "rows": rows,
            "proof": asdict(self.proof) if self.proof else None,
            "argv": self.argv,
            "log": str(self.log),
            "warnings": list(self.warnings),
        }

    def _running(self) -> Child:
        if self._child is None:
            raise DflashError("the server was not started", hint="use it in a with block, or call start()")
        return self._child

    def __enter__(self) -> LlamaServer:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def _counts_for_memory(flag: Given) -> bool:
    """Whether the planner knows this flag."""
    from dflashcpp.memory.settings import from_flags

    try:
        return not from_flags(flag.argv())[1]
    except DflashError:
        return False


def spare_threads() -> int:
    """Threads for a server that others must work beside: the cores but one.

    With as many threads as cores, one busy neighbour makes every thread wait at each barrier: on two cores
    163 tok/s became 12 to 19.
    """
    return max(1, (os.cpu_count() or 2) - 1)


def folder_of(port: int) -> Path:
    """Where the log and the pidfile of the server on this port are."""
    return paths.state_dir("servers", str(port))


def prepare(
    engine: Engine,
    parsed: Parsed,
    model: str | Path,
    draft: str | Path | None,
    *,
    recommended: Mapping[str, Any] | None = None,
    alias: str | None = None,
) -> Launch:
    """Check the two files and put the launch together, without starting anything. Raises DflashError."""
    model_path = _existing(model, "-m")
    draft_path = _existing(draft, "-md") if draft is not None else None
    checked = check_files(model_path, draft_path, engine.base)
    launch = compose(
        engine.table,
        engine.binary,
        parsed.flags,
        parsed.verbatim,
        model=model_path,
        draft=draft_path,
        depth=checked.drafter.max_draft if checked.drafter else None,
        version=checked.drafter.version if checked.drafter else None,
        trained_context=checked.target_context,
        recommended=recommended,
        alias=alias,
    )
    return replace(launch, patched=engine.patched, warnings=(*checked.warnings, *launch.warnings))


def _existing(path: str | Path, flag: str) -> Path:
    found = Path(path).expanduser()
    if found.is_dir():
        raise DflashError(f"{flag} {path} is a folder", hint="pass the GGUF file itself")
    if not found.exists():
        raise DflashError(f"{flag} {path}: there is no such file", hint="known pairs: dflashcpp pairs")
    return found.absolute()


def pair_launch(
    engine: Engine,
    pair: Pair,
    parsed: Parsed,
    *,
    with_draft: bool = True,
    type: str | None = None,
    progress: Progress = SILENT,
) -> Launch:
    """The launch of a known pair: files fetched and converted where they are not there yet."""
    from dflashcpp.pairs import ensure_drafter, ensure_target

    model = ensure_target(pair, progress)
    draft = ensure_drafter(pair, progress, type=type, target=model) if with_draft else None
    return prepare(engine, parsed, model, draft, recommended=pair.flags, alias=pair.name)
