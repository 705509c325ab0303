"""`convert`: a checkpoint and its target into one GGUF, in one streaming pass."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflashcpp.borrowed import Borrowed, borrow, copy, needs_library
from dflashcpp.checkpoint import Checkpoint, open_checkpoint
from dflashcpp.drafter import Drafter
from dflashcpp.errors import DflashError
from dflashcpp.metadata import build_metadata
from dflashcpp.progress import SILENT, Progress
from dflashcpp.provenance import Provenance, provenance_of
from dflashcpp.target import Target, complete, token_number, tokenizer_for

if TYPE_CHECKING:
    from dflashcpp.gguf_file import GgufWriter
    from dflashcpp.quantize import Choice, Mix, Recipe

DEFAULT_TYPE = "Q4_K_M"


@dataclass(frozen=True)
class ConvertResult:
    """What a conversion made, or would make (`written` false)."""

    file: Path
    bytes: int
    drafter: Drafter
    flavour: str
    target: str
    type: str
    tensors: int
    types: dict[str, int]  # type: number of tensors
    weights_mib: float
    bits_per_weight: float
    fallbacks: tuple[str, ...]
    warnings: tuple[str, ...]
    written: bool = True

    def text(self) -> str:
        """A few lines for a person."""
        drafter = self.drafter
        counts = ", ".join(f"{count} {name}" for name, count in self.types.items())
        verb = "wrote" if self.written else "would write"
        kind = f"DFlash{'-2' if drafter.version == 2 else ''}, {self.flavour}"
        lines = [
            f"{verb} {self.file} ({self.bytes / 2**20:.2f} MiB)",
            f"{kind}: {drafter.layers} layers, hidden {drafter.hidden}, blocks of {drafter.block_size}",
            f"taps: outputs of target layers {drafter.target_layer_ids} "
            f"(in the file, as inputs of the next: {list(drafter.taps)})",
            f"target: {self.target}",
            f"weights: {counts}: {self.weights_mib:.2f} MiB, {self.bits_per_weight:.2f} bits per weight",
        ]
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """The JSON that `convert --json` prints."""
        return {
            "file": str(self.file),
            "bytes": self.bytes,
            "version": self.drafter.version,
            "type": self.type,
            "tensors": {"count": self.tensors, "types": self.types},
            "weights_mib": round(self.weights_mib, 3),
            "bits_per_weight": round(self.bits_per_weight, 4),
            "fallbacks": list(self.fallbacks),
            "warnings": list(self.warnings),
            "flavour": self.flavour,
            "target": self.target,
            "written": self.written,
            "drafter": self.drafter.to_dict(),
        }


@dataclass(frozen=True)
class Plan:
    """Everything decided before a byte of weights is read."""

    checkpoint: Checkpoint
    drafter: Drafter
    target: Target
    recipe: Recipe
    choices: dict[str, Choice]
    mix: Mix
    warnings: list[str]
    output: Path
    borrowed: list[Borrowed]

    def all_choices(self) -> list[Choice]:
        """Every tensor of the file in its order: the checkpoint's, then those copied from the target."""
        return [*self.choices.values(), *(item.choice() for item in self.borrowed)]


def convert(
    source: str | Path,
    *,
    target: str | Path | None = None,
    type: str = DEFAULT_TYPE,
    output: str | Path | None = None,
    tensor_types: Sequence[str] | Mapping[str, str] = (),
    threads: int | None = None,
    progress: Progress = SILENT,
    pure: bool = False,
    keep_selector: str | None = None,
    head: str | None = None,
    force: bool = False,
    config: str | Path | None = None,
    overrides: Mapping[str, Any] | None = None,
    dry_run: bool = False,
) -> ConvertResult:
    """Convert the drafter checkpoint `source` to a GGUF of the recipe `type`.

    source: `.safetensors` file, folder or Hub id; target: the target's GGUF (file or Hub
    `org/repo:QUANT`), folder or Hub id, found when left out; tensor_types: `NAME=TYPE` texts or a
    mapping; head: type in which the target's head is stored too (None: the target's own is used);
    overrides: values of config.json by path; force: allow F16 for DFlash-2; dry_run: decide
    and check everything, write nothing.

    Raises DflashError; the output is either complete or not there.
    """
    from dflashcpp.sources import resolve_source

    place = resolve_source(source, progress)
    opened, known = _open(place, config, overrides or {}, target, progress)
    with opened as checkpoint:
        plan = make_plan(
            checkpoint,
            place,
            target=known,
            type=type,
            output=output,
            tensor_types=tensor_types,
            pure=pure,
            keep_selector=keep_selector,
            head=head,
            force=force,
            progress=progress,
        )
        if dry_run:
            return _result(plan, _planned_bytes(plan, place), written=False)
        size = _write(plan, provenance_of(place, checkpoint, plan.target, progress), threads, progress)
        return _result(plan, size, written=True)


def _open(
    place: Path,
    config: str | Path | None,
    overrides: Mapping[str, Any],
    target: str | Path | None,
    progress: Progress,
) -> tuple[Checkpoint, str | Path | Target | None]:
    """The checkpoint and its target as far as known; a mask token given as text gets its number there."""
    from dflashcpp.checkpoint.settings import UnnumberedMask
    from dflashcpp.target_search import given_target

    try:
        return open_checkpoint(place, config, overrides=overrides), target
    except UnnumberedMask as error:
        if target is None:
            raise
        found = given_target(target, progress)
        number = token_number(found, error.text)
        checkpoint = open_checkpoint(place, config, overrides={**overrides, "mask_token_id": number})
        text = f"the mask token {error.text[:60]!r} of the config is number {number} in {found.source}"
        checkpoint.warnings.append(text)
        return checkpoint, found


def make_plan(
    checkpoint: Checkpoint,
    place: Path,
    *,
    target: str | Path | Target | None,
    type: str,
    output: str | Path | None,
    tensor_types: Sequence[str] | Mapping[str, str],
    pure: bool,
    keep_selector: str | None,
    head: str | None,
    force: bool,
    progress: Progress,
) -> Plan:
    """Find the target, fill the drafter in, choose every tensor's type. Reads headers only."""
    from dflashcpp.checkpoint.settings import numbering_warnings
    from dflashcpp.quantize import check_name, choose_types, mix_of, parse_overrides, recipe
    from dflashcpp.target_search import find_target

    chosen = recipe(type)
    _check_f16(chosen, checkpoint.drafter, force)
    found = find_target(checkpoint, place, target, progress)
    drafter, warnings = complete(checkpoint.drafter, found, str(checkpoint.files.weights[0]))
    texts = (
        [f"{k}={v}" for k, v in tensor_types.items()] if isinstance(tensor_types, Mapping) else tensor_types
    )
    choices = choose_types(
        chosen,
        _declared(checkpoint),
        overrides=parse_overrides(texts, keep_selector=keep_selector),
        pure=pure,
        gqa=drafter.heads // drafter.kv_heads,
        layers=drafter.layers,
    )
    drafter, borrowed = borrow(checkpoint, drafter, found.source, head)
    mix = mix_of(chosen, [*choices.values(), *(item.choice() for item in borrowed)])
    if checkpoint.drafter.target_layers is None:
        warnings += numbering_warnings(checkpoint.config, drafter.taps, found.layers)
    warnings = [*checkpoint.warnings, *warnings, *check_name(chosen, mix)]
    path = Path(output) if output is not None else Path(default_name(checkpoint, place, chosen.name))
    _check_output(path, checkpoint, found)
    return Plan(checkpoint, drafter, found, chosen, choices, mix, warnings, path, borrowed)


def _check_output(path: Path, checkpoint: Checkpoint, target: Target) -> None:
    """Raise DflashError, before hours of work, for a place that cannot be written or is an input."""
    from dflashcpp.gguf_file import check_place

    real = check_place(path)
    read = [*checkpoint.path.iterdir(), *checkpoint.files.weights, Path(target.source)]
    read += [checkpoint.files.config] if checkpoint.files.config else []
    for file in read:
        if file.suffix != ".gguf" or file == Path(target.source):
            _check_not_input(path, real, file)


def _check_not_input(path: Path, real: Path, file: Path) -> None:
    try:
        same = real.samefile(file)
    except OSError:  # one of the two is not there, or the target is a URL
        return
    if same:
        raise DflashError(
            f"{path} cannot be the output: the conversion reads {file}", hint="give another name with -o"
        )


def default_name(checkpoint: Checkpoint, place: Path, type_name: str) -> str:
    """`dflash-<model>-<TYPE>.gguf`, the model named as its repository or folder is."""
    from dflashcpp.provenance import model_name

    name = model_name(place, checkpoint)
    prefix = "" if name.lower().startswith("dflash") else "dflash-"
    return f"{prefix}{name}-{type_name}.gguf"


def _check_f16(recipe: Recipe, drafter: Drafter, force: bool) -> None:
    if recipe.name == "F16" and drafter.version == 2 and not force:
        raise DflashError(
            "F16 is not safe for a DFlash-2 drafter: some engines then overflow in half precision",
            hint="take BF16 (same size, exact for bf16 checkpoints), or pass --force",
        )


def _declared(checkpoint: Checkpoint) -> list[Any]:
    from dflashcpp.gguf_file import TensorInfo, TensorType

    return [
        TensorInfo(
            tensor.name,
            tuple(reversed(tensor.shape)),
            TensorType.I64 if tensor.store == "i64" else TensorType.F32,
            0,
            0,
        )
        for tensor in checkpoint.tensors.values()
    ]


def _declare(writer: GgufWriter, plan: Plan, provenance: Provenance) -> None:
    metadata = build_metadata(
        plan.drafter,
        provenance,
        file_type=plan.recipe.file_type,
        recipe=plan.recipe.name,
        parameters=plan.mix.parameters,
        tokenizer=tokenizer_for(plan.target, plan.drafter.vocab or plan.target.tokens),
    )
    for key, value in metadata.items():
        writer.add(key, value)
    for choice in plan.all_choices():
        writer.declare(choice.name, choice.ne, choice.type)


def _planned_bytes(plan: Plan, place: Path) -> int:
    from dflashcpp.gguf_file import GgufWriter

    writer = GgufWriter(plan.output)
    _declare(writer, plan, provenance_of(place, plan.checkpoint, plan.target, SILENT, hashed=False))
    return writer.header.size


def _write(plan: Plan, provenance: Provenance, threads: int | None, progress: Progress) -> int:
    from dflashcpp.gguf_file import GgufWriter
    from dflashcpp.quantize import load_libggml, needs_libggml
    from dflashcpp.streaming import stream

    needed = needs_libggml(plan.choices.values()) or needs_library(plan.borrowed)
    library = load_libggml(progress) if needed else None
    with GgufWriter(plan.output) as writer:
        _declare(writer, plan, provenance)
        expected = Drafter.from_gguf(writer.header)
        _check_same(expected, plan)
        writer.begin()
        stream(plan.checkpoint, plan.choices, writer, library, threads or os.cpu_count() or 1, progress)
        if plan.borrowed:
            copy(plan.borrowed, plan.checkpoint, writer, library, progress)
        writer.commit()
    return _check_written(plan)


def _check_same(read_back: Drafter, plan: Plan) -> None:
    """What a reader of the file will find must be the drafter that was meant, up to 32-bit floats."""
    from dataclasses import fields

    from dflashcpp.metadata import same_value

    for entry in fields(Drafter):
        ours, theirs = getattr(plan.drafter, entry.name), getattr(read_back, entry.name)
        if not same_value(ours, theirs):
            raise DflashError(
                f"{plan.output}: {entry.name} would be read back as {theirs}, it is {ours}",
                hint="this is a fault of dflashcpp; please report it with the config.json",
            )


def _check_written(plan: Plan) -> int:
    """Open the finished file again: every tensor, type and key as planned. Returns its size in bytes."""
    from dflashcpp.gguf_file import read_header

    header = read_header(plan.output)
    found = {name: (info.ne, int(info.type)) for name, info in header.tensors.items()}
    wanted = {choice.name: (tuple(choice.ne), int(choice.type)) for choice in plan.all_choices()}
    if found != wanted:
        different = sorted(
            name for name in found.keys() | wanted.keys() if found.get(name) != wanted.get(name)
        )
        raise DflashError(f"{plan.output} was not written as planned: {', '.join(different[:6])}")
    _check_same(Drafter.from_gguf(header), plan)
    return header.size


def _result(plan: Plan, size: int, *, written: bool) -> ConvertResult:
    return ConvertResult(
        file=plan.output,
        bytes=size,
        drafter=plan.drafter,
        flavour=plan.checkpoint.flavour.title,
        target=plan.target.source,
        type=plan.recipe.name,
        tensors=len(plan.all_choices()),
        types=plan.mix.counts,
        weights_mib=plan.mix.mib,
        bits_per_weight=plan.mix.bits_per_weight,
        fallbacks=tuple(f"{c.name}: {c.type.name} instead of {c.wanted.name}" for c in plan.mix.fallbacks),
        warnings=tuple(plan.warnings),
        written=written,
    )
