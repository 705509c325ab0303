"""Fuzz one reader: coverage-guided with atheris where it is installed, else by plain mutation.

  python benchmarks/fuzz/run.py gguf --runs 1000000
  python benchmarks/fuzz/run.py config --runs 200000 --keep tests/unit/corpus

The process may use 2 GiB of address space on top of what it needs to start, and 10 seconds an input.
A failing input is stored as crash-<hash> in the folder of --keep, where the unit tests replay it.
"""

from __future__ import annotations

import argparse
import hashlib
import random
import resource
import signal
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

MEMORY = 2 << 30  # bytes
SECONDS = 10  # for one input
LARGEST = 1 << 15  # bytes of an input
CORPUS = ROOT / "tests" / "unit" / "corpus"


def main() -> None:
    arguments = parse()
    if arguments.plain or not _atheris(arguments):
        _plain(arguments)


def _atheris(arguments: argparse.Namespace) -> bool:
    try:
        import atheris
    except ImportError:
        print("atheris is not installed: mutating without coverage", file=sys.stderr)
        return False
    with atheris.instrument_imports(include=["dflashcpp"]):
        import dflashcpp.checkpoint
        import dflashcpp.dialects
        import dflashcpp.inspection  # noqa: F401
        from benchmarks.fuzz.targets import TARGETS, seeds
    work = arguments.work / arguments.target
    work.mkdir(parents=True, exist_ok=True)
    for number, seed in enumerate([*seeds(arguments.target), *found(arguments.target)]):
        (work / f"seed-{number}").write_bytes(seed)
    arguments.keep.joinpath(arguments.target).mkdir(parents=True, exist_ok=True)
    options = [
        f"-runs={arguments.runs}",
        f"-max_len={LARGEST}",
        f"-timeout={SECONDS}",
        "-rss_limit_mb=2048",
        "-print_final_stats=1",
        f"-max_total_time={arguments.seconds}",
        f"-artifact_prefix={arguments.keep / arguments.target}/",
    ]
    atheris.Setup([sys.argv[0], *options, str(work)], TARGETS[arguments.target])
    atheris.Fuzz()
    return True


def _plain(arguments: argparse.Namespace) -> None:
    from benchmarks.fuzz.targets import TARGETS, seeds

    target, pool = TARGETS[arguments.target], [*seeds(arguments.target), *found(arguments.target)]
    target(pool[0])  # imports are done before the memory is limited
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))
    signal.signal(signal.SIGALRM, _too_long)
    dice = random.Random(arguments.seed)
    began, count = time.monotonic(), 0
    while count < arguments.runs and time.monotonic() - began < arguments.seconds:
        data = mutated(pool, dice)
        signal.setitimer(signal.ITIMER_REAL, SECONDS)
        try:
            target(data)
        except BaseException:
            signal.setitimer(signal.ITIMER_REAL, 0)
            print(f"fault, kept as {keep(arguments, data)}", file=sys.stderr)
            raise
        count += 1
    signal.setitimer(signal.ITIMER_REAL, 0)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(
        f"{arguments.target}: {count} inputs in {time.monotonic() - began:.0f} s, no fault, "
        f"peak {peak:.0f} MiB"
    )


def _too_long(*_: object) -> None:
    raise TimeoutError(f"one input took longer than {SECONDS} s")


def mutated(pool: list[bytes], dice: random.Random) -> bytes:
    """A seed with a few changes: bits, bytes, numbers at their limits, pieces cut, doubled or swapped."""
    data = bytearray(dice.choice(pool))
    for _ in range(dice.choice((1, 1, 2, 3, 8))):
        at = dice.randrange(len(data)) if data else 0
        length = min(dice.choice((1, 2, 4, 8, 16, 64)), max(len(data) - at, 0))
        kind = dice.randrange(7)
        if kind == 0 and data:
            data[at] ^= 1 << dice.randrange(8)
        elif kind == 1:
            data[at : at + length] = dice.randbytes(length)
        elif kind == 2:
            limit = dice.choice((0, 1, 255, 2**16, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1))
            data[at : at + 8] = limit.to_bytes(8, "little")
        elif kind == 3:
            del data[at : at + length]
        elif kind == 4:
            data[at:at] = data[at : at + length]
        elif kind == 5:
            other = dice.choice(pool)
            start = dice.randrange(len(other)) if other else 0
            data[at : at + length] = other[start : start + length]
        else:
            data[at : at + length] = dice.choice(WORDS)
    return bytes(data[:LARGEST])


WORDS = (
    *(b"null", b"true", b"-1", b"0", b"1e999", b"NaN", b'"x"', b"[]", b"{}", b"[[[[", b'{"a":', b"9" * 400),
    *(
        b"\xff\xfe",
        b'"\\ud800"',
        b"sliding_attention",
        b"dflash",
        b"rope_theta",
        b"../",
        b"/etc/passwd",
        b"\x00",
    ),
)


def found(target: str) -> list[bytes]:
    """What earlier runs found, from the tests' corpus."""
    folder = CORPUS / target
    return [path.read_bytes() for path in sorted(folder.glob("*"))] if folder.is_dir() else []


def keep(arguments: argparse.Namespace, data: bytes) -> Path:
    folder: Path = arguments.keep / arguments.target
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"crash-{hashlib.sha256(data).hexdigest()[:16]}"
    path.write_bytes(data)
    return path


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("target", choices=("gguf", "safetensors", "index", "config"))
    parser.add_argument("--runs", type=int, default=1_000_000)
    parser.add_argument("--seconds", type=int, default=3600, help="stop after this long")
    parser.add_argument("--seed", type=int, default=0, help="of the plain mutations")
    parser.add_argument("--plain", action="store_true", help="without atheris")
    parser.add_argument("--work", type=Path, default=Path("fuzz-work"), help="atheris's growing corpus")
    parser.add_argument("--keep", type=Path, default=CORPUS, help="where failing inputs go")
    return parser.parse_args()


if __name__ == "__main__":
    main()
