"""What llama-server says about its own memory, read from its log.

The lines (at `-lv 4`) come from llama.cpp: `load_tensors` (src/llama-model.cpp), the `llama_context`
constructor and `sched_reserve` (src/llama-context.cpp), `llama_kv_cache*` and `llama_memory_recurrent`
(src/), `alloc_compute_meta` (tools/mtmd/clip.cpp). Rules this reader follows:

- the measuring passes of `--fit` print the same lines at debug level: they are skipped;
- everything up to `loading draft model` belongs to the target, what follows to the drafter;
- a context that is told to extract layers or to sample on the device reserves again at its next
  decode, after both contexts exist; the number of graph nodes tells whose reserve it was;
- a later reserve of the same context replaces the earlier one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

CONTEXTS = ("target", "draft", "mmproj")
KINDS = ("weights", "kv", "kv_swa", "recurrent", "compute", "output")

_BUFFER = re.compile(
    r"(\S+):\s+(\S+)\s+(model|KV|RS|compute|output|LoRA|DSV4 .+ state) buffer size = +([0-9.]+) MiB"
)
_KIND = {
    "model": "weights",
    "LoRA": "weights",
    "KV": "kv",
    "RS": "recurrent",
    "compute": "compute",
    "output": "output",
}
_NODES = re.compile(r"sched_reserve: graph.*: nodes = (\d+)")
_MIB = 1 << 20
_CACHES = ("kv", "kv_swa", "recurrent")
_CLIP_WEIGHTS = re.compile(r"model size: +([0-9.]+) MiB")


@dataclass(frozen=True)
class Row:
    """One buffer: whose (`target`, `draft`, `mmproj`), what for (KINDS), where, and its size in MiB."""

    context: str
    kind: str
    device: str
    mib: float


@dataclass(frozen=True)
class EngineMemory:
    """The buffers llama-server holds, in the order of CONTEXTS and KINDS."""

    rows: tuple[Row, ...]

    def mib(self, context: str | None = None, kind: str | None = None, *, host: bool | None = None) -> float:
        """Sum in MiB over the rows that match; `host` selects memory of the host or of a device."""
        wanted = [row for row in self.rows if context in (None, row.context) and kind in (None, row.kind)]
        return sum(row.mib for row in wanted if host in (None, is_host(row.device)))

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Headers and rows for a person: one line a buffer, then the sums."""
        body = [[row.context, row.kind, row.device, f"{row.mib:.2f}"] for row in self.rows]
        for device in dict.fromkeys(row.device for row in self.rows):
            total = sum(row.mib for row in self.rows if row.device == device)
            body.append(["total", "", device, f"{total:.2f}"])
        return ["context", "memory", "device", "MiB"], body

    def as_dict(self) -> dict[str, dict[str, float]]:
        """`{context: {kind: MiB}}` over all devices, for `--json`."""
        found: dict[str, dict[str, float]] = {}
        for row in self.rows:
            kinds = found.setdefault(row.context, {})
            kinds[row.kind] = round(kinds.get(row.kind, 0.0) + row.mib, 2)
        return found


def is_host(device: str) -> bool:
    """Whether a buffer of this llama.cpp name (`CPU_Mapped`, `CUDA_Host`, `CUDA0` ...) is host memory."""
    return device.startswith(("CPU", "BLAS", "AMX")) or device.endswith("Host")


def with_props(log: EngineMemory, told: Mapping[str, Any] | None) -> EngineMemory:
    """`log` with what a patched server's `GET /props` says under `memory`, bytes by context and device.

    Those are the sizes now and to the byte, where the log has two digits of what was reserved. The log
    alone tells kinds of cache apart: its rows stay where they sum up to the same, and so do the kinds
    the answer does not have (output buffers, the mmproj). None (a server without our patches): the log.
    """
    rows = list(log.rows)
    for context in ("target", "draft"):
        for kinds, part in ((("weights",), "model"), (_CACHES, "context"), (("compute",), "compute")):
            rows = _replaced(rows, context, kinds, _sizes(told, context, part))
    rows.sort(key=lambda row: (CONTEXTS.index(row.context), KINDS.index(row.kind), is_host(row.device)))
    return EngineMemory(tuple(rows))


def _sizes(told: Mapping[str, Any] | None, context: str, part: str) -> dict[str, float] | None:
    """MiB by device; None where the answer is not what our server says."""
    try:
        found = [(str(row["device"]), int(row[part]) / _MIB) for row in (told or {})[context]]
    except (KeyError, TypeError, ValueError):
        return None
    return {device: mib for device, mib in found if mib} or None


def _replaced(
    rows: Sequence[Row], context: str, kinds: tuple[str, ...], sizes: Mapping[str, float] | None
) -> list[Row]:
    mine = [row for row in rows if row.context == context and row.kind in kinds]
    if sizes is None or (len(kinds) > 1 and _agree(mine, sum(sizes.values()))):
        return list(rows)
    others = [row for row in rows if row not in mine]
    return others + [Row(context, kinds[0], device, round(mib, 4)) for device, mib in sizes.items()]


def _agree(rows: Sequence[Row], mib: float) -> bool:
    """Whether rows of the log, each printed to 0.01 MiB, are the same as an exact sum."""
    return bool(rows) and abs(sum(row.mib for row in rows) - mib) <= 0.01 * len(rows)


def parse_log(lines: Iterable[str]) -> EngineMemory:
    """The memory told by a whole llama-server log; lines that mean nothing here are passed over."""
    reader = LogReader()
    for line in lines:
        reader.feed(line)
    return reader.memory()


@dataclass
class _Reserve:
    """The compute buffers of one `sched_reserve`, until its `graph` line says whose it is."""

    owner: str | None
    buffers: dict[str, float] = field(default_factory=dict)


class LogReader:
    """Reads a log line by line as the server writes it; `memory()` is valid at any moment."""

    def __init__(self) -> None:
        self._clear()

    def _clear(self) -> None:
        self._sizes: dict[tuple[str, str, str], float] = {}
        self._nodes: dict[str, int] = {}
        self._context = "target"
        self._measuring = False
        self._kv = "kv"
        self._building = False
        self._reserve: _Reserve | None = None

    def feed(self, line: str) -> None:
        """Take one line of the log."""
        if self._measuring:
            self._measuring = "fitting params to free memory took" not in line
            return
        buffer = _BUFFER.search(line)
        if buffer:
            self._add(buffer[1], buffer[2], buffer[3], float(buffer[4]))
            return
        self._follow(line)

    def memory(self) -> EngineMemory:
        """The buffers known so far."""
        order = sorted(
            self._sizes,
            key=lambda key: (CONTEXTS.index(key[0]), KINDS.index(key[1]), is_host(key[2]), key[2]),
        )
        return EngineMemory(tuple(Row(*key, round(self._sizes[key], 4)) for key in order))

    def _follow(self, line: str) -> None:
        nodes = _NODES.search(line)
        if nodes:
            self._end_reserve(int(nodes[1]))
        elif "fitting params to device memory" in line:
            self._measuring = True
        elif "load_model: loading model" in line:
            self._clear()  # a server that slept loads everything again
        elif "loading draft model" in line or "creating MTP draft context" in line:
            self._start("draft")
        elif "load_tensors: loading model tensors" in line:
            self._forget("weights")
        elif "constructing llama_context" in line:
            self._forget("kv", "kv_swa", "recurrent", "output", "compute")
            self._kv, self._building = "kv", True
        elif "creating non-SWA KV cache" in line:
            self._kv = "kv"
        elif "SWA KV cache" in line:
            self._kv = "kv_swa"
        elif "sched_reserve: reserving" in line:
            self._reserve = _Reserve(self._context if self._building else None)
        elif "clip_model_loader: model size" in line:
            found = _CLIP_WEIGHTS.search(line)
            self._sizes["mmproj", "weights", "clip"] = float(found[1]) if found else 0.0

    def _start(self, context: str) -> None:
        self._context = context
        self._forget(*KINDS)

    def _forget(self, *kinds: str) -> None:
        for key in [key for key in self._sizes if key[0] == self._context and key[1] in kinds]:
            del self._sizes[key]

    def _add(self, function: str, device: str, what: str, mib: float) -> None:
        kind = _KIND.get(what, "recurrent")
        if kind == "compute" and function != "sched_reserve":
            self._sizes["mmproj", kind, device] = mib
        elif kind == "compute" and self._reserve is not None:
            self._reserve.buffers[device] = mib
        else:
            key = (self._context, self._kv if kind == "kv" else kind, device)
            self._sizes[key] = self._sizes.get(key, 0.0) + mib

    def _end_reserve(self, nodes: int) -> None:
        if self._reserve is None:
            return
        owner = self._reserve.owner or self._whose(nodes)
        for key in [key for key in self._sizes if key[:2] == (owner, "compute")]:
            del self._sizes[key]
        for device, mib in self._reserve.buffers.items():
            self._sizes[owner, "compute", device] = mib
        self._nodes[owner] = nodes
        self._reserve, self._building = None, False

    def _whose(self, nodes: int) -> str:
        """Extracting layers leaves the target's graph as it was; sampling adds nodes to the drafter's."""
        if "draft" not in self._nodes or nodes == self._nodes.get("target"):
            return "target"
        return "draft"
