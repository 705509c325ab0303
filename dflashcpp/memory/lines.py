"""The memory of one context, line by line: weights, caches, compute and output buffers."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from dflashcpp.memory import repack
from dflashcpp.memory.drafters import draft_graph, inject_graph, is_v2
from dflashcpp.memory.graph import Graph, beside_device_bytes, device_bytes, host_bytes
from dflashcpp.memory.layers import Batch
from dflashcpp.memory.model import Layer, Model
from dflashcpp.memory.patched_drafters import patched_draft_graph
from dflashcpp.memory.settings import Cells, Settings, cells, pad
from dflashcpp.memory.targets import target_graph

MIB = 1 << 20
EXACT, FORMULA, ENGINE, PUBLISHED, GUESS = "exact", "formula", "engine", "published", "guess"
_UNKNOWN = 0.5  # how far off what is computed for an unknown architecture may be


@dataclass(frozen=True)
class Line:
    """One number of a plan. `place`: `device` or `host`; `origin`: how the number is known.

    `error`: how far off it may be, as a part of it (0.02: two percent either way).
    """

    context: str
    kind: str
    place: str
    mib: float
    origin: str
    error: float = 0.0
    note: str = ""

    @property
    def name(self) -> str:
        return f"{self.context} {self.kind}" + (" (host)" if self.place == "host" else "")


def _line(context: str, kind: str, place: str, size: float, origin: str = EXACT, **more: object) -> Line:
    return Line(context, kind, place, size / MIB, origin, **more)  # type: ignore[arg-type]


def block_of(name: str) -> int | None:
    """The block a tensor belongs to; None for what stands outside of the blocks."""
    match = re.match(r"blk\.(\d+)\.", name)
    return int(match[1]) if match else None


def on_gpu(settings: Settings, layers: int, gpu_layers: int) -> tuple[int, bool]:
    """First block on the device, and whether the output layer is there (load_tensors, llama-model.cpp)."""
    if not settings.on_device:
        return layers, False
    first = max(layers + 1 - gpu_layers, 0)
    return first, gpu_layers > 0


_INPUT_TENSORS = ("token_embd.weight", "per_layer_token_embd.weight")


def weights(context: str, model: Model, settings: Settings, gpu_layers: int) -> Iterator[Line]:
    """Weights on the device and on the host. A tied head is a second copy on the device.

    On the CPU alone the file is mapped, and matrices it can compute faster with are copied beside it.
    """
    if not settings.on_device and settings.repack:
        mapped, copied = repack.split(model.tensors, model.tied)
        yield _line(context, "weights", "host", mapped, note="mapped from the file")
        if copied:
            yield _line(context, "weights", "host", copied, note="copied for this processor: --no-repack")
        return
    first, output = on_gpu(settings, len(model.layers), gpu_layers)
    device = host = 0
    for name, tensor in model.tensors.items():
        block = block_of(name)
        there = block >= first if block is not None else output and name not in _INPUT_TENSORS
        device += tensor.nbytes if there else 0
        host += 0 if there else tensor.nbytes
    if output and model.tied and "token_embd.weight" in model.tensors:
        device += model.tensors["token_embd.weight"].nbytes
    if device:
        yield _line(context, "weights", "device", device)
    if host:
        yield _line(context, "weights", "host", host)


def _row_bytes(kind: str, elements: int) -> int:
    from dflashcpp.gguf_file import TensorType, row_bytes

    return row_bytes(TensorType[kind.upper()], elements)


def caches(
    context: str, model: Model, settings: Settings, held: Cells, types: tuple[str, str], gpu_layers: int
) -> Iterator[Line]:
    """KV of full and of sliding layers (llama_kv_cache), split where the layers are split."""
    origin = EXACT if model.known else GUESS
    first, _ = on_gpu(settings, len(model.layers), gpu_layers)
    sizes: dict[tuple[str, str], int] = {}
    for index, layer in enumerate(model.layers):
        if layer.recurrent or not layer.own_kv or not layer.kv_heads:
            continue
        count = (held.swa if layer.sliding else held.per_stream) * held.streams
        key = ("kv_swa" if layer.sliding else "kv", "device" if index >= first else "host")
        sizes[key] = sizes.get(key, 0) + count * _kv_bytes(layer, types, _widest(model, settings))
    for (kind, place), size in sizes.items():
        yield _line(context, kind, place, size, origin, error=0.0 if model.known else _UNKNOWN)


def _widest(model: Model, settings: Settings) -> int:
    """Without flash attention all V rows are as long as the longest ([TAG_V_CACHE_VARIABLE])."""
    if settings.flash:
        return 0
    return max((layer.kv_row[1] for layer in model.layers), default=0)


def _kv_bytes(layer: Layer, types: tuple[str, str], widest: int) -> int:
    k, v = layer.kv_row
    return _row_bytes(types[0], k) + _row_bytes(types[1], max(v, widest))


def rollback(model: Model, settings: Settings, drafting: bool) -> int:
    """Recurrent states kept beside the last: one for every drafted token where the engine can go back."""
    return settings.draft_max if drafting and model.rules.get("rollback") else 0


def recurrent(model: Model, settings: Settings, drafting: bool) -> Iterator[Line]:
    """The states of recurrent layers, f32, (1 + n_max) of them a slot (llama_memory_recurrent)."""
    if model.ssm is None:
        return
    first, _ = on_gpu(settings, len(model.layers), settings.gpu_layers)
    planes = settings.parallel * (1 + rollback(model, settings, drafting))
    size = 4 * sum(model.ssm.row) * planes
    for place, count in _split_layers(model, first).items():
        known = {"origin": EXACT} if model.known else {"origin": GUESS, "error": _UNKNOWN}
        yield _line("target", "recurrent", place, size * count, **known)


def _split_layers(model: Model, first: int) -> Mapping[str, int]:
    counts: dict[str, int] = {}
    for index, layer in enumerate(model.layers):
        if layer.recurrent:
            place = "device" if index >= first else "host"
            counts[place] = counts.get(place, 0) + 1
    return counts


def target_batch(model: Model, settings: Settings, held: Cells, *, drafting: bool) -> Batch:
    """The worst batch llama-server reserves for (llama_context::sched_reserve)."""
    block = settings.block if drafting else 1
    outputs = min(settings.batch, held.context, settings.parallel * block)
    tokens = min(held.asked, settings.batch, settings.ubatch)
    return Batch(
        tokens=pad(tokens, settings.parallel),
        sequences=settings.parallel,
        streams=held.streams,
        outputs=min(tokens, outputs),
        kv_cells=held.per_stream,
        swa_cells=held.swa,
        flash=settings.flash,
        rotate_k=_rotates(model, settings.cache_k, "k"),
        rotate_v=_rotates(model, settings.cache_v, "v"),
        widen_k=settings.on_device and _quantised(settings.cache_k),
        widen_v=settings.on_device and _quantised(settings.cache_v),
        rollback=rollback(model, settings, drafting),
    )


def _rotates(model: Model, kind: str, which: str) -> bool:
    """A quantised cache is rotated where its heads are equally wide, a multiple of 64 (llama_kv_cache).

    Full and sliding layers have a cache each.
    """
    own = [layer for layer in model.layers if not layer.recurrent and layer.kv_heads]
    widths: dict[bool, set[int]] = {}
    for layer in own:
        widths.setdefault(layer.sliding, set()).add(layer.head_k if which == "k" else layer.head_v)
    even = all(len(found) == 1 and next(iter(found)) % 64 == 0 for found in widths.values())
    return _quantised(kind) and even and bool(own)


def _quantised(kind: str) -> bool:
    return kind not in ("f32", "f16", "bf16")


Sizes = tuple[int, int]  # bytes where the graph runs, bytes on the host beside a device


def _sizes(graph: Graph, on_device: bool, beside: bool) -> Sizes:
    if not on_device:
        return host_bytes(graph), 0
    return device_bytes(graph), beside_device_bytes(graph) if beside else 0


@functools.lru_cache(maxsize=256)
def _target_sizes(model: Model, batch: Batch, on_device: bool, beside: bool) -> Sizes:
    return _sizes(target_graph(model, batch), on_device, beside)


def _compute(context: str, sizes: Sequence[Sizes], settings: Settings, error: float) -> Iterator[Line]:
    """The largest of the graphs a context reserves for, on the device and on the host."""
    place, origin = "device" if settings.on_device else "host", _by(error)
    yield _line(context, "compute", place, max(size for size, _ in sizes), origin, error=error)
    host = max(size for _, size in sizes)
    if host:
        yield _line(context, "compute", "host", host, origin, error=error)


def _by(error: float) -> str:
    return GUESS if error >= _UNKNOWN else FORMULA


def target_compute(
    model: Model, settings: Settings, held: Cells, taps: frozenset[int], *, drafting: bool, beside: bool
) -> Iterator[Line]:
    """Reserved at start, and what reading the drafter's layers adds: our engine reserves that at start
    as well, the pristine one with the first request.

    `beside`: also what stands on the host beside a device.
    """
    error = _UNKNOWN if not model.known else 0.25 if _partly(model, settings) else 0.02
    batch = target_batch(model, settings, held, drafting=drafting)
    before = _target_sizes(model, batch, settings.on_device, beside)
    yield from _compute("target", [before], settings, error)
    if not taps:
        return
    after = _target_sizes(model, replace(batch, layer_inputs=taps), settings.on_device, False)
    if after[0] > before[0]:
        place = "device" if settings.on_device else "host"
        added = _line("target", "extraction", place, after[0] - before[0], _by(error), error=error)
        yield replace(
            added, note="layers the drafter reads" if settings.patched else "with the first request"
        )


def _partly(model: Model, settings: Settings) -> bool:
    return settings.on_device and settings.gpu_layers <= len(model.layers)


def draft_settings(settings: Settings, drafter: Model, held: Cells) -> Settings:
    """The drafter's own batch sizes (common_base_params_to_speculative; patches/src/dflash-reserve.h)."""
    if not settings.patched:
        return settings
    block = int(drafter.keys.get("block_size", 16))
    rows = settings.draft_ubatch or min(128, settings.ubatch)
    rows = max(rows, settings.parallel * settings.block, 1)
    return settings.changed(ubatch=rows, batch=rows, draft_max=min(settings.draft_max, block - 1))


def draft_compute(
    drafter: Model, target: Model, settings: Settings, held: Cells, *, beside: bool
) -> Iterator[Line]:
    """The buffer of the draft context: the block, and in the patched engine also the injection.

    A whole prompt chunk is injected in the buffer of the block, a few rows in one of their own.
    """
    graphs = _draft_graphs(drafter, target, settings, held)
    sizes = [_sizes(graph, settings.on_device, beside) for graph in graphs]
    if settings.patched:
        block, chunk, few = sizes
        sizes = [(max(block[0], chunk[0]) + few[0], max(block[1], chunk[1]) + few[1])]
    yield from _compute("draft", sizes, settings, 0.03 if settings.on_device else 0.01)


def _draft_graphs(drafter: Model, target: Model, settings: Settings, held: Cells) -> list[Graph]:
    """What the drafter's context reserves for."""
    asked = settings.parallel * settings.block
    own = draft_settings(settings, drafter, held)
    most = min(held.context, own.batch, own.ubatch)
    whole = pad(most, settings.parallel)
    batch = Batch(
        tokens=whole,
        sequences=settings.parallel,
        streams=held.streams,
        outputs=whole,
        kv_cells=held.per_stream,
        swa_cells=held.swa,
        flash=settings.flash,
        rotate_k=_rotates(drafter, settings.draft_cache_k, "k"),
        rotate_v=_rotates(drafter, settings.draft_cache_v, "v"),
        widen_k=settings.on_device and _quantised(settings.draft_cache_k),
        widen_v=settings.on_device and _quantised(settings.draft_cache_v),
    )
    sampled = min(asked, whole) if settings.draft_sampling and not is_v2(drafter) else 0
    if not settings.patched:
        return [draft_graph(drafter, target, batch, sampled_rows=sampled)]
    trained = settings.parallel * int(drafter.keys.get("block_size", 0)) or asked
    rows = max(min(asked, trained), settings.parallel)
    tokens = pad(min(whole, rows), settings.parallel)
    block = replace(batch, tokens=tokens, outputs=tokens)
    return [
        patched_draft_graph(drafter, target, block, sampled_rows=min(sampled, tokens)),
        inject_graph(drafter, replace(batch, tokens=most, sequences=1, streams=1)),
        inject_graph(drafter, replace(batch, tokens=min(whole, rows), sequences=1, streams=1)),
    ]


def _outputs(context: str, model: Model, settings: Settings, size: int) -> Iterator[Line]:
    """Rows the program reads back: pinned host memory with a device, plain memory without.

    A context begins with one row of logits a slot, which is what llama-server's log tells; the first
    request makes it `size` bytes without a word in the log (output_reserve, llama-context.cpp).
    """
    first = 4 * model.tokens * settings.parallel
    yield _line(context, "output", "host", first, EXACT)
    if size > first:
        yield _line(context, "readback", "host", size - first, EXACT, note="with the first request")


def target_outputs(model: Model, settings: Settings, taps: int, *, drafting: bool) -> Iterator[Line]:
    """Logits of the rows of a verify step, and the tapped layers of a whole batch (output_reserve)."""
    rows = settings.parallel * (settings.block if drafting else 1)
    size = 4 * (model.tokens * rows + taps * model.embd * settings.batch)
    yield from _outputs("target", model, settings, size)


def draft_outputs(drafter: Model, target: Model, settings: Settings, held: Cells) -> Iterator[Line]:
    """A DFlash-2 block asks for no logits: its candidates come back in rows of their own."""
    own = draft_settings(settings, drafter, held)
    rows = settings.parallel * (1 if is_v2(drafter) else own.block)
    row = drafter.embd
    if is_v2(drafter) and settings.patched:
        row = int(drafter.keys["selector_top_k"]) * (int(drafter.keys["selector_top_k"]) + 1)
    nextn = row * (own.batch if is_v2(drafter) else rows)
    size = 4 * (target.tokens * rows + nextn)
    if settings.draft_sampling and not is_v2(drafter):
        size += 4 * rows * (3 * target.tokens + 1)
    yield from _outputs("draft", target, settings, size)


def total(lines: list[Line], place: str | None = None) -> float:
    """The sum in MiB of the lines as they are shown, to 0.01."""
    return math.fsum(round(line.mib, 2) for line in lines if place in (None, line.place))


def draft_cells(settings: Settings, drafter: Model, held: Cells) -> Cells:
    """The draft context has the target's length or its own bound, and its own ubatch.

    A bound holds one injection pass and one block a slot at least (patches/src/dflash-reserve.h).
    """
    own = draft_settings(settings, drafter, held)
    context = held.context
    if settings.patched and settings.draft_context:
        least = settings.parallel * (own.ubatch + settings.block)
        context = min(context, max(settings.draft_context, least))
    return cells(own.changed(parallel=settings.parallel), context, drafter.window)
