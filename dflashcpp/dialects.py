"""Drafter GGUFs of other tools: recognised by name, and rewritten without loss into llama.cpp's form.

The rows of convert/dialects.toml say what is called what; the weights are copied as they are.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflashcpp.drafter import ARCHITECTURE, Drafter
from dflashcpp.errors import DflashError
from dflashcpp.gguf_file import Header, Kv, TensorInfo, TensorType, ValueType, layer_of
from dflashcpp.knowledge import table
from dflashcpp.progress import SILENT, Progress

if TYPE_CHECKING:
    from dflashcpp.gguf_file import GgufWriter
    from dflashcpp.target import Target

_MASK = "tokenizer.ggml.mask_token_id"
_TOKENS = "tokenizer.ggml.tokens"
_TAPS = "dflash.target_layers"
_RECONVERT = "convert the original checkpoint with `dflashcpp convert`"
_CHUNK = 8 << 20  # bytes copied at once
_FLOATS = {TensorType.F16, TensorType.BF16, TensorType.F32}


@dataclass(frozen=True)
class Dialect:
    """How a drafter GGUF names things. `refuse` says why it cannot be repaired, None when it can."""

    name: str
    title: str
    architectures: tuple[str, ...]
    taps: str
    has: str | None = None
    keys: Mapping[str, str] = field(default_factory=dict)
    tensors: Mapping[str, str] = field(default_factory=dict)
    refuse: str | None = None


@dataclass(frozen=True)
class Repaired:
    """What `repair` wrote. `changes` are sentences for a person."""

    file: Path
    bytes: int
    dialect: str
    drafter: Drafter
    changes: tuple[str, ...]
    warnings: tuple[str, ...]


def detect(header: Header) -> Dialect | None:
    """The dialect of a drafter's header; None when no row of convert/dialects.toml fits."""
    arch = header.get("general.architecture", None)
    for row in table("convert/dialects.toml")["dialect"]:
        has = row.get("has")
        if arch in row["architectures"] and (has is None or f"{arch}.{has}" in header.kv):
            return Dialect(**{**row, "architectures": tuple(row["architectures"])})
    return None


def translate(header: Header, dialect: Dialect) -> Header:
    """The same header in llama.cpp's words: keys and tensors renamed, taps as layer inputs.

    Offsets stay those of the source file. DflashError: a tensor llama.cpp has no place for (all are
    named), two that become one, taps missing or of another kind than a list of numbers.
    """
    if dialect.refuse:
        raise DflashError(f"{header.source} cannot be repaired: {dialect.refuse}", hint=_RECONVERT)
    return replace(header, kv=_keys(header, dialect), tensors=_tensors(header, dialect))


def _keys(header: Header, dialect: Dialect) -> dict[str, Kv]:
    found = {"general.architecture": Kv.string(ARCHITECTURE)}
    prefix = f"{header.architecture}."
    for key, value in header.kv.items():
        if key == "general.architecture":
            continue
        suffix = key.removeprefix(prefix)
        new = key if suffix == key else f"{ARCHITECTURE}.{dialect.keys.get(suffix, suffix)}"
        found[new] = value
    mask = found.pop("dflash.mask_token_id", None)
    if mask is not None:
        found[_MASK] = Kv.u32(mask.value)
    found[_TAPS] = _taps(header, found, dialect)
    return found


def _taps(header: Header, keys: Mapping[str, Kv], dialect: Dialect) -> Kv:
    taps = keys[_TAPS].value if _TAPS in keys else None
    if not isinstance(taps, list) or not taps or not all(type(tap) is int and tap >= 0 for tap in taps):
        raise DflashError(
            f"{header.source} cannot be repaired: it does not say which layers of the target it reads "
            f"({'no list of them' if taps is None else taps})",
            hint=_RECONVERT,
        )
    step = 1 if dialect.taps == "outputs" else 0
    return Kv.array(ValueType.INT32, [tap + step for tap in taps])


def _tensors(header: Header, dialect: Dialect) -> dict[str, TensorInfo]:
    """Renamed and in the order a conversion writes them."""
    aliases = _aliases(dialect)
    found: dict[str, TensorInfo] = {}
    unknown = []
    for name, info in header.tensors.items():
        new = _renamed(name, aliases)
        if new is None:
            unknown.append(name)
        elif new in found:
            raise DflashError(
                f"{header.source} cannot be repaired: two of its tensors are {new}", hint=_RECONVERT
            )
        else:
            found[new] = replace(info, name=new)
    if unknown:
        shown = ", ".join(unknown[:6]) + (f" and {len(unknown) - 6} more" if len(unknown) > 6 else "")
        raise DflashError(
            f"{header.source} cannot be repaired: llama.cpp's DFlash has no place for {shown}",
            hint=_RECONVERT,
        )
    return dict(sorted(found.items(), key=lambda item: _place(item[0])))


def _aliases(dialect: Dialect) -> dict[str, str]:
    """Every known way to write a tensor's name -> the GGUF name; {i} stands for the layer."""
    names: dict[str, str] = {}
    for row in table("convert/tensors.toml")["tensor"]:
        names[row["name"]] = row["name"]
        names.update(dict.fromkeys(row.get("source", ()), row["name"]))
    return {**names, **dialect.tensors}


def _renamed(name: str, aliases: Mapping[str, str]) -> str | None:
    layer = re.search(r"\.(\d{1,6})\.", name)
    if layer is None:
        return aliases.get(name)
    new = aliases.get(f"{name[: layer.start(1)]}{{i}}{name[layer.end(1) :]}")
    return new.replace("{i}", layer[1]) if new else None


def _place(name: str) -> tuple[int, int]:
    """Where a conversion puts a tensor: by the row of convert/tensors.toml, then by layer."""
    rows = [row["name"] for row in table("convert/tensors.toml")["tensor"]]
    return rows.index(re.sub(r"^blk\.\d+\.", "blk.{i}.", name)), layer_of(name)


def repair(
    header: Header,
    output: str | Path,
    *,
    target: str | Path | Target | None = None,
    progress: Progress = SILENT,
) -> Repaired:
    """Write `header`'s file in llama.cpp's form to `output`, weights unchanged.

    target: the target's GGUF (or a `Target`), for the tokenizer when the file has none and to check
    that the two fit. DflashError when something needed is not in the file; nothing is then written.
    """
    dialect = detect(header)
    if dialect is None:
        raise DflashError(
            f"{header.source} is a GGUF of architecture {header.architecture!r}, no drafter that is known",
            hint=_RECONVERT,
        )
    source = Path(header.source)
    if not source.is_file():
        raise DflashError(f"{header.source} must be a local file to be repaired", hint="download it first")
    translated = translate(header, dialect)
    _check_needed(translated)
    drafter, keys, warnings = _metadata(translated, dialect, target)
    _check_complete(translated, drafter)
    changes = _changes(header, translated, keys)
    if not changes:
        raise DflashError(f"{header.source} needs no repair: it is in llama.cpp's form and complete")
    size = _write(source, translated, keys, Path(output), progress)
    return Repaired(Path(output), size, dialect.name, drafter, tuple(changes), tuple(warnings))


_NEEDED = {
    "dflash.rope.freq_base": "rope theta",
    "dflash.block_size": "the block size",
    "dflash.attention.key_length": "the size of a head",
    "dflash.attention.layer_norm_rms_epsilon": "the epsilon of its norms",
    _MASK: "the mask token",
}


def _check_needed(header: Header) -> None:
    """What a default would silently replace must be in the file."""
    missing = [f"{what} ({key})" for key, what in _NEEDED.items() if key not in header.kv]
    if missing:
        raise DflashError(
            f"{header.source} cannot be repaired: it does not say {', '.join(missing)}", hint=_RECONVERT
        )


def _check_complete(header: Header, drafter: Drafter) -> None:
    """Every tensor of such a drafter must be there, in its shape."""
    from dflashcpp.checkpoint.geometry import table_shape

    rows = [row for row in table("convert/tensors.toml")["tensor"] if row["when"] in drafter.features()]
    wanted = [
        row["name"].format(i=i) for row in rows for i in range(drafter.layers if "{i}" in row["name"] else 1)
    ]
    wrong = [f"{name} is missing" for name in wanted if name not in header.tensors]
    for name in set(wanted) & set(header.tensors):
        shape, ne = table_shape(name, drafter.dimensions()), header.tensors[name].ne
        if shape is not None and tuple(reversed(shape)) != ne:
            wrong.append(f"{name} is {list(ne)}, expected {list(reversed(shape))}")
    if wrong:
        raise DflashError(
            f"{header.source} cannot be repaired: {'; '.join(sorted(wrong)[:6])}", hint=_RECONVERT
        )


def _metadata(
    header: Header, dialect: Dialect, target: str | Path | Target | None
) -> tuple[Drafter, dict[str, Kv], list[str]]:
    """The drafter, all keys of the new file, and warnings."""
    from dflashcpp.metadata import build_metadata
    from dflashcpp.provenance import Provenance
    from dflashcpp.target import complete, tokenizer_for

    drafter, warnings = _with_causality(header, Drafter.from_gguf(header))
    found = _target(target)
    if found is not None:
        drafter, more = complete(drafter, found, header.source)
        tokenizer = tokenizer_for(found, drafter.vocab or found.tokens)
        warnings += more
    else:
        tokenizer = _own_tokenizer(header)
    provenance = Provenance(
        name=header.get("general.name", None) or Path(header.source).stem,
        licence=header.get("general.license", None),
        target=found,
    )
    built = build_metadata(
        drafter,
        provenance,
        file_type=_file_type(header),
        recipe="repaired",
        parameters=sum(_elements(info) for info in header.tensors.values()),
        tokenizer={key: value for key, value in tokenizer.items() if key != _MASK},
    )
    kept = {
        key: value
        for key, value in header.kv.items()
        if key.startswith(("general.", "dflashcpp.")) and key not in built
    }
    kept.pop("general.alignment", None)
    return drafter, {**built, **kept, "dflashcpp.repaired_from": Kv.string(dialect.name)}, warnings


def _with_causality(header: Header, drafter: Drafter) -> tuple[Drafter, list[str]]:
    """Where the file says nothing, the reference's rule: sliding layers are causal inside the block."""
    said = {"dflash.attention.causal", "dflash.attention.causal_pattern"} & set(header.kv)
    if said or not any(drafter.sliding):
        return drafter, []
    warning = (
        "the file does not say whether blocks are causal; sliding layers were marked causal and full ones "
        "not, as the reference does when the config is silent"
    )
    return replace(drafter, causal=drafter.sliding), [warning]


def _target(target: str | Path | Target | None) -> Target | None:
    from dflashcpp.target import Target, read_target

    if target is None or isinstance(target, Target):
        return target
    return read_target(target)


def _own_tokenizer(header: Header) -> dict[str, Kv]:
    if _TOKENS not in header.kv:
        raise DflashError(
            f"{header.source} has no tokenizer of its own", hint="give the target's GGUF: --target FILE"
        )
    return {key: value for key, value in header.kv.items() if key.startswith("tokenizer.")}


def _file_type(header: Header) -> int:
    """`general.file_type` as it is, else that of the type most weights have."""
    said = header.get("general.file_type", None)
    if isinstance(said, int):
        return said
    sizes: Counter[int] = Counter()
    for info in header.tensors.values():
        sizes[info.type] += info.nbytes
    most = TensorType(sizes.most_common(1)[0][0]).name
    recipes = table("convert/quantization.toml")["recipes"].values()
    return next((int(row["file_type"]) for row in recipes if row["type"] == most), 1024)  # 1024: guessed


def _elements(info: TensorInfo) -> int:
    count = 1
    for size in info.ne:
        count *= size
    return count


def _changes(before: Header, after: Header, keys: Mapping[str, Kv]) -> list[str]:
    """What is different from the source, in sentences."""
    found = []
    if before.architecture != ARCHITECTURE:
        found.append(f"architecture {before.architecture} became {ARCHITECTURE}")
        old = {info.offset: info.name for info in before.tensors.values()}
        renamed = [f"{old[i.offset]} -> {i.name}" for i in after.tensors.values() if old[i.offset] != i.name]
        found.append(f"{len(renamed)} tensors renamed: {'; '.join(renamed[:3])} ...")
        found.append(f"taps are now layer inputs: {keys[_TAPS].value}")
    if _TOKENS not in before.kv:
        found.append(f"tokenizer added: {keys[_TOKENS].count} tokens")
    if "dflash.attention.causal" not in after.kv:
        found.append("causality written down")
    unfit = [info.name for info in after.tensors.values() if _stored(info) != info.type]
    if unfit:
        found.append(
            f"{len(unfit)} tensors that llama.cpp wants in F32 converted exactly: {', '.join(unfit[:3])}"
        )
    return found


def _stored(info: TensorInfo) -> TensorType:
    """The type the tensor gets: norms and convolution bases are always F32."""
    name = re.sub(r"^blk\.\d+\.", "blk.{i}.", info.name)
    store = next(row["store"] for row in table("convert/tensors.toml")["tensor"] if row["name"] == name)
    kind = TensorType(info.type)
    if store != "f32" or kind == TensorType.F32:
        return kind
    if kind not in _FLOATS:
        raise DflashError(
            f"{info.name} is {kind.name}, which cannot become F32 without loss", hint=_RECONVERT
        )
    return TensorType.F32


def _write(source: Path, header: Header, keys: Mapping[str, Kv], output: Path, progress: Progress) -> int:
    from dflashcpp.gguf_file import GgufWriter

    if output.exists() and output.samefile(source):
        raise DflashError(f"{output} is the file to be repaired; give another name")
    with GgufWriter(output) as writer, source.open("rb") as file:
        for key, value in keys.items():
            writer.add(key, value)
        for info in header.tensors.values():
            writer.declare(info.name, info.ne, _stored(info))
        writer.begin()
        with progress.task(
            "copying weights", sum(i.nbytes for i in header.tensors.values()), "bytes"
        ) as task:
            for info in header.tensors.values():
                file.seek(header.data_start + info.offset)
                _copy(writer, info, _pieces(file, info.nbytes, header.source))
                task.advance(info.nbytes)
        writer.commit()
        return writer.header.size


def _copy(writer: GgufWriter, info: TensorInfo, pieces: Iterator[bytes]) -> None:
    at = 0
    for piece in pieces:
        data = piece if _stored(info) == info.type else _as_f32(piece, info.type)
        writer.write(info.name, at, data)
        at += len(data)


def _pieces(file: Any, count: int, name: str) -> Iterator[bytes]:
    while count:
        piece = file.read(min(count, _CHUNK))
        if not piece:
            raise DflashError(f"{name} became shorter while it was read")
        count -= len(piece)
        yield piece


def _as_f32(data: bytes, kind: int) -> bytes:
    from dflashcpp.checkpoint.weights import decode

    return decode(data, TensorType(kind).name).tobytes()
