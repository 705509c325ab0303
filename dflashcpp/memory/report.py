"""The plan as plain values, for `--json`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from dflashcpp.memory import lines as of
from dflashcpp.memory import planning
from dflashcpp.memory.planning import Plan


def as_dict(made: Plan) -> dict[str, Any]:
    """The plan for `--json`: sums by context, every line with its origin, savings. MiB throughout."""
    contexts = dict.fromkeys(line.context for line in made.lines)
    sums = {context: _sums(made, context) for context in contexts}
    return {
        **sums,
        "total": round(made.total, 2),
        "band": [round(edge, 2) for edge in made.band],
        "host_total": round(of.total(list(made.lines), "host"), 2),
        "place": made.place,
        "room": _room_dict(made),
        "fits": made.fits,
        "short_by": round(made.short, 2),
        "max_context": made.largest_context,
        "engine": "patched" if made.settings.patched else "unpatched",
        "lines": [
            {
                "name": line.name,
                "context": line.context,
                "kind": line.kind,
                "place": line.place,
                "mib": round(line.mib, 2),
                "origin": line.origin,
                "error": line.error,
                "note": line.note,
            }
            for line in made.lines
        ],
        "savings": [{"flags": row.flags, "mib": row.mib, "cost": row.cost} for row in made.savings],
        "engines": _engines(made),
        "drafters": _drafters(made),
        "published": list(made.published),
        "warnings": list(made.warnings),
    }


def _engines(made: Plan) -> dict[str, Any]:
    """The same under our engine and the pristine one: sums by context, total."""
    found = {}
    for name, patched in (("patched", True), ("unpatched", False)):
        lines = planning.make_lines(made.target, made.drafter, made.settings.changed(patched=patched))
        kept = [line for line in made.lines if line.origin == of.PUBLISHED or line.context == "mmproj"]
        replaced = {(line.context, line.kind) for line in kept}
        other = replace(
            made, lines=(*kept, *(line for line in lines if (line.context, line.kind) not in replaced))
        )
        sums = {context: _sums(other, context) for context in dict.fromkeys(line.context for line in lines)}
        found[name] = {**sums, "total": round(other.total, 2)}
    return found


def _drafters(made: Plan) -> dict[str, Any]:
    """Weights, KV and compute of the pair's published drafters by version, under both engines."""
    found = {}
    for row in made.published:
        engines = {"unpatched": {**row["planned"], "total": row["total"]}, "patched": row["patched"]}
        found[f"v{row['version']}"] = {
            name: {
                key.removeprefix("draft_"): mib
                for key, mib in sums.items()
                if key.startswith("draft_") or key == "total"
            }
            for name, sums in engines.items()
        }
    return found


def _sums(made: Plan, context: str) -> dict[str, float]:
    """By kind where memory is scarce; the rest of the host under `host`."""
    sums: dict[str, float] = {}
    for line in made.lines:
        if line.context != context:
            continue
        kind = line.kind if line.place == made.place else "host"
        kind = "kv" if context == "draft" and kind == "kv_swa" else kind
        sums[kind] = round(sums.get(kind, 0.0) + round(line.mib, 2), 2)
    return sums


def _room_dict(made: Plan) -> dict[str, Any] | None:
    room = made.room
    if room is None:
        return None
    return {
        "name": room.name,
        "total": round(room.total, 2),
        "used_by_others": round(room.used, 2),
        "driver": round(room.driver, 2),
        "residual": round(room.residual, 2),
        "free": round(room.free, 2),
        "origin": room.origin,
    }
