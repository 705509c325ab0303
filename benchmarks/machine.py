"""What a measurement was made on, and what else ran meanwhile."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dflashcpp.llamacpp import Build

BUSY_LOAD = 0.5
_IDLE = ("idle", "iowait", "guest", "guest_nice")  # guests are counted under user as well


@dataclass
class Foreign:
    """The share of the machine's time, 0 to 1, that processes other than ours took in a block."""

    share: float = 0.0
    pids: list[int] = field(default_factory=list)


def facts(builds: dict[str, Build], threads: int) -> dict[str, Any]:
    """Processor, cores, load just now, compiler and build digests: plain values."""
    return {
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "memory_gib": round(_memory() / 2**30, 1),
        "system": f"{platform.system()} {platform.release()}, {platform.machine()}",
        "load_before": round(os.getloadavg()[0], 2),
        "threads": threads,
        "compiler": compiler(next(iter(builds.values()))),
        "builds": {name: f"{build.version_string}, digest {build.digest}" for name, build in builds.items()},
        "patches": list(builds["ours"].patches) if "ours" in builds else [],
    }


def cpu_name() -> str:
    """As the kernel names it."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or "unknown"


def _memory() -> int:
    import psutil

    return int(psutil.virtual_memory().total)


def compiler(build: Build) -> str:
    """The tools the build was made with, as its manifest tells."""
    place = build.root / "manifest.json"
    if not place.is_file():
        return "compiler unknown"
    manifest = json.loads(place.read_text(encoding="utf-8"))
    names = [str(tool["version"]).splitlines()[0] for tool in manifest.get("tools", ())]
    return "; ".join(names) or "compiler unknown"


@contextmanager
def foreign(*pids: int) -> Iterator[Foreign]:
    """Watch a block: time that neither this process nor `pids` used."""
    found = Foreign(pids=list(pids))
    start, busy, own = time.monotonic(), _busy(), _own(pids)
    yield found
    wall = (time.monotonic() - start) * (os.cpu_count() or 1)
    spent = _busy() - busy - (_own(pids) - own)
    found.share = max(0.0, spent / wall) if wall > 0 else 0.0


def _busy() -> float:
    import psutil

    times = psutil.cpu_times()._asdict()
    return float(sum(value for name, value in times.items() if name not in _IDLE))


def _own(pids: tuple[int, ...]) -> float:
    import psutil

    total = 0.0
    for pid in (os.getpid(), *pids):
        times = psutil.Process(pid).cpu_times()
        total += times.user + times.system
    return total
