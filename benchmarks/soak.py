"""A server under four impatient clients, a killer and a cutter, for as long as you like.

    python -m benchmarks.soak --seconds 300                    # four slots, on this machine
    python -m benchmarks.soak --seconds 300 --tunnel           # the same through a real sshd on loopback

Four clients ask the real pair in four slots, cancel some answers half way, and compare every whole answer
with its own greedy reference, made by the target alone at the start (where they part, the target's own
log-probabilities must call it a tie). The server is killed now and then and started again; with --tunnel
ssh or its sshd is killed as well. Nothing may grow: memory, descriptors and sockets of the server and of
this process, its threads, ssh processes. Exit code 1 when something did, or when an answer was lost
unnoticed or mixed up.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from dflashcpp import LlamaServer, llamacpp, pairs
from dflashcpp.agreement import compare
from dflashcpp.client import Client, ClientError
from dflashcpp.config import Profile
from dflashcpp.errors import DflashError
from dflashcpp.server import supervise
from dflashcpp.server.ports import free_port
from dflashcpp.server.process import Identity

QUESTIONS = [
    f"Write a Python function that {what}."
    for what in (
        "adds two numbers",
        "reverses a string",
        "finds the largest number in a list",
        "counts vowels",
        "checks whether a number is even",
        "joins two lists",
        "computes a factorial",
        "removes duplicates",
    )
]
TOKENS = 40
OPTIONS: dict[str, Any] = {
    "n_predict": TOKENS,
    "temperature": 0,
    "cache_prompt": False,
    "return_tokens": True,
}
EXPECTED_FAULTS = ("cut", "unreachable", "loading", "failed")
SLOTS = 4
UP_SECONDS = 120.0


@dataclass
class Served:
    """What is soaked: how to reach it, which process it is, and how its way there is cut (if it can be)."""

    client: Callable[..., Client]
    pid: Callable[[], int]
    watch: Callable[[], None]
    cut: Callable[[random.Random], str] | None = None
    carriers: Callable[[], int] = lambda: 0


@dataclass
class Soak:
    """The run: counts of what happened, and what went wrong."""

    served: Served
    reference: dict[str, tuple[str, tuple[int, ...]]]
    seconds: float
    kill_every: float
    cut_every: float
    counts: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    over: bool = False
    other: set[tuple[str, tuple[int, ...]]] = field(default_factory=set)

    def run(self) -> None:
        self.until = time.monotonic() + self.seconds
        jobs = [threading.Thread(target=self.client, args=(seed,)) for seed in range(SLOTS)]
        jobs.append(threading.Thread(target=self.trouble, args=(self.kill_every, self.kill)))
        if self.served.cut is not None:
            jobs.append(threading.Thread(target=self.trouble, args=(self.cut_every, self.cut)))
        for job in jobs:
            job.start()
        for job in jobs:
            job.join()
        self.all_once()

    def client(self, seed: int) -> None:
        chance = random.Random(seed)
        client = self.served.client(retries=5, idle_timeout=60)
        while time.monotonic() < self.until:
            text = chance.choice(QUESTIONS)
            try:
                self.ask(client, text, chance.randrange(1, 20) if chance.random() < 0.3 else None)
            except ClientError as error:
                self.counts[f"told: {error.kind}"] += 1
                if error.kind not in EXPECTED_FAULTS:
                    self.problems.append(f"{error.kind}: {error.message}")
                time.sleep(0.3)

    def ask(self, client: Client, text: str, stop_at: int | None = None) -> None:
        prompt, wanted = self.reference[text]
        stream = client.complete(prompt, True, **OPTIONS)
        for number, _ in enumerate(stream):
            if number == stop_at:
                stream.cancel(wait=0)
                self.counts["cancelled"] += 1
                return
        self.counts["answers"] += 1
        if stream.answer.tokens != wanted:
            self.counts["answers that part from their reference"] += 1
            self.other.add((text, stream.answer.tokens))
        if stream.answer.timings is None:
            self.problems.append(f"no statistics for a whole answer to {text!r}")

    def all_once(self) -> None:
        """Every question again, in peace: nothing may be left of what was done to the server."""
        wait_up(self.served)
        for text in QUESTIONS:
            self.ask(self.served.client(), text)

    def trouble(self, every: float, make: Callable[[random.Random], None]) -> None:
        chance = random.Random(every)
        while time.monotonic() + every < self.until:
            time.sleep(every)
            make(chance)
            wait_up(self.served)

    def kill(self, chance: random.Random) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.served.pid(), signal.SIGKILL)
            self.counts["server killed"] += 1

    def cut(self, chance: random.Random) -> None:
        assert self.served.cut is not None
        self.counts[self.served.cut(chance)] += 1


def wait_up(served: Served) -> None:
    """Wait until the server answers again."""
    until = time.monotonic() + UP_SECONDS
    while served.client(retries=0).health() != "ready":
        if time.monotonic() > until:
            raise DflashError(f"it was not up again after {UP_SECONDS:g} s")
        time.sleep(0.1)


def footprint(served: Served) -> dict[str, float]:
    """What must not grow."""
    mine, child = psutil.Process(), psutil.Process(served.pid())
    return {
        "server MiB": child.memory_info().rss / 2**20,
        "server descriptors": child.num_fds(),
        "server sockets": len(child.net_connections("all")),
        "own MiB": mine.memory_info().rss / 2**20,
        "own descriptors": mine.num_fds(),
        "own sockets": len(mine.net_connections("all")),
        "own threads": mine.num_threads(),
        "ssh processes": served.carriers(),
    }


ROOM = {"server MiB": 64.0, "own MiB": 32.0, "own threads": 2.0, "ssh processes": 0.0}


def judge(before: dict[str, float], after: dict[str, float]) -> list[str]:
    """Growth beyond what caches and allocators explain."""
    return [
        f"{name} grew from {before[name]:.0f} to {after[name]:.0f}"
        for name in before
        if after[name] > before[name] + ROOM.get(name, 4.0)
    ]


@contextlib.contextmanager
def local(target: Path, drafter: Path, program: Path) -> Iterator[Served]:
    """The pair on this machine, started again by the supervisor of `serve --restart`."""
    server = LlamaServer(
        target,
        drafter,
        build=program,
        spec_draft_n_max=4,
        threads=1,
        ctx_size=512 * SLOTS,
        parallel=SLOTS,
        cache_ram=0,
    )
    server.supervisor = Identity.of_this()
    with server:
        yield Served(
            server.client,
            lambda: server.pid,
            lambda: supervise.watch(server, restart=True, first_wait=0.2),
        )


@contextlib.contextmanager
def behind_ssh(target: Path, drafter: Path, program: Path) -> Iterator[Served]:
    """The same behind a real sshd on loopback; either end of the connection can be killed."""
    from dflashcpp.remote.serving import RemoteServer, Wanted, prepare
    from tests.support.sshd import running

    with (
        tempfile.TemporaryDirectory(prefix="dflashcpp soak ") as folder,
        running(Path(folder) / "ssh d") as sshd,
    ):
        words = ["-m", str(target), "-md", str(drafter), "-t", "1", "--spec-draft-n-max", "4"]
        words += ["-c", str(512 * SLOTS), "-np", str(SLOTS), "--cache-ram", "0"]
        profile = Profile("far", "far", local_port=free_port(), remote_port=free_port())
        wanted = Wanted(words=tuple(words), server=str(program))

        def cut(chance: random.Random) -> str:
            if chance.random() < 0.5:
                sshd.signal_sessions(signal.SIGKILL)
                return "sshd killed"
            sshd.kill_clients()
            return "ssh killed"

        with RemoteServer(prepare(profile, sshd.ssh(), wanted)) as server:

            def pid() -> int:
                assert server.process is not None and server.process.pid is not None
                return server.process.pid

            yield Served(
                server.client, pid, lambda: server.watch(restart=True), cut, lambda: len(sshd.clients())
            )


def references(target: Path, program: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """The greedy answer of the target alone to each question: its prompt and token ids."""
    with alone(target, program) as server:
        client = server.client()
        prompts = {text: client.apply_template(text) for text in QUESTIONS}
        return {text: (prompt, client.complete(prompt, **OPTIONS).tokens) for text, prompt in prompts.items()}


def alone(target: Path, program: Path) -> LlamaServer:
    """The target without its drafter."""
    return LlamaServer(target, build=program, threads=1, ctx_size=512, cache_ram=0)


def real_differences(soak: Soak, target: Path, program: Path) -> list[str]:
    """The answers that parted from their reference where the target does not call it a tie."""
    if not soak.other:
        return []
    found = []
    with alone(target, program) as server:
        client = server.client()
        for text, tokens in sorted(soak.other):
            prompt, plain = soak.reference[text]
            told = compare(client, client.tokenize(prompt, begin=True), plain, tokens)
            if not told.agrees:
                found.append(f"another answer to {text!r}: {told.text()}")
    return found


def soaked(
    seconds: float, kill_every: float, cut_every: float, program: Path, *, tunnel: bool = False
) -> tuple[Soak, dict[str, tuple[float, float]]]:
    """Run it; what happened with every problem found, and the footprint before and after."""
    pair = pairs.load_pair()
    target = pairs.ensure_target(pair)
    drafter = pairs.ensure_drafter(pair, target=target)
    reference = references(target, program)
    with (behind_ssh if tunnel else local)(target, drafter, program) as served:
        soak = Soak(served, reference, seconds, kill_every, cut_every)
        threading.Thread(target=look_after, args=(served, soak), daemon=True).start()
        soak.all_once()
        before = footprint(served)
        soak.run()
        time.sleep(1)
        after = footprint(served)
        soak.over = True
    soak.problems += judge(before, after) + real_differences(soak, target, program)
    return soak, {name: (before[name], after[name]) for name in before}


def look_after(served: Served, soak: Soak) -> None:
    try:
        served.watch()
    except DflashError as error:
        if not soak.over:
            soak.problems.append(error.message)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--kill-every", type=float, default=45, help="seconds between kills of the server")
    parser.add_argument("--cut-every", type=float, default=20, help="with --tunnel: between cuts of it")
    parser.add_argument("--tunnel", action="store_true", help="through a real sshd on loopback")
    parser.add_argument("--build", type=Path, help="the llama-server [default: our build]")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    program = given.build or llamacpp.build().binary("llama-server")
    soak, sizes = soaked(given.seconds, given.kill_every, given.cut_every, program, tunnel=given.tunnel)
    if given.json:
        print(json.dumps({"counts": soak.counts, "footprint": sizes, "problems": soak.problems}))
        return 1 if soak.problems else 0
    for name, count in sorted(soak.counts.items()):
        print(f"{name:<40} {count}")
    for name, (before, after) in sizes.items():
        print(f"{name:<40} {before:.0f} -> {after:.0f}")
    print("\n".join(soak.problems) or "nothing lost, nothing mixed up, nothing grew")
    return 1 if soak.problems else 0


if __name__ == "__main__":
    sys.exit(main())
