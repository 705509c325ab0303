"""From what a person names (a pair, files, URLs, flags) to a plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflashcpp.errors import DflashError, UsageError
from dflashcpp.memory import lines as of
from dflashcpp.memory import measure, planning, published, residuals, sources
from dflashcpp.memory.lines import Line
from dflashcpp.memory.model import Model
from dflashcpp.memory.planning import Plan, Room
from dflashcpp.memory.residuals import Residual
from dflashcpp.memory.settings import Settings, from_flags, from_long_flags, to_flags
from dflashcpp.progress import SILENT, Progress

if TYPE_CHECKING:
    from dflashcpp.pairs import Pair


_FILE_ERROR = 0.1


@dataclass(frozen=True)
class _Models:
    """`facts`: the target is known by facts alone; `weights`: what they say its weights are."""

    target: Model
    drafter: Model | None
    facts: bool = False
    weights: Line | None = None


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
    if device_memory is not None and not 0 < device_memory < float("inf"):
        raise UsageError(f"--device-memory {device_memory:g}: must be a number of MiB above 0")
    known = _pair(pair, target)
    settings = _settings(known, flags, device_memory, patched)
    models = _models(known, target, drafter, type, settings, progress)
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
        warnings=(*_not_here(known, models), *planning.warn(models.target, models.drafter, settings), *told),
        published=tuple(published.published(known, models.target, settings)) if known else (),
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
    settings: Settings,
    progress: Progress,
) -> _Models:
    if pair is None:
        assert target is not None
        own = sources.drafter_of(drafter, recipe) if drafter is not None else None
        return _Models(_given_target(target), own)
    own = sources.drafter_of(drafter, recipe) if drafter is not None else _pair_drafter(pair, recipe)
    return _pair_target(pair, own, settings, progress)


def _given_target(target: str | Path) -> Model:
    model = sources.from_gguf(target)
    if model.arch == "dflash":
        raise DflashError(
            f"{target} is a drafter, not a target", hint="the target goes to -m, the drafter to -md"
        )
    return model


def _pair_target(pair: Pair, drafter: Model, settings: Settings, progress: Progress) -> _Models:
    """The target from the file here, from facts, or from the header on the Hub."""
    from dflashcpp.pairs import local_target

    here = local_target(pair)
    if here is not None:
        return _Models(sources.from_gguf(here), drafter)
    facts = pair.facts.get("target", {})
    model = sources.target_from_facts(facts, f"{pair.name} (facts)")
    if model is not None:
        return _Models(model, drafter, True, _known_weights(pair, facts, settings))
    url = _url(pair)
    progress.say(f"reading the header of {url}")
    return _Models(sources.from_gguf(url), drafter)


def _not_here(pair: Pair | None, models: _Models) -> list[str]:
    if pair is None or not models.facts:
        return []
    return [f"the target is not on this machine: planned from known facts ({pair.facts['origin']})"]


def _known_weights(pair: Pair, facts: Mapping[str, Any], settings: Settings) -> Line | None:
    """Measured, or told by the facts, or the size of the file, which holds a little more."""
    told = _memory_values(pair, 2).get("target_weights", facts.get("weights_mib"))
    if told is not None:
        return planning.known_weights(float(told), settings)
    size = pair.target.bytes
    if not size:
        return None
    note = "size of the file; the embeddings in it stay on the host"
    return planning.known_weights(size / of.MIB, settings, _FILE_ERROR, note)


def _url(pair: Pair) -> str:
    source = pair.target if pair.target.kind == "hub" else pair.target.fallback
    if source is None or source.kind != "hub":
        raise DflashError(
            f"the target of {pair.name} is not on this machine", hint=f"dflashcpp pull {pair.name}"
        )
    return f"https://huggingface.co/{source.repo}/resolve/{source.revision or 'main'}/{source.files[0]}"


def _pair_drafter(pair: Pair, recipe: str | None) -> Model:
    """The drafter as it was converted here before, from its checkpoint here, or from facts."""
    from dflashcpp.pairs import drafter_place, local_source, local_target

    kind = (recipe or pair.drafter.type or "Q4_K_M").upper()
    here, target = local_source(pair), local_target(pair)
    if here is None:
        return sources.drafter_from_facts(pair.facts["drafter"], kind, f"{pair.name} drafter (facts)")
    made = drafter_place(pair, here, target, kind) if target is not None else None
    return sources.drafter_of(made if made is not None and made.is_file() else here, kind)


def _memory_values(pair: Pair, version: int) -> Mapping[str, float]:
    for row in published.memory_rows(pair):
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
    """A target known by facts alone has the weights that were told, or none that can be said."""
    if not models.facts:
        return lines
    kept = [line for line in lines if (line.context, line.kind) != ("target", "weights")]
    return ([models.weights] if models.weights else []) + kept


def _with_engine(
    lines: list[Line], models: _Models, settings: Settings, wanted: bool | None
) -> tuple[list[Line], list[str]]:
    """The engine's compute buffers in place of formulas, and what there is to say about it."""
    if wanted is False:
        return lines, []
    reason = _cannot_ask(models, settings)
    try:
        measured = _ask_engine(models, settings) if reason is None else None
    except DflashError as error:
        if wanted:
            raise
        return lines, [f"planned by formulas, the engine could not be asked: {error.message}"]
    if measured is None and wanted:
        raise DflashError(
            f"the engine cannot be asked: {reason or 'this build cannot print both contexts'}",
            hint="dflashcpp build, or --no-engine",
        )
    if measured is None:
        return lines, []
    twice = 0.0 if settings.on_device else _tied_mib(models.target)
    return measure.with_engine(lines, measured), measure.disagreements(lines, measured, twice)


def _tied_mib(target: Model) -> float:
    """Embeddings that are the head as well: mapped once, the engine may count them twice."""
    return target.tensors["token_embd.weight"].nbytes / of.MIB if target.tied else 0.0


def _cannot_ask(models: _Models, settings: Settings) -> str | None:
    """Why llama-fit-params cannot tell the memory of this plan; None when it can."""
    if not settings.patched:
        return "the pristine llama.cpp cannot measure a drafter before a start"
    for model in (models.target, models.drafter):
        if model is not None and not (sources.is_gguf(model.source) and Path(model.source).is_file()):
            return f"{model.source} is not a GGUF file on this machine"
    if _fit_params(settings) is None:
        kind = "a GPU" if settings.on_device else "the CPU"
        return f"there is no patched build for {kind} here"
    return None


def _ask_engine(models: _Models, settings: Settings) -> measure.Measured | None:
    binary = _fit_params(settings)
    draft = models.drafter.source if models.drafter else None
    return measure.measure(binary, models.target.source, draft, to_flags(settings)) if binary else None


def _fit_params(settings: Settings) -> Path | None:
    """llama-fit-params of a build that can tell the memory this plan is about."""
    from dflashcpp.llamacpp import find_build

    build = find_build(patched=True)
    if build is None or (build.backend == "cpu") == settings.on_device:
        return None
    try:
        return build.binary("llama-fit-params")
    except DflashError:
        return None


def _largest(made: Plan, models: _Models) -> int:
    if made.room is None:
        raise DflashError(
            "no device was found to fit a context into", hint="say its memory: --device-memory MIB"
        )
    extra = sum(line.mib for line in made.lines if line.context == "mmproj" and line.place == made.place)
    if models.weights is not None:
        extra += models.weights.mib * (1 + models.weights.error)
    room = replace(made.room, used=made.room.used + extra)
    return planning.largest_context(models.target, models.drafter, made.settings, room)
