"""From what a person names (a pair, files, URLs, flags) to a plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflashcpp.errors import DflashError, UsageError
from dflashcpp.memory import lines as of
from dflashcpp.memory import measure, planning, residuals, sources
from dflashcpp.memory.lines import Line
from dflashcpp.memory.model import Model
from dflashcpp.memory.planning import Plan, Room
from dflashcpp.memory.residuals import Residual
from dflashcpp.memory.settings import Settings, from_flags, from_long_flags, to_flags
from dflashcpp.progress import SILENT, Progress

if TYPE_CHECKING:
    from dflashcpp.pairs import Pair


@dataclass(frozen=True)
class _Models:
    target: Model
    drafter: Model | None
    published: Mapping[str, float]


def plan(
    pair: str | None = None,
    *,
    target: str | Path | None = None,
    drafter: str | Path | None = None,
    mmproj: str | Path | None = None,
    type: str | None = None,
    flags: Sequence[str] = (),
    device_memory: float | None = None,
    patched: bool = True,
    engine: bool | None = None,
    max_context: bool = False,
    with_savings: bool = True,
    progress: Progress = SILENT,
) -> Plan:
    """What `pair`, or `target` with `drafter`, will need.

    target, drafter, mmproj: a GGUF file or its http(s) URL (only the header is read); drafter may be
    a checkpoint, planned as converted with `type`. flags: llama-server's. device_memory: MiB to fit
    into; left out: read from the device, else the machine's memory. patched: our engine or pristine.
    engine: ask our build's llama-fit-params; None: when there is a build and both files are here.

    Raises DflashError and UsageError, naming file or flag.
    """
    known = _pair(pair, target)
    models = _models(known, target, drafter, type, progress)
    settings = _settings(known, flags, device_memory, patched)
    room = _room(settings, device_memory)
    found = planning.make_lines(models.target, models.drafter, settings)
    found = _with_weights(found, models)
    found, told = _with_engine(found, models, settings, engine)
    if mmproj is not None:
        found += planning.projector_lines(sources.headers_of(mmproj), settings)
    made = Plan(
        lines=tuple(found),
        settings=settings,
        target=models.target,
        drafter=models.drafter,
        room=room,
        warnings=(*planning.warn(models.target, models.drafter, settings), *told),
        published=tuple(_published(known, models, settings)),
        savings=tuple(planning.savings(models.target, models.drafter, settings)) if with_savings else (),
    )
    if max_context:
        made = replace(made, largest_context=_largest(made, models))
    return made


def _pair(name: str | None, target: str | Path | None) -> Pair | None:
    if name is not None and target is not None:
        raise UsageError("give a pair or -m, not both")
    if target is not None:
        return None
    from dflashcpp.pairs import load_pair

    return load_pair(name)


def _models(
    pair: Pair | None,
    target: str | Path | None,
    drafter: str | Path | None,
    recipe: str | None,
    progress: Progress,
) -> _Models:
    if pair is None:
        assert target is not None
        own = sources.drafter_of(drafter, recipe) if drafter is not None else None
        return _Models(_given_target(target), own, {})
    own = sources.drafter_of(drafter, recipe) if drafter is not None else _pair_drafter(pair, recipe)
    model, values = _pair_target(pair, progress)
    return _Models(model, own, values)


def _given_target(target: str | Path) -> Model:
    model = sources.from_gguf(target)
    if model.arch == "dflash":
        raise DflashError(
            f"{target} is a drafter, not a target", hint="the target goes to -m, the drafter to -md"
        )
    return model


def _pair_target(pair: Pair, progress: Progress) -> tuple[Model, Mapping[str, float]]:
    """The target from the file here, from facts, or from the header on the Hub."""
    from dflashcpp.pairs import local_target

    here = local_target(pair)
    if here is not None:
        return sources.from_gguf(here), {}
    facts = pair.facts.get("target", {})
    model = sources.target_from_facts(facts, f"{pair.name} (facts)")
    if model is not None:
        return model, _memory_values(pair, 2)
    url = _url(pair)
    progress.say(f"reading the header of {url}")
    return sources.from_gguf(url), {}


def _url(pair: Pair) -> str:
    source = pair.target if pair.target.kind == "hub" else pair.target.fallback
    if source is None or source.kind != "hub":
        raise DflashError(
            f"the target of {pair.name} is not on this machine", hint=f"dflashcpp pull {pair.name}"
        )
    return f"https://huggingface.co/{source.repo}/resolve/{source.revision or 'main'}/{source.files[0]}"


def _pair_drafter(pair: Pair, recipe: str | None) -> Model:
    from dflashcpp.pairs import local_source

    kind = recipe or pair.drafter.type or "Q4_K_M"
    here = local_source(pair)
    if here is not None:
        return sources.drafter_of(here, kind)
    return sources.drafter_from_facts(pair.facts["drafter"], kind, f"{pair.name} drafter (facts)")


def _memory_rows(pair: Pair) -> list[Mapping[str, Any]]:
    return [row for row in pair.measured if str(row.get("what", "")).startswith("memory in MiB")]


def _memory_values(pair: Pair, version: int) -> Mapping[str, float]:
    for row in _memory_rows(pair):
        if int(row.get("version", 2)) == version:
            values: Mapping[str, float] = row["values"]
            return values
    return {}


def _settings(
    pair: Pair | None, flags: Sequence[str], device_memory: float | None, patched: bool
) -> Settings:
    from dflashcpp.memory.device import gpus

    base = from_long_flags(dict(pair.flags)) if pair else Settings()
    settings, rest = from_flags(flags, base)
    if rest:
        raise UsageError(f"plan does not know {rest[0]}", hint="flags that cost no memory can be left out")
    for_device = pair is not None and "gpu-layers" in pair.flags
    on_device = device_memory is not None or for_device or bool(gpus())
    return settings.changed(on_device=on_device and settings.gpu_layers > 0, patched=patched)


def _room(settings: Settings, device_memory: float | None) -> Room | None:
    from dflashcpp.memory import device

    if device_memory is not None:
        return Room("the given device", device_memory)
    if not settings.on_device:
        return device.host_room()
    found = device.gpus()
    if not found:
        return None
    learned = _residual(found[0].uuid, found[0].driver, settings.patched)
    room = found[0].room(learned.mib if learned else 0.0)
    return replace(room, origin=f"{room.origin}, residual learned {learned.when}") if learned else room


def _residual(uuid: str, driver: str, patched: bool) -> Residual | None:
    """What an earlier run with our newest build showed this device to take beyond the buffers."""
    from dflashcpp.llamacpp import find_build

    build = find_build(patched=patched)
    if build is None:
        return None
    where = residuals.build_of(build.root / "bin" / "llama-server")
    return residuals.recall(residuals.key_of(uuid, driver, where))


def _with_weights(lines: list[Line], models: _Models) -> list[Line]:
    """A target known by facts alone has published weights, or none that can be said."""
    if not models.published:
        return lines
    kept = [line for line in lines if (line.context, line.kind) != ("target", "weights")]
    return planning.with_published(kept, models.published, ["target_weights"])


def _with_engine(
    lines: list[Line], models: _Models, settings: Settings, wanted: bool | None
) -> tuple[list[Line], list[str]]:
    """The engine's compute buffers in place of formulas, and what there is to say about it."""
    if wanted is False:
        return lines, []
    try:
        measured = _ask_engine(models, settings)
    except DflashError as error:
        if wanted:
            raise
        return lines, [f"planned by formulas, the engine could not be asked: {error.message}"]
    if measured is None and wanted:
        raise DflashError(
            "the engine cannot be asked: it needs a patched build for this device and both files here",
            hint="dflashcpp build, or --no-engine",
        )
    if measured is None:
        return lines, []
    return measure.with_engine(lines, measured), measure.disagreements(lines, measured)


def _ask_engine(models: _Models, settings: Settings) -> measure.Measured | None:
    """The engine's numbers; None without a build for this, or where a file is not here."""
    files = [model.source for model in (models.target, models.drafter) if model is not None]
    if not all(sources.is_gguf(file) and Path(file).is_file() for file in files):
        return None
    binary = _fit_params(settings)
    if binary is None:
        return None
    draft = models.drafter.source if models.drafter else None
    return measure.measure(binary, models.target.source, draft, to_flags(settings))


def _fit_params(settings: Settings) -> Path | None:
    """llama-fit-params of a build that can tell the memory this plan is about."""
    from dflashcpp.llamacpp import find_build

    build = find_build(patched=True) if settings.patched else None
    if build is None or (build.backend == "cpu") == settings.on_device:
        return None
    try:
        return build.binary("llama-fit-params")
    except DflashError:
        return None


def _published(pair: Pair | None, models: _Models, settings: Settings) -> list[dict[str, Any]]:
    """What was measured elsewhere beside what we plan for the same engine, unpatched.

    The totals take the published value where a line cannot be planned: the target's weights, and the
    layout of a DFlash-2 drafter's buffer in the llama.cpp of August 2026.
    """
    if pair is None or not models.published:
        return []
    rows = []
    for row in _memory_rows(pair):
        version = int(row.get("version", 2))
        drafter = _published_drafter(pair, row, version)
        bare = settings.changed(patched=False, draft_sampling=False)
        planned = planning.make_lines(models.target, drafter, bare, beside=False)
        counted = [line for line in planned if line.kind not in ("extraction", "output", "readback")]
        same = int(row.get("context", 0)) == settings.context and settings.ubatch == int(row.get("ubatch", 0))
        kinds = ["target_weights"] + (["draft_compute"] if same and settings.parallel == 1 else [])
        counted = planning.with_published(
            [line for line in counted if (line.context, line.kind) != ("target", "weights")],
            row["values"],
            kinds,
        )
        rows.append(
            {
                "drafter": f"DFlash v{version}",
                "origin": row.get("origin", "published"),
                "settings": row.get("settings", ""),
                "same_settings": same,
                "published": dict(row["values"]),
                "planned": _by_name([line for line in planned if line.place == "device"]),
                "total": round(of.total(counted, "device"), 2),
            }
        )
    return rows


def _published_drafter(pair: Pair, row: Mapping[str, Any], version: int) -> Model:
    facts = {**pair.facts["drafter"], "version": version}
    return sources.drafter_from_facts(
        facts, str(row.get("type", "Q4_K_M")), f"{pair.name} v{version}", tuple(row.get("tensor_types", ()))
    )


def _by_name(lines: Sequence[Line]) -> dict[str, float]:
    names: dict[str, float] = {}
    for line in lines:
        kind = "kv" if line.context == "draft" and line.kind == "kv_swa" else line.kind
        key = f"{line.context}_{kind}"
        names[key] = round(names.get(key, 0.0) + line.mib, 2)
    return names


def _largest(made: Plan, models: _Models) -> int:
    if made.room is None:
        raise DflashError(
            "no device was found to fit a context into", hint="say its memory: --device-memory MIB"
        )
    extra = sum(line.mib for line in made.lines if line.context == "mmproj" and line.place == made.place)
    extra += float(models.published.get("target_weights", 0.0))
    room = replace(made.room, used=made.room.used + extra)
    return planning.largest_context(models.target, models.drafter, made.settings, room)


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
        "published": list(made.published),
        "warnings": list(made.warnings),
    }


def _engines(made: Plan) -> dict[str, Any]:
    """The same under our engine and the pristine one: sums by context, total."""
    found = {}
    for name, patched in (("patched", True), ("unpatched", False)):
        lines = planning.make_lines(
            made.target, made.drafter, made.settings.changed(patched=patched), beside=False
        )
        kept = [line for line in made.lines if line.origin == of.PUBLISHED or line.context == "mmproj"]
        replaced = {(line.context, line.kind) for line in kept}
        other = replace(
            made, lines=(*kept, *(line for line in lines if (line.context, line.kind) not in replaced))
        )
        sums = {context: _sums(other, context) for context in dict.fromkeys(line.context for line in lines)}
        found[name] = {**sums, "total": round(other.total, 2)}
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
