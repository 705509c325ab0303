"""llama.cpp's git objects out of a llama-cpp-python sdist, fetched by pip under its hash.

`pip download` wants the metadata of what it downloads, and would run the sdist's build backend
for it. A stand-in backend that only copies name and version takes that place: nothing of the sdist
is run, and no build dependency is fetched.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path

from dflashcpp.errors import DflashError
from dflashcpp.llamacpp.bases import Base
from dflashcpp.llamacpp.git import ObjectStore
from dflashcpp.progress import Progress, Task

_BACKEND = """\
import pathlib
import re


def prepare_metadata_for_build_wheel(directory, config_settings=None):
    facts = pathlib.Path("PKG-INFO").read_text(encoding="utf-8")
    name = re.search(r"^Name: (.*)$", facts, re.M)[1].replace("-", "_")
    version = re.search(r"^Version: (.*)$", facts, re.M)[1]
    folder = pathlib.Path(directory, f"{name}-{version}.dist-info")
    folder.mkdir()
    text = f"Metadata-Version: 2.1\\nName: {name}\\nVersion: {version}\\n"
    (folder / "METADATA").write_text(text, encoding="utf-8")
    return folder.name
"""

_MODULE = r"[^/]+/\.git/modules/vendor/llama\.cpp/"
_OBJECT = re.compile(
    _MODULE + r"objects/(?:pack/pack-[0-9a-f]{40,64}\.(?:pack|idx)|[0-9a-f]{2}/[0-9a-f]{38,62})"
)
_SHALLOW = re.compile(_MODULE + "shallow")
_LARGEST_OBJECT = 1 << 30


def fill_from_sdist(store: ObjectStore, base: Base, progress: Progress) -> None:
    """Download the sdist of `base` and put its llama.cpp objects into `store`.

    Raises DflashError when pip cannot get it, its hash differs, or it holds no objects.
    """
    with tempfile.TemporaryDirectory(prefix="sdist-", dir=store.folder.parent) as scratch:
        archive = _download(base, Path(scratch), progress)
        with progress.task("unpacking llama.cpp's git objects"):
            extract_objects(archive, store)


def extract_objects(archive: Path, store: ObjectStore) -> None:
    """Copy the git objects of vendor/llama.cpp out of the sdist `archive`; nothing else of it is written."""
    count = 0
    try:
        with tarfile.open(archive, "r:*") as tar:
            for member in tar:
                if member.isfile() and _SHALLOW.fullmatch(member.name):
                    _copy_shallow(tar, member, store)
                elif member.isfile() and _OBJECT.fullmatch(member.name):
                    _copy_object(tar, member, store)
                    count += 1
    except (tarfile.TarError, EOFError, OSError) as error:
        raise DflashError(f"{archive.name} is damaged: {error}", hint="run the command again") from error
    if not count:
        raise DflashError(f"{archive.name} holds no git objects of llama.cpp")


def _copy_object(tar: tarfile.TarFile, member: tarfile.TarInfo, store: ObjectStore) -> None:
    if member.size > _LARGEST_OBJECT:
        raise DflashError(f"{member.name} is {member.size} bytes: not a git object of llama.cpp")
    source = tar.extractfile(member)
    assert source is not None
    path = store.folder / "objects" / member.name.split("/objects/", 1)[1]
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        while block := source.read(1 << 20):
            file.write(block)


def _copy_shallow(tar: tarfile.TarFile, member: tarfile.TarInfo, store: ObjectStore) -> None:
    source = tar.extractfile(member)
    assert source is not None
    lines = re.findall(r"^[0-9a-f]{40,64}$", source.read(1 << 16).decode("ascii", "replace"), re.M)
    (store.folder / "shallow").write_text("".join(f"{line}\n" for line in lines), encoding="ascii")


def _download(base: Base, scratch: Path, progress: Progress) -> Path:
    requirement = scratch / "requirements.txt"
    requirement.write_text(f"{base.sdist} --hash=sha256:{base.sdist_sha256}\n", encoding="utf-8")
    backend = scratch / "backend" / "scikit_build_core"
    backend.mkdir(parents=True)
    (backend / "__init__.py").touch()
    (backend / "build.py").write_text(_BACKEND, encoding="utf-8")
    with progress.task(f"downloading {base.sdist}", total=base.sdist_bytes, unit="bytes") as task:
        _run_pip(base, scratch, requirement, task)
    found = sorted((scratch / "done").glob("*.tar.gz"))
    if len(found) != 1:
        raise DflashError(f"pip left no archive of {base.sdist}")
    with found[0].open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != base.sdist_sha256:
        raise DflashError(f"{found[0].name} has sha256 {digest}, expected {base.sdist_sha256}")
    return found[0]


def _run_pip(base: Base, scratch: Path, requirement: Path, task: Task) -> None:
    temporary, log = scratch / "tmp", scratch / "pip.log"
    temporary.mkdir()
    command = [
        *_pip(),
        *(
            "download",
            "--no-deps",
            "--no-binary",
            ":all:",
            "--no-build-isolation",
        ),
        *("--require-hashes", "--requirement", str(requirement), "--dest", str(scratch / "done")),
        *("--retries", "2", "--timeout", "20", "--progress-bar", "off", "--no-input"),
        "--disable-pip-version-check",
    ]
    environment = os.environ | {
        "PYTHONPATH": str(scratch / "backend"),
        "TMPDIR": str(temporary),
        "PIP_REQUIRE_VIRTUALENV": "0",
    }
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=environment)
        try:
            _follow(process, temporary, base.sdist_bytes, task)
        finally:
            if process.poll() is None:
                process.terminate()
            process.wait()
    if process.returncode:
        raise DflashError(f"pip could not get {base.sdist}: {_pip_words(log)}")


def _pip() -> list[str]:
    """This Python's pip, else the one in PATH (an environment made by uv has none of its own)."""
    if importlib.util.find_spec("pip"):
        return [sys.executable, "-m", "pip"]
    found = shutil.which("pip3") or shutil.which("pip")
    if found is None:
        raise DflashError(f"there is no pip for {sys.executable}, nor in PATH")
    return [found]


def _follow(process: subprocess.Popen[bytes], temporary: Path, total: int, task: Task) -> None:
    shown = 0
    while process.poll() is None:
        time.sleep(0.1)
        size = _size_so_far(temporary)
        if size > shown:
            task.advance(size - shown)
            shown = size
    if process.returncode == 0:
        task.advance(total - shown)


def _size_so_far(temporary: Path) -> int:
    with contextlib.suppress(OSError):
        return max((path.stat().st_size for path in temporary.glob("*/*.tar.gz")), default=0)
    return 0


def _pip_words(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if line.lower().startswith("error")]
    if errors:
        return re.sub(r"^error:\s*", "", errors[-1], flags=re.I)
    return lines[-1] if lines else "no output"
