"""The drafter's compute buffer with and without our patches, and prompt speed by injection chunk.

    python -m benchmarks.draft_buffer                  # both tables, for the builds in the cache
    python -m benchmarks.draft_buffer --sizes          # buffers only: seconds, no computing
    python -m benchmarks.draft_buffer --speed --rounds 5

Sizes: llama-server's own log lines, weights of zeros in sparse files, real shapes. Speed: the real
small pair, one slot, one thread, a prompt of about 1900 tokens, chunk sizes in turn within every
round; wall clock and the process's own CPU time, which other work on the machine disturbs less.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from dflashcpp import knowledge
from dflashcpp.cli._output import Output
from dflashcpp.conversion import convert
from dflashcpp.errors import DflashError
from dflashcpp.llamacpp import find_build
from dflashcpp.pairs import ensure_drafter, ensure_target, load_pair
from dflashcpp.server import LlamaServer
from tests.support.engine_memory import reserved
from tests.support.first_version import strip_second_version
from tests.support.sparse_models import MUSE, TINY, write_drafter, write_target

CHUNKS = (8, 16, 32, 64, 128, 256, 512)
DRAFTED = {"np 1, n_max 4": (1, 4), "np 1, n_max 15": (1, 15), "np 4, n_max 15": (4, 15)}


@dataclass(frozen=True)
class Size:
    """Compute buffer and cache of the draft context in MiB, unpatched and patched, at -ub 512."""

    pair: str
    vocab: int
    version: int
    drafted: str
    compute_before: float
    compute_after: float
    kv_before: float
    kv_after: float

    def row(self) -> list[str]:
        numbers = self.compute_before, self.compute_after, self.kv_before, self.kv_after
        cells = [f"{number:.2f}" for number in numbers]
        cells.insert(2, f"{100 * self.compute_after / self.compute_before:.1f} %")
        return [self.pair, f"{self.vocab:,}", f"v{self.version}", self.drafted, *cells]


@dataclass(frozen=True)
class Speed:
    """One measured prompt: tokens a second by the wall, and CPU seconds of the server for it."""

    setting: str
    tokens: int
    per_second: float
    cpu_seconds: float


def shapes(folder: Path, progress: Output) -> Iterator[tuple[str, int, int, Path, Path]]:
    """Name, vocabulary, version, target and drafter of every pair that is sized."""
    pair = load_pair()
    target = ensure_target(pair, progress.progress())
    second = knowledge.folder("models") / "smollm2-135m-dflash2"
    for version, source in ((1, strip_second_version(second, folder / "v1")), (2, second)):
        made = convert(source, target=target, type="Q8_0", output=folder / f"small-v{version}.gguf")
        yield "small real pair", 49152, version, target, made.file
    for name, shape in (("hidden 512", TINY.with_vocab(202048)), ("Muse-Glimmer shapes", MUSE)):
        sparse = write_target(folder / f"{shape.hidden}.gguf", shape)
        for version in (1, 2):
            drafter = write_drafter(folder / f"{shape.hidden}-v{version}.gguf", shape, version)
            yield name, shape.vocab, version, sparse, drafter


def sizes(before: Path, after: Path, folder: Path, output: Output) -> list[Size]:
    """Every pair with every number of drafted tokens, in both builds."""
    found = []
    for name, vocab, version, target, drafter in shapes(folder, output):
        for drafted, (slots, n_max) in DRAFTED.items():
            output.status(f"{name}, v{version}, {drafted}")
            flags = ("-np", str(slots), "--spec-draft-n-max", str(n_max), "-ub", "512")
            old, new = (reserved(binary, target, drafter, folder, *flags) for binary in (before, after))
            numbers = [memory.mib("draft", "compute") for memory in (old, new)]
            caches = [memory.mib("draft", "kv") + memory.mib("draft", "kv_swa") for memory in (old, new)]
            found.append(Size(name, vocab, version, drafted, *numbers, *caches))
    return found


def prompt_of(words: int = 1000) -> str:
    """A long question that no cache holds."""
    path = knowledge.folder("models") / "smollm2-135m-dflash2" / "held-out-prompts.json"
    text = " ".join(text for _, text in json.loads(path.read_text()))
    return " ".join((text.split() * 9)[:words])


def measure(binary: Path, target: Path, drafter: Path | None, extra: tuple[str, ...], name: str) -> Speed:
    """Start a server, read the prompt once unmeasured and once measured, stop it."""
    import psutil

    flags = {"parallel": 1, "ctx_size": 4096, "threads": 1, "cache_ram": 0, "fit": "off"}
    if drafter is not None:
        flags["spec_draft_n_max"] = 4
    prompt = prompt_of()
    with LlamaServer(target, drafter, build=binary, extra=extra, **flags) as server:
        client, process = server.client(), psutil.Process(server.pid)
        client.complete(prompt[: len(prompt) // 4], n_predict=1, cache_prompt=False)
        start = process.cpu_times()
        timings = client.complete(prompt, n_predict=1, cache_prompt=False, temperature=0.0).timings
        end = process.cpu_times()
    cpu = end.user + end.system - start.user - start.system
    return Speed(name, timings.prompt_n, timings.prompt_per_second or 0.0, cpu)


def speeds(before: Path, after: Path, rounds: int, output: Output) -> list[Speed]:
    """Every setting once a round, in an order that turns."""
    pair = load_pair()
    target = ensure_target(pair, output.progress())
    drafter = ensure_drafter(pair, output.progress(), target=target)
    settings: list[tuple[str, Path, Path | None, tuple[str, ...]]] = [
        ("no drafter", after, None, ()),
        ("unpatched (512)", before, drafter, ()),
        *((f"chunk {rows}", after, drafter, ("-ubd", str(rows))) for rows in CHUNKS),
    ]
    found = []
    for turn in range(rounds):
        shift = turn % len(settings)
        for name, binary, draft, extra in settings[shift:] + settings[:shift]:
            found.append(measure(binary, target, draft, extra, name))
            output.status(f"round {turn + 1}, {name}: {found[-1].per_second:.1f} tok/s")
    return found


def speed_rows(found: list[Speed]) -> list[list[str]]:
    """Median and range by setting, in the order they were measured first."""
    rows = []
    for name in dict.fromkeys(speed.setting for speed in found):
        wall = [speed.per_second for speed in found if speed.setting == name]
        cpu = [1e3 * speed.cpu_seconds / speed.tokens for speed in found if speed.setting == name]
        spread = f"{min(wall):.1f} .. {max(wall):.1f}"
        low = f"{min(cpu):.3f}"
        rows.append([name, f"{statistics.median(wall):.1f}", spread, f"{statistics.median(cpu):.3f}", low])
    return rows


def servers(arguments: argparse.Namespace) -> tuple[Path, Path]:
    """llama-server without and with our patches: as given, else from the cache."""
    found = []
    for given, patched in ((arguments.pristine, False), (arguments.patched, True)):
        build = None if given else find_build(patched=patched)
        if not given and build is None:
            raise DflashError("a build is missing", hint="dflashcpp build; dflashcpp build --no-patches")
        found.append(Path(given) if given else build.binary("llama-server"))
    return found[0], found[1]


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--sizes", action="store_true", help="buffer sizes only")
    parser.add_argument("--speed", action="store_true", help="prompt speed only")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--patched", help="llama-server with our patches (default: from the cache)")
    parser.add_argument("--pristine", help="llama-server without them")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    output = Output(as_json=arguments.json)
    before, after = servers(arguments)
    both = arguments.sizes == arguments.speed
    with tempfile.TemporaryDirectory() as scratch:
        sized = sizes(before, after, Path(scratch), output) if arguments.sizes or both else []
        timed = speeds(before, after, arguments.rounds, output) if arguments.speed or both else []
    machine = f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}"
    if arguments.json:
        output.result(
            {"machine": machine, "sizes": [asdict(s) for s in sized], "speed": [asdict(s) for s in timed]}
        )
        return
    if sized:
        heads = ["pair", "vocabulary", "", "drafted", "compute, unpatched", "patched", "share"]
        rows = [size.row() for size in sized]
        output.table(
            [*heads, "KV, unpatched", "KV, patched"], rows, title="Draft context, MiB, -ub 512, -c 4096"
        )
    if timed:
        heads = ["setting", "tok/s", "range", "CPU ms a token", "lowest"]
        output.table(heads, speed_rows(timed), title=f"Prompt speed, {arguments.rounds} rounds ({machine})")


if __name__ == "__main__":
    main()
