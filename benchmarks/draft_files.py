"""The files benchmarks/drafting.py needs: the target in BF16, the drafter, and a windowed drafter."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
from pathlib import Path

from dflashcpp import pairs, paths
from dflashcpp.conversion import convert
from dflashcpp.errors import DflashError
from dflashcpp.llamacpp import Build, builds
from dflashcpp.progress import Progress

WINDOW = 256


def build_at(server: Path) -> Build:
    """A build that is in no cache, by its llama-server; its digest is that of its libraries.

    Raises DflashError when there is none.
    """
    server = server.absolute()
    if not server.is_file() or server.parent.name != "bin":
        raise DflashError(f"{server} is no llama-server in a bin folder")
    known = builds.load_build(server.parent.parent)
    if known is not None:
        return known
    digest = hashlib.sha256()
    for part in sorted(server.parent.glob("lib*")):
        digest.update(part.read_bytes())
    return Build("", "", (), digest.hexdigest()[:12], "cpu", server.parent.parent, f"given as {server}")


def bf16_target(source: Path, build: Build, progress: Progress) -> Path:
    """`source` in BF16, made with llama-quantize once for each content of `source`.

    A 4-bit target of this size keeps two cores busy with arithmetic; in BF16 it waits for memory, as a GPU
    does. Raises DflashError when llama-quantize fails.
    """
    from filelock import FileLock

    key = hashlib.sha256(f"{pairs.file_sha256(source, progress)} BF16 {build.commit}".encode()).hexdigest()
    place = paths.cache_dir("targets", key[:16]) / f"{source.name.split('.')[0]}-BF16.gguf"
    with FileLock(f"{place}.lock"):
        if not place.is_file():
            _requantize(build.binary("llama-quantize"), source, place)
    return place


def _requantize(binary: Path, source: Path, place: Path) -> None:
    temporary = place.with_name(f"{place.name}.{os.getpid()}.part")
    command = [str(binary), "--allow-requantize", str(source), str(temporary), "BF16", "2"]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    if done.returncode != 0:
        temporary.unlink(missing_ok=True)
        last = (done.stderr or done.stdout).strip().splitlines()[-1:] or ["it printed nothing"]
        raise DflashError(f"llama-quantize could not make {place.name}: {last[0]}")
    temporary.replace(place)


def windowed_drafter(pair: pairs.Pair, target: Path, folder: Path, progress: Progress) -> Path:
    """The pair's own weights converted as if every layer slid over `WINDOW` tokens. What it drafts means
    little; what reading a prompt costs it is what such a drafter pays.
    """
    weights = pairs.ensure_source(pair, progress)
    config = json.loads((weights.parent / "config.json").read_text(encoding="utf-8"))
    config["layer_types"] = ["sliding_attention"] * int(config["num_hidden_layers"])
    config |= {"sliding_window": WINDOW, "use_sliding_window": True}
    source = folder / "windowed"
    source.mkdir(parents=True, exist_ok=True)
    (source / weights.name).symlink_to(weights)
    (source / "config.json").write_text(json.dumps(config), encoding="utf-8")
    type_ = pair.drafter.type or "Q8_0"
    place = folder / f"windowed-{type_}.gguf"
    return convert(source, target=target, type=type_, output=place, progress=progress).file


def drafter_with_head(pair: pairs.Pair, target: Path, head: str, folder: Path, progress: Progress) -> Path:
    """The pair's drafter with a head of its own, quantised to `head` (`convert --head`)."""
    weights = pairs.ensure_source(pair, progress).parent
    type_ = pair.drafter.type or "Q8_0"
    place = folder / f"head-{head}-{type_}.gguf"
    return convert(weights, target=target, type=type_, head=head, output=place, progress=progress).file
