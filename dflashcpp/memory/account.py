"""Planned, told by the engine, held by the process: the three side by side, and how they grow.

Pure functions and small objects; the server calls them with its own process id, log and plan.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from dflashcpp.errors import DflashError
from dflashcpp.memory.engine import EngineMemory, LogReader
from dflashcpp.memory.planning import Plan

MIB = 1 << 20
FIRST_TOLD = 64.0


@dataclass(frozen=True)
class Sample:
    """Memory of a process and its children at one moment, MiB. `device` None: not told, or no device."""

    at: float
    rss: float
    anonymous: float
    device: float | None = None


def sample(pid: int) -> Sample | None:
    """Look at process `pid` and its children now; None when it is gone."""
    import psutil

    from dflashcpp.memory.device import gpus

    try:
        root = psutil.Process(pid)
        family = [root, *root.children(recursive=True)]
        infos = [process.memory_info() for process in family]
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return None
    rss = sum(info.rss for info in infos) / MIB
    shared = sum(getattr(info, "shared", 0) for info in infos) / MIB
    pids = [process.pid for process in family]
    held = [mib for mib in (gpu.of(pids) for gpu in gpus()) if mib is not None]
    return Sample(time.time(), rss, max(0.0, rss - shared), sum(held) if held else None)


@dataclass(frozen=True)
class Growth:
    """From the first sample to the highest and the last one, MiB, on the device or of the process."""

    first: float
    peak: float
    last: float
    samples: int

    @property
    def grown(self) -> float:
        return self.peak - self.first


def growth(samples: Sequence[Sample]) -> Growth | None:
    """How memory grew; None without samples. The device counts where it is told, else the process."""
    if not samples:
        return None
    device = [one.device for one in samples if one.device is not None]
    series = device if len(device) == len(samples) else [one.anonymous for one in samples]
    return Growth(series[0], max(series), series[-1], len(series))


class Watch:
    """Samples a process every `seconds` in a thread of its own, until `stop` or the process is gone.

    Keeps every sample of the first `keep`, then every second one, and so on: a long run costs no more.
    """

    def __init__(
        self,
        pid: int,
        seconds: float = 5.0,
        keep: int = 512,
        look: Callable[[int], Sample | None] | None = None,
    ) -> None:
        self._pid, self._seconds, self._keep, self._look = pid, seconds, keep, look or sample
        self._samples: list[Sample] = []
        self._stride = self._count = 0
        self._peak: Sample | None = None
        self._telling = FIRST_TOLD
        self._over = threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="memory", daemon=True)

    def start(self) -> Watch:
        self._thread.start()
        return self

    def stop(self) -> bool:
        """End watching; False when it was ended before."""
        first = not self._over.is_set()
        self._over.set()
        if self._thread.is_alive():
            self._thread.join(timeout=2 * self._seconds + 1)
        return first

    def growth_note(self) -> str | None:
        """One sentence when memory grew by more than was told before (first 64 MiB, then twice as much)."""
        grown = growth(self.samples)
        if grown is None or grown.grown < self._telling:
            return None
        self._telling = 2 * grown.grown
        return (
            f"its memory grew by {grown.grown:.0f} MiB since the start "
            f"({grown.first:.0f} MiB then, {grown.peak:.0f} MiB at most)"
        )

    @property
    def samples(self) -> tuple[Sample, ...]:
        """What was kept, the highest moment included, in order of time."""
        with self._lock:
            kept = {one.at: one for one in self._samples}
            if self._peak is not None:
                kept[self._peak.at] = self._peak
        return tuple(kept[at] for at in sorted(kept))

    def _run(self) -> None:
        while not self._over.is_set():
            try:
                seen = self._look(self._pid)
            except DflashError:
                # a device that does not answer now may do so the next time; this moment has no figure
                self._over.wait(self._seconds)
                continue
            if seen is None:
                return
            self._take(seen)
            self._over.wait(self._seconds)

    def _take(self, seen: Sample) -> None:
        with self._lock:
            if self._count % (1 << self._stride) == 0:
                self._samples.append(seen)
            self._count += 1
            if len(self._samples) > self._keep:
                self._samples = self._samples[::2]
                self._stride += 1
            if self._peak is None or _size(seen) > _size(self._peak):
                self._peak = seen


def _size(one: Sample) -> float:
    return one.anonymous if one.device is None else one.device


@dataclass(frozen=True)
class Account:
    """One run: what was planned, what llama-server told, what the process really holds (MiB)."""

    engine: EngineMemory
    plan: Plan | None = None
    samples: tuple[Sample, ...] = ()
    _order: tuple[str, ...] = field(default=("target", "draft", "mmproj"), repr=False)

    @property
    def process(self) -> float | None:
        """MiB the process holds: on the device where that is told, else its own pages in memory."""
        return _size(self.samples[-1]) if self.samples else None

    @property
    def residual(self) -> float | None:
        """What the device held at most beyond llama.cpp's buffers; None where the device does not tell."""
        held = [one.device for one in self.samples if one.device is not None]
        return max(held) - self.engine.mib(host=False) if held else None

    @property
    def growth(self) -> Growth | None:
        """How the process grew from the first sample on; None without samples."""
        return growth(self.samples)

    def mib(self, context: str | None = None, kind: str | None = None, *, host: bool | None = None) -> float:
        """MiB of the engine's buffers that match, as `EngineMemory.mib`."""
        return self.engine.mib(context, kind, host=host)

    def rows(self) -> list[tuple[str, str, float | None, float | None]]:
        """(context, kind, planned, engine) MiB; None where one of them says nothing."""
        planned = _planned(self.plan)
        told = {
            (context, kind): mib
            for context, kinds in self.engine.as_dict().items()
            for kind, mib in kinds.items()
        }
        keys = sorted({*planned, *told}, key=lambda key: (self._order.index(key[0]), key[1]))
        return [(*key, planned.get(key), told.get(key)) for key in keys]

    def table(self) -> tuple[list[str], list[list[str]]]:
        """The three side by side for a person."""
        body = [
            [context, kind, _text(plan), _text(engine), ""] for context, kind, plan, engine in self.rows()
        ]
        plan = sum(row[2] or 0.0 for row in self.rows()) if self.plan else None
        body.append(["total", "", _text(plan), _text(self.engine.mib()), _text(self.process)])
        return ["context", "memory", "planned", "engine", "process"], body

    def __str__(self) -> str:
        """The table as text, in MiB."""
        headers, body = self.table()
        lines = [headers, *body]
        widths = [max(len(line[at]) for line in lines) for at in range(len(headers))]
        return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)

    def as_dict(self) -> dict[str, Any]:
        """For `--json`: the engine's buffers by context and kind, then the three side by side, growth."""
        grown = self.growth
        return {
            **self.engine.as_dict(),
            "lines": [
                {"context": context, "kind": kind, "planned": plan, "engine": engine}
                for context, kind, plan, engine in self.rows()
            ],
            "planned": round(sum(row[2] or 0.0 for row in self.rows()), 2) if self.plan else None,
            "engine": round(self.engine.mib(), 2),
            "process": None if self.process is None else round(self.process, 2),
            "residual": None if self.residual is None else round(self.residual, 2),
            "growth": None
            if grown is None
            else {"first": _round(grown.first), "peak": _round(grown.peak), "last": _round(grown.last)},
        }


def _round(mib: float) -> float:
    return round(mib, 2)


def _text(mib: float | None) -> str:
    return "n/a" if mib is None else f"{mib:.2f}"


def _planned(plan: Plan | None) -> dict[tuple[str, str], float]:
    """The plan by (context, kind); what reading layers adds is part of the compute buffer by then."""
    sums: dict[tuple[str, str], float] = {}
    for line in plan.lines if plan else ():
        kind = "compute" if line.kind == "extraction" else line.kind
        key = (line.context, kind)
        sums[key] = round(sums.get(key, 0.0) + round(line.mib, 2), 2)
    return sums


# -- when it ran out ----------------------------------------------------------------------------------

_OUT_OF_MEMORY = re.compile(
    r"out of memory|insufficient memory|_M_range_check|invalid vector subscript|ErrorOutOfDeviceMemory"
    r"|failed to allocate (?:buffer|compute|output|CUDA|Vulkan)|unable to allocate \S+ buffer"
    r"|not enough memory|std::bad_alloc|drafter needs \d+ MiB on"
)
_DRAFTER = re.compile(r"drafter needs \d+ MiB on|_M_range_check|invalid vector subscript")
_TARGET_ALONE = re.compile(r"the target alone takes \d+ MiB")
_TASK = re.compile(r"launch_slot_: id +\d+ \| task +(-?\d+) \| processing task")
_DONE = re.compile(r"print_timing: id +\d+ \| task +(-?\d+) \|")


@dataclass(frozen=True)
class OutOfMemory:
    """Memory ran out: in which phase (`load`, `first token`, `request N`), the line that told, advice."""

    phase: str
    line: str
    advice: str


def out_of_memory(lines: Iterable[str]) -> OutOfMemory | None:
    """Where in a llama-server log memory ran out, and what to change; None when it did not."""
    reader, ready = LogReader(), False
    started: list[str] = []
    finished: set[str] = set()
    for line in lines:
        reader.feed(line)
        ready = ready or "listening on" in line or "model loaded" in line
        task, done = _TASK.search(line), _DONE.search(line)
        if task:
            started.append(task[1])
        if done:
            finished.add(done[1])
        if _OUT_OF_MEMORY.search(line):
            phase = _phase(ready, started, finished)
            return OutOfMemory(phase, line.strip(), _advice(phase, line, reader.memory()))
    return None


def _phase(ready: bool, started: Sequence[str], finished: set[str]) -> str:
    if not ready:
        return "load"
    if not finished:
        return "first token"
    return f"request {len(started)}"


def _advice(phase: str, line: str, memory: EngineMemory) -> str:
    if phase == "load":
        if _TARGET_ALONE.search(line):
            return "the target alone does not fit: lower -c or -ub, or -ngl with fewer layers"
        loaded = memory.mib("target", "compute") and not memory.mib("draft", "kv")
        if loaded or _DRAFTER.search(line):
            return "the target fits, the drafter does not: lower -c or -ub, or pass -ngld 0"
        if not memory.mib("target", "weights"):
            return "the target's weights do not fit: -ngl with fewer layers, or a smaller quantisation"
        return "the caches do not fit: lower -c, or use -np 1"
    if phase == "first token":
        return (
            "the first request makes the compute buffer larger, because the drafter reads layers of the "
            "target: lower -ub"
        )
    return (
        "memory grew, or another program took it: compare with `dflashcpp status`; keep a margin by a "
        "lower -c"
    )
