"""The plan: every MiB of a target and its drafter before anything is downloaded or started."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dflashcpp.errors import DflashError
from dflashcpp.memory import lines as of
from dflashcpp.memory.lines import Line
from dflashcpp.memory.model import Model
from dflashcpp.memory.settings import Cells, Settings, cells


@dataclass(frozen=True)
class Room:
    """Memory there is for us, in MiB: `total` of the device, `used` by others, `driver`'s own share.

    `residual` is what a process takes beyond llama.cpp's buffers, learned from an earlier run.
    """

    name: str
    total: float
    used: float = 0.0
    driver: float = 0.0
    residual: float = 0.0
    origin: str = "given"

    @property
    def free(self) -> float:
        return self.total - self.used - self.driver - self.residual


@dataclass(frozen=True)
class Saving:
    """Another way to run: the flags that change, MiB they free, and what that costs."""

    flags: str
    mib: float
    cost: str


@dataclass(frozen=True)
class Plan:
    """What a target and its drafter need under `settings`, line by line."""

    lines: tuple[Line, ...]
    settings: Settings
    target: Model
    drafter: Model | None = None
    room: Room | None = None
    savings: tuple[Saving, ...] = ()
    warnings: tuple[str, ...] = ()
    published: tuple[Mapping[str, Any], ...] = ()
    largest_context: int | None = None

    @property
    def place(self) -> str:
        """Where memory is scarce: the device, or the host of a CPU-only run."""
        return "device" if self.settings.on_device else "host"

    @property
    def total(self) -> float:
        """MiB needed there, the sum of the lines as shown."""
        return of.total(list(self.lines), self.place)

    @property
    def band(self) -> tuple[float, float]:
        """The total with every line as low and as high as its error allows."""
        there = [line for line in self.lines if line.place == self.place]
        slack = sum(line.mib * line.error for line in there)
        return self.total - slack, self.total + slack

    @property
    def fits(self) -> bool | None:
        """Whether the high end of the band fits the room; None when the room is not known."""
        return None if self.room is None else self.band[1] <= self.room.free

    @property
    def short(self) -> float:
        """MiB missing, 0 when it fits or nothing is known about the room."""
        return max(0.0, self.band[1] - self.room.free) if self.room else 0.0

    def mib(self, context: str, kind: str | None = None, place: str | None = None) -> float:
        """Sum of the lines of a context, to 0.01 MiB."""
        return of.total(
            [line for line in self.lines if line.context == context and kind in (None, line.kind)], place
        )


def make_lines(
    target: Model, drafter: Model | None, settings: Settings, *, beside: bool = True
) -> list[Line]:
    """Every line of target and drafter under `settings`.

    beside: also the compute buffers on the host beside a device, which double the work.
    """
    held = _held(target, settings)
    taps = _taps(target, drafter)
    drafting = drafter is not None
    types = (settings.cache_k, settings.cache_v)
    found = [
        *of.weights("target", target, settings, settings.gpu_layers),
        *of.caches("target", target, settings, held, types, settings.gpu_layers),
        *of.recurrent(target, settings, drafting),
        *of.target_compute(target, settings, held, taps, drafting=drafting, beside=beside),
        *of.target_outputs(target, settings, len(taps), drafting=drafting),
    ]
    return found + (_drafter_lines(target, drafter, settings, held, beside) if drafter else [])


def _held(target: Model, settings: Settings) -> Cells:
    context = settings.context or target.context
    if not context:
        raise DflashError(f"{target.source} names no context length", hint="say how long: -c N")
    return cells(settings, context, target.window)


def _taps(target: Model, drafter: Model | None) -> frozenset[int]:
    if drafter is None:
        return frozenset()
    return frozenset(int(tap) for tap in drafter.keys.get("target_layers", ()))


def _drafter_lines(
    target: Model, drafter: Model, settings: Settings, held: Cells, beside: bool
) -> list[Line]:
    own = of.draft_cells(settings, drafter, held)
    types = (settings.draft_cache_k, settings.draft_cache_v)
    return [
        *of.weights("draft", drafter, settings, settings.draft_gpu_layers),
        *of.caches("draft", drafter, settings, own, types, settings.draft_gpu_layers),
        *of.draft_compute(drafter, target, settings, own, beside=beside),
        *of.draft_outputs(drafter, target, settings, own),
    ]


def projector_lines(model: Model | Any, settings: Settings) -> list[Line]:
    """The vision part: its weights are exact, what it computes with is not known before an image."""
    size = sum(tensor.nbytes for tensor in model.tensors.values())
    place = "device" if settings.on_device else "host"
    return [
        of._line("mmproj", "weights", place, size),
        Line("mmproj", "compute", place, 256.0, of.GUESS, 1.0, "depends on the image"),
    ]


def warn(target: Model, drafter: Model | None, settings: Settings) -> list[str]:
    """What the reader should know about the numbers."""
    found = []
    if not target.known:
        found.append(
            f"{target.source}: the architecture {target.arch} is unknown to the planner; "
            "its caches and compute buffers are guesses with a wide band"
        )
    elif drafter is not None and not target.rules.get("taps"):
        found.append(f"llama.cpp at this base cannot read the layers of a {target.arch} target for a drafter")
    if settings.on_device and settings.gpu_layers <= len(target.layers):
        found.append("with part of the layers on the host the compute buffer is known to a quarter only")
    each = settings.context if settings.unified else settings.context // settings.parallel
    if target.context and each > target.context:
        found.append(f"-c gives a request {each} tokens, the target was made for {target.context}")
    if drafter is not None and drafter.embd != target.embd:
        found.append(f"the drafter's hidden size {drafter.embd} is not the target's {target.embd}")
    return found


# -- what frees how much --------------------------------------------------------------------------

_QUANTISED = "3 to 4 tok/s (published, RTX A4000), a little quality"


def savings(target: Model, drafter: Model | None, settings: Settings) -> list[Saving]:
    """Flags that free memory, what is cheap first and by MiB; a quantised KV cache comes last."""
    place = "device" if settings.on_device else "host"
    now = of.total(make_lines(target, drafter, settings, beside=False), place)
    found = []
    for rank, flags, other, cost in _variants(target, drafter, settings):
        lines = make_lines(target, drafter if rank != 3 else None, other, beside=False)
        freed = now - of.total(lines, place)
        if freed >= 1.0:
            found.append((rank, -freed, Saving(flags, round(freed, 2), cost)))
    return [saving for _, _, saving in sorted(found, key=lambda row: row[:2])]


def _variants(target: Model, drafter: Model | None, now: Settings) -> list[tuple[int, str, Settings, str]]:
    """(rank of the cost, flags, settings, cost in words); lower ranks cost less."""
    found: list[tuple[int, str, Settings, str]] = []
    if drafter is not None and not now.patched:
        found.append((0, "the patched build (dflashcpp build)", now.changed(patched=True), "nothing"))
    if not now.on_device and now.repack:
        found.append((1, "--no-repack", now.changed(repack=False), "slower matrix kernels on the CPU"))
    for size in (256, 128, 64):
        if size < now.ubatch:
            found.append((1, f"-ub {size}", now.changed(ubatch=size), "slower prompts"))
    if now.parallel > 1:
        found.append((1, "-np 1", now.changed(parallel=1), "one request at a time"))
    context = now.context or target.context
    for part in (2, 4):
        if context // part >= 4096:
            less = context // part // 256 * 256
            found.append((2, f"-c {less}", now.changed(context=less), "shorter context"))
    if drafter is not None and now.patched and not drafter.window and not now.draft_context:
        bound = now.changed(draft_context=4096)
        found.append((2, "--spec-draft-ctx-size 4096", bound, "fewer accepted drafts in long contexts"))
    if drafter is not None and now.on_device and now.draft_gpu_layers:
        found.append((2, "-ngld 0", now.changed(draft_gpu_layers=0), "the drafter computes on the CPU"))
    if drafter is not None:
        found.append((3, "no drafter", now, "the speed of the drafter"))
    return found + _on_host(target, now) + _quantised(drafter, now)


def _on_host(target: Model, now: Settings) -> list[tuple[int, str, Settings, str]]:
    """Blocks left on the host; nothing can be said while the weights of a block are not known."""
    if not now.on_device or not any(tensor.nbytes for tensor in target.tensors.values()):
        return []
    kept = [len(target.layers) + 1 - count for count in (4, 8)]
    return [
        (4, f"-ngl {count}", now.changed(gpu_layers=count), "much slower tokens")
        for count in kept
        if 0 < count < now.gpu_layers
    ]


def _quantised(drafter: Model | None, now: Settings) -> list[tuple[int, str, Settings, str]]:
    found = []
    if drafter is not None and now.draft_cache_k == now.draft_cache_v == "f16":
        less = now.changed(draft_cache_k="q8_0", draft_cache_v="q8_0")
        found.append((5, "-ctkd q8_0 -ctvd q8_0", less, "fewer accepted drafts"))
    if now.cache_k == now.cache_v == "f16":
        found.append((6, "-ctk q8_0 -ctv q8_0", now.changed(cache_k="q8_0", cache_v="q8_0"), _QUANTISED))
    return found


def largest_context(target: Model, drafter: Model | None, settings: Settings, room: Room) -> int:
    """The largest `-c` (a multiple of 256) whose plan fits the room; 0 when none does."""
    unit = 256 * (1 if settings.unified else settings.parallel)
    low, high = 0, max((target.context or 1 << 20) * settings.parallel // unit, 1)
    while low < high:
        middle = (low + high + 1) // 2
        if _fits(target, drafter, settings.changed(context=middle * unit), room):
            low = middle
        else:
            high = middle - 1
    return low * unit


def _fits(target: Model, drafter: Model | None, settings: Settings, room: Room) -> bool:
    lines = tuple(make_lines(target, drafter, settings, beside=False))
    return bool(Plan(lines, settings, target, drafter, room).fits)


# -- published measurements ---------------------------------------------------------------------------


def with_published(lines: Sequence[Line], values: Mapping[str, float], kinds: Sequence[str]) -> list[Line]:
    """`lines` with the published value (measured on a device) in place of those named."""
    found = list(lines)
    for name in kinds:
        context, _, kind = name.partition("_")
        mine = (context, kind, "device")
        if name in values:
            found = [
                replace(line, mib=values[name], origin=of.PUBLISHED, error=0.0)
                if (line.context, line.kind, line.place) == mine
                else line
                for line in found
            ]
    return found


def known_weights(mib: float, settings: Settings, error: float = 0.0, note: str = "") -> Line:
    """The weights of a target that is not here, as published."""
    place = "device" if settings.on_device else "host"
    return Line("target", "weights", place, mib, of.PUBLISHED, error, note)
