"""`inspect`: what a checkpoint or GGUF is, and what is wrong with it. Reads headers only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflashcpp.drafter import ARCHITECTURE, Drafter
from dflashcpp.errors import DflashError

if TYPE_CHECKING:
    from dflashcpp import dialects
    from dflashcpp.gguf_file import Header


@dataclass(frozen=True)
class Problem:
    """Something that keeps the file from working well: `code` for programs, `fix` is what to do."""

    code: str
    message: str
    fix: str


@dataclass(frozen=True)
class Inspection:
    """What a file is. `dialect` is a checkpoint's flavour or a GGUF's way of naming things."""

    file: str
    kind: str  # checkpoint or gguf
    dialect: str
    drafter: Drafter | None
    tensors: Mapping[str, int] = field(default_factory=dict)  # type: number of tensors
    bytes: int = 0  # of the weights
    problems: tuple[Problem, ...] = ()
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """The JSON that `inspect --json` prints."""
        return {
            "file": self.file,
            "kind": self.kind,
            "dialect": self.dialect,
            "version": self.drafter.version if self.drafter else None,
            "drafter": self.drafter.to_dict() if self.drafter else None,
            "tensors": {"count": sum(self.tensors.values()), "types": dict(self.tensors)},
            "bytes": self.bytes,
            "problems": [asdict(problem) for problem in self.problems],
            "notes": list(self.notes),
        }


def inspect(
    source: str | Path, *, config: str | Path | None = None, overrides: Mapping[str, Any] | None = None
) -> Inspection:
    """Look at a checkpoint (`.safetensors`, folder) or a GGUF (file or http(s) URL).

    What is recognised but cannot work is told in `problems`; DflashError is raised only for what
    cannot be read at all.
    """
    if not str(source):
        raise DflashError(
            "the name of the file is empty", hint="give a GGUF, a .safetensors file or a folder"
        )
    if _is_gguf(source):
        from dflashcpp.gguf_file import read_header

        return inspect_gguf(read_header(source))
    return _inspect_checkpoint(Path(source), config, overrides)


def _is_gguf(source: str | Path) -> bool:
    if str(source).startswith(("http://", "https://")) or str(source).endswith(".gguf"):
        return True
    path = Path(source)
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(4) == b"GGUF"


# -- checkpoints ----------------------------------------------------------------------------------


def _inspect_checkpoint(
    source: Path, config: str | Path | None, overrides: Mapping[str, Any] | None
) -> Inspection:
    from dflashcpp.checkpoint import open_checkpoint
    from dflashcpp.checkpoint.files import locate

    files = locate(source, Path(config) if config is not None else None)
    types = dict(Counter(tensor.dtype for tensor in files.tensors.values()))
    size = sum(tensor.nbytes for tensor in files.tensors.values())
    try:
        with open_checkpoint(source, config, overrides=overrides) as checkpoint:
            return Inspection(
                str(source),
                "checkpoint",
                checkpoint.flavour.name,
                checkpoint.drafter,
                types,
                size,
                notes=(*checkpoint.warnings, *_left_out(checkpoint.dropped)),
            )
    except DflashError as error:
        problem = Problem("not-convertible", error.message, error.hint or "")
        return Inspection(str(source), "checkpoint", "unknown", None, types, size, (problem,))


def _left_out(dropped: Mapping[str, str]) -> list[str]:
    return [f"{name} is left out: {reason}" for name, reason in dropped.items()]


# -- GGUF -----------------------------------------------------------------------------------------

_CONVERT = "convert the checkpoint again with `dflashcpp convert`"
_FIX = "rewrite it without loss: `dflashcpp inspect FILE --fix OUT` (with --target when it has no tokenizer)"


def inspect_gguf(header: Header) -> Inspection:
    """What a GGUF is, by its header."""
    from dflashcpp.dialects import detect
    from dflashcpp.gguf_file import TensorType

    found = detect(header)
    problems: list[Problem] = []
    ours = _translated(header, found, problems)
    drafter = None
    if ours is not None:
        problems += [*_key_problems(ours), *_tensor_problems(ours)]
        drafter = _drafter(ours, problems)
    if ours is not None and drafter is not None:
        problems += _drafter_problems(ours, drafter)
    return Inspection(
        file=header.source,
        kind="gguf",
        dialect=found.name if found else header.architecture,
        drafter=drafter,
        tensors=dict(Counter(TensorType(info.type).name for info in header.tensors.values())),
        bytes=sum(info.nbytes for info in header.tensors.values()),
        problems=tuple(problems),
    )


def _translated(header: Header, dialect: dialects.Dialect | None, problems: list[Problem]) -> Header | None:
    """The header in llama.cpp's words; None, and why in `problems`, when there is no such thing."""
    from dflashcpp.dialects import translate

    if dialect is None:
        message = f"a GGUF of architecture {header.architecture!r} is no drafter"
        problems.append(Problem("no-drafter", message, "pass the drafter's GGUF"))
        return None
    if header.architecture == ARCHITECTURE and not dialect.refuse:
        return header
    if header.architecture != ARCHITECTURE:
        message = f"written for {dialect.title}; llama.cpp does not read this dialect"
        problems.append(Problem("foreign-dialect", message, _FIX))
    try:
        return translate(header, dialect)
    except DflashError as error:
        problems.append(Problem("not-repairable", error.message, error.hint or _CONVERT))
        return None


def _drafter(header: Header, problems: list[Problem]) -> Drafter | None:
    try:
        return Drafter.from_gguf(header)
    except (DflashError, ValueError, TypeError) as error:
        if not problems:
            problems.append(Problem("unreadable", str(error), _CONVERT))
        return None


_NEEDED = {
    "dflash.target_layers": "it does not say which layers of the target it reads; llama.cpp refuses it",
    "dflash.rope.freq_base": "llama.cpp takes theta 10000, which is hardly ever right",
    "dflash.block_size": "llama.cpp takes 16",
    "dflash.attention.key_length": "llama.cpp takes hidden / heads, which is wrong for most drafters",
    "tokenizer.ggml.tokens": "it has no tokenizer, which llama.cpp needs",
    "tokenizer.ggml.mask_token_id": "without it nothing it drafts is ever accepted",
}


def _key_problems(header: Header) -> list[Problem]:
    from dflashcpp.gguf_file import ValueType

    found = [
        Problem("missing-key", f"{key} is missing: {why}", _CONVERT)
        for key, why in _NEEDED.items()
        if key not in header.kv
    ]
    taps = header.kv.get("dflash.target_layers")
    if taps is not None and taps.element_type not in (ValueType.INT32, ValueType.UINT32):
        message = f"dflash.target_layers is {taps.type_name}; llama.cpp reads arrays of INT32 or UINT32 only"
        found.append(Problem("wrong-type", message, _CONVERT))
    window = header.get("dflash.attention.sliding_window", None)
    pattern = header.kv.get("dflash.attention.sliding_window_pattern")
    if window and (pattern is None or pattern.element_type is None):
        message = "dflash.attention.sliding_window is set, but sliding_window_pattern is no list of layers"
        found.append(Problem("missing-key", message, _CONVERT))
    return found


def _tensor_problems(header: Header) -> list[Problem]:
    """What llama.cpp would say "wrong number of tensors" or "wrong shape" to, by name."""
    from dflashcpp.knowledge import table

    layers = header.get("dflash.block_count", 0)
    layers = layers if isinstance(layers, int) and 0 < layers <= 256 else 0
    rows = table("convert/tensors.toml")["tensor"]
    have = set(header.tensors)
    features = {"always"} | {row["when"] for row in rows if have & _names(row, layers)}
    wanted = {name for row in rows if row["when"] in features for name in _names(row, layers)}
    known = {name for row in rows for name in _names(row, layers)}
    found = []
    if wanted - have:
        found.append(Problem("missing-tensor", f"missing: {_listed(wanted - have)}", _CONVERT))
    if have - known:
        message = (
            f"llama.cpp's DFlash has no {_listed(have - known)}; it refuses a file with more than it knows"
        )
        found.append(Problem("unknown-tensor", message, _CONVERT))
    return found


def _names(row: Mapping[str, Any], layers: int) -> set[str]:
    name = row["name"]
    return {name.format(i=layer) for layer in range(layers)} if "{i}" in name else {name}


def _listed(names: set[str]) -> str:
    from dflashcpp.checkpoint.files import listing

    return listing(sorted(names))


def _drafter_problems(header: Header, drafter: Drafter) -> list[Problem]:
    found = []
    if drafter.vocab is not None and drafter.mask_token_id >= drafter.vocab:
        message = f"the mask token {drafter.mask_token_id} is outside of the {drafter.vocab} tokens"
        found.append(Problem("mask-outside", message, _CONVERT))
    found += _shape_problems(header, drafter)
    kinds = {info.type for info in header.tensors.values()}
    if drafter.version == 2 and 1 in kinds:
        message = "F16 weights of a DFlash-2 drafter can overflow in half precision on some engines"
        found.append(Problem("f16-dflash2", message, "convert with -q BF16 or a quantised type"))
    if any(drafter.sliding) and drafter.version == 1 and "dflash.attention.causal" not in header.kv:
        message = (
            "sliding layers, but nothing says whether blocks are causal; llama.cpp makes none causal, "
            "the reference makes sliding layers causal (some acceptance is lost)"
        )
        found.append(Problem("causality-unsaid", message, _CONVERT))
    return found


def _shape_problems(header: Header, drafter: Drafter) -> list[Problem]:
    from dflashcpp.checkpoint.geometry import table_shape

    sizes, wrong = drafter.dimensions(), []
    for name, info in header.tensors.items():
        expected = table_shape(name, sizes)
        if expected is not None and tuple(reversed(expected)) != info.ne:
            wrong.append(f"{name} is {list(info.ne)}, expected {list(reversed(expected))}")
    if not wrong:
        return []
    return [Problem("wrong-shape", "; ".join(wrong[:6]), _CONVERT)]
