"""Which files a checkpoint consists of: one safetensors file, shards by index or by name, a folder."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from dflashcpp.checkpoint.json_file import read_object
from dflashcpp.checkpoint.safetensors_file import RawTensor, read_safetensors
from dflashcpp.errors import DflashError

_SERIES = re.compile(r"(.*?)-(\d{1,6})-of-(\d{1,6})\.safetensors")


@dataclass(frozen=True)
class Files:
    """A checkpoint on disk: its folder, its config (if any) and all tensors of its weight files."""

    folder: Path
    config: Path | None
    weights: tuple[Path, ...]
    tensors: dict[str, RawTensor]
    warnings: tuple[str, ...]


def locate(source: Path, config: Path | None = None) -> Files:
    """Find and read the headers of a checkpoint given as a `.safetensors` file or a folder.

    Raises DflashError: nothing there, missing shards (with the tensors they hold), a tensor twice.
    """
    _refuse_other_files(source)
    source = _beside_config(source)
    folder = _folder_of(source) if source.is_dir() else source.parent
    index = _index_of(folder, None if source.is_dir() else source.name)
    warnings: list[str] = []
    if index is not None:
        tensors, weights = _by_index(index, warnings)
    else:
        weights = _weights_in(folder, None if source.is_dir() else source.name)
        tensors = _merge(weights)
    found = config or folder / "config.json"
    if config is not None and not config.is_file():
        raise DflashError(f"there is no config file {config}")
    if not tensors:
        raise DflashError(f"{weights[0]} holds no tensors", hint="the checkpoint is empty; download it again")
    return Files(folder, found if found.is_file() else None, weights, tensors, tuple(warnings))


def listing(names: list[str], limit: int = 8) -> str:
    """`names` for a sentence: at most `limit` of them, then how many more."""
    more = len(names) - limit
    return ", ".join(names[:limit]) + (f" and {more} more" if more > 0 else "")


def _refuse_other_files(source: Path) -> None:
    if not source.exists():
        raise DflashError(f"there is no file or folder {source}", hint="check the path or the Hub id")
    if source.suffix == ".json" and source.is_file():
        raise DflashError(
            f"{source} is a JSON file, not the weights", hint=f"give its folder: {source.parent}"
        )
    if not source.is_dir() and source.suffix in {".bin", ".pt", ".pth"}:
        raise DflashError(
            f"{source} is a PyTorch file; only safetensors are read",
            hint="save the checkpoint as safetensors first",
        )


def _beside_config(source: Path) -> Path:
    """A link to weights elsewhere, with no config beside the link: the place that it leads to."""
    real = source.resolve()
    if source.is_dir() or (source.parent / "config.json").is_file():
        return source
    return real if (real.parent / "config.json").is_file() else source


def _folder_of(source: Path) -> Path:
    """The folder with the weights: `source` itself, or the only one inside that has a config and weights."""
    if any(source.glob("*.safetensors")) or any(source.glob("*.safetensors.index.json")):
        return source
    inside = [
        path.parent
        for path in sorted(source.glob("*/config.json"))
        if any(path.parent.glob("*.safetensors*"))
    ]
    if len(inside) == 1:
        return inside[0]
    if len(inside) > 1:
        raise DflashError(
            f"{source} holds several checkpoints: {listing([path.name for path in inside])}",
            hint="name one of them",
        )
    snapshots = sorted(source.glob("snapshots/*/"))
    if snapshots:  # a repository of the Hub's cache
        raise DflashError(
            f"{source} is a repository of the Hub's cache, not a checkpoint",
            hint=f"give a folder inside it, such as {snapshots[-1]}, or the Hub id",
        )
    there = sorted(path.name for path in source.iterdir())
    raise DflashError(
        f"{source} holds no .safetensors file; there is {listing(there) if there else 'nothing'}",
        hint="give the folder of the checkpoint, or its .safetensors file",
    )


def _index_of(folder: Path, file_name: str | None) -> Path | None:
    """The index that covers `folder`, or the one that lists the given file."""
    found = sorted(folder.glob("*.safetensors.index.json"))
    if file_name is not None:
        found = [path for path in found if file_name in set(_weight_map(path).values())]
    if len(found) > 1:
        raise DflashError(
            f"{folder} has several index files: {listing([path.name for path in found])}",
            hint="keep the right one",
        )
    return found[0] if found else None


def _weight_map(index: Path) -> dict[str, str]:
    found = read_object(index).get("weight_map")
    if not found or not isinstance(found, dict) or not all(isinstance(name, str) for name in found.values()):
        raise DflashError(f"{index} has no weight_map from tensor to file name")
    outside = [name for name in found.values() if PurePosixPath(name).name != name or name in {"", ".", ".."}]
    if outside:
        raise DflashError(f"{index} names the file {outside[0][:100]!r}, which is not beside it")
    return found


def _by_index(index: Path, warnings: list[str]) -> tuple[dict[str, RawTensor], tuple[Path, ...]]:
    weight_map = _weight_map(index)
    names = sorted(set(weight_map.values()))
    missing = [name for name in names if not _is_there(index.parent / name)]
    if missing:
        held = [tensor for tensor, name in weight_map.items() if name in missing]
        raise DflashError(
            f"{listing(missing)} of {index} {'is' if len(missing) == 1 else 'are'} missing; "
            f"{len(held)} tensors are in there: {listing(held)}",
            hint="download the missing files",
        )
    tensors = _merge(tuple(index.parent / name for name in names))
    absent = [
        name for name, file in weight_map.items() if name not in tensors or tensors[name].file.name != file
    ]
    if absent:
        raise DflashError(
            f"{index} says that {weight_map[absent[0]]} holds {absent[0]}, it does not "
            f"({len(absent)} such tensors: {listing(absent)})",
            hint="index and weights are of different versions; download both again",
        )
    extra = sorted({path.name for path in index.parent.glob("*.safetensors")} - set(names))
    if extra:
        warnings.append(f"{index.name} does not list {listing(extra)}; not read")
    return tensors, tuple(index.parent / name for name in names)


def _is_there(path: Path) -> bool:
    """Like `is_file`, also false for a name that no file can have (an index may name anything)."""
    try:
        return path.is_file()
    except OSError:
        return False


def _weights_in(folder: Path, name: str | None) -> tuple[Path, ...]:
    """The weight files of `folder`; of one file given by `name` those that are shards of the same."""
    found = sorted(folder.glob("*.safetensors"))
    if name is not None:
        shard = _SERIES.fullmatch(name)
        same = [path for path in found if shard and _is_shard_of(path.name, shard[1], shard[3])]
        found = same or [folder / name]
    for path in found:
        match = _SERIES.fullmatch(path.name)
        if match is None:
            continue
        wanted = [
            f"{match[1]}-{number:0{len(match[2])}d}-of-{match[3]}.safetensors"
            for number in _numbers(match[3])
        ]
        missing = [name for name in wanted if not (folder / name).is_file()]
        if missing:
            raise DflashError(
                f"{folder} has {path.name}, but these shards are missing: {listing(missing)}",
                hint="download the missing files",
            )
    return tuple(found)


def _is_shard_of(name: str, series: str, last: str) -> bool:
    match = _SERIES.fullmatch(name)
    return match is not None and match[1] == series and match[3] == last


def _numbers(last: str) -> range:
    return range(1, min(int(last), 1000) + 1)


def _merge(weights: tuple[Path, ...]) -> dict[str, RawTensor]:
    tensors: dict[str, RawTensor] = {}
    for path in weights:
        for name, tensor in read_safetensors(path).items():
            if name in tensors:
                raise DflashError(
                    f"tensor {name} is in both {tensors[name].file.name} and {path.name}",
                    hint="keep the files of one checkpoint only, or name the right .safetensors file",
                )
            tensors[name] = tensor
    return tensors
