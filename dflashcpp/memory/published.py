"""A pair's published memory beside what we plan for the same drafters, with and without our patches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dflashcpp.memory import lines as of
from dflashcpp.memory import planning, sources
from dflashcpp.memory.lines import Line
from dflashcpp.memory.model import Model
from dflashcpp.memory.settings import Settings

if TYPE_CHECKING:
    from dflashcpp.pairs import Pair

_LATER = ("extraction", "output", "readback")


def memory_rows(pair: Pair) -> list[Mapping[str, Any]]:
    """The measurements of a pair that are about memory."""
    return [row for row in pair.measured if str(row.get("what", "")).startswith("memory in MiB")]


def published(pair: Pair, target: Model, settings: Settings) -> list[dict[str, Any]]:
    """What was measured on a device elsewhere, and what we plan for the same drafter on it.

    `planned` and `total` are the unpatched engine's, as it was measured: right after the start, before
    the first request adds what reading layers takes (`with_first_request`). The totals take the published
    value where a line cannot be planned: the target's weights, and the layout of a DFlash-2 drafter's
    buffer in the llama.cpp of August 2026. `patched` is what our engine needs for the same.
    """
    there = settings.changed(
        on_device=True, gpu_layers=Settings.gpu_layers, draft_gpu_layers=Settings.draft_gpu_layers
    )
    return [_row(pair, target, there, row) for row in memory_rows(pair)]


def _row(pair: Pair, target: Model, settings: Settings, row: Mapping[str, Any]) -> dict[str, Any]:
    version = int(row.get("version", 2))
    drafter = _drafter(pair, row, version)
    values: Mapping[str, float] = row["values"]
    same = _same(row, settings)
    bare = planning.make_lines(
        target, drafter, settings.changed(patched=False, draft_sampling=False), beside=False
    )
    ours = planning.make_lines(target, drafter, settings.changed(patched=True), beside=False)
    return {
        "drafter": f"DFlash v{version}",
        "version": version,
        "origin": row.get("origin", "published"),
        "settings": row.get("settings", ""),
        "same_settings": same,
        "published": dict(values),
        "planned": _by_name(bare),
        "total": _total(bare, values, settings, ["draft_compute"] if same else []),
        "with_first_request": round(sum(line.mib for line in bare if line.kind == "extraction"), 2),
        "patched": {**_by_name(ours), "total": _total(ours, values, settings, [])},
    }


def _same(row: Mapping[str, Any], settings: Settings) -> bool:
    asked = (int(row.get("context", 0)), int(row.get("ubatch", 0)), 1)
    return asked == (settings.context, settings.ubatch, settings.parallel)


def _total(
    lines: Sequence[Line], values: Mapping[str, float], settings: Settings, kinds: Sequence[str]
) -> float | None:
    """MiB on the device; None where the target's weights were not published."""
    if "target_weights" not in values:
        return None
    counted = [
        line
        for line in lines
        if line.kind not in _LATER and (line.context, line.kind) != ("target", "weights")
    ]
    counted = planning.with_published(counted, values, kinds)
    counted.append(planning.known_weights(values["target_weights"], settings))
    return round(of.total(counted, "device"), 2)


def _drafter(pair: Pair, row: Mapping[str, Any], version: int) -> Model:
    facts = {**pair.facts["drafter"], "version": version}
    return sources.drafter_from_facts(
        facts, str(row.get("type", "Q4_K_M")), f"{pair.name} v{version}", tuple(row.get("tensor_types", ()))
    )


def _by_name(lines: Sequence[Line]) -> dict[str, float]:
    """MiB on the device by `context_kind`; all caches of a drafter are its `kv`."""
    names: dict[str, float] = {}
    for line in lines:
        if line.place != "device" or (line.context, line.kind) == ("target", "weights"):
            continue
        kind = "kv" if line.context == "draft" and line.kind == "kv_swa" else line.kind
        key = f"{line.context}_{kind}"
        names[key] = round(names.get(key, 0.0) + line.mib, 2)
    return names
