"""A server under four impatient clients and a killer, for as long as you like.

    python benchmarks/soak.py --seconds 300 [--build LLAMA_SERVER]

Four clients ask the real pair, cancel some answers half way, and compare every whole answer with a greedy
reference made at the start; the server is killed now and then and started again. Nothing may grow: memory and
descriptors of the server, descriptors and threads of this process. Exit code 1 when something did, or when an
answer was lost unnoticed or mixed up.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psutil

from dflashcpp import LlamaServer, pairs
from dflashcpp.client import ClientError
from dflashcpp.errors import DflashError
from dflashcpp.server import supervise
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
OPTIONS: dict[str, Any] = {"temperature": 0, "max_tokens": 40, "cache_prompt": False}
EXPECTED_FAULTS = ("cut", "unreachable", "loading", "failed")


class Soak:
    """The run: counts of what happened, and what went wrong."""

    def __init__(self, server: LlamaServer, seconds: float, kill_every: float) -> None:
        self.server, self.kill_every = server, kill_every
        self.until = time.monotonic() + seconds
        self.counts: Counter[str] = Counter()
        self.problems: list[str] = []
        self.reference: dict[str, str] = {}

    def run(self) -> None:
        client = self.server.client()
        self.reference = {text: client.chat(text, **OPTIONS).text for text in QUESTIONS}
        jobs = [threading.Thread(target=self.client, args=(seed,)) for seed in range(4)]
        jobs.append(threading.Thread(target=self.killer))
        for job in jobs:
            job.start()
        for job in jobs:
            job.join()

    def client(self, seed: int) -> None:
        chance = random.Random(seed)
        client = self.server.client(retries=5, idle_timeout=60)
        while time.monotonic() < self.until:
            text = chance.choice(QUESTIONS)
            try:
                self.ask(client, text, chance)
            except ClientError as error:
                self.counts[f"told: {error.kind}"] += 1
                if error.kind not in EXPECTED_FAULTS:
                    self.problems.append(f"{error.kind}: {error.message}")
                time.sleep(0.3)

    def ask(self, client: Any, text: str, chance: random.Random) -> None:
        stream = client.chat(text, True, **OPTIONS)
        stop_at = chance.randrange(1, 20) if chance.random() < 0.3 else None
        for number, _ in enumerate(stream):
            if number == stop_at:
                stream.cancel(wait=0)
                self.counts["cancelled"] += 1
                return
        self.counts["answers"] += 1
        if stream.answer.text != self.reference[text]:
            self.problems.append(f"another answer to {text!r}: {stream.answer.text[:60]!r}")
        if stream.answer.timings is None:
            self.problems.append(f"no statistics for a whole answer to {text!r}")

    def killer(self) -> None:
        while time.monotonic() + self.kill_every < self.until:
            time.sleep(self.kill_every)
            os.kill(self.server.pid, signal.SIGKILL)
            self.counts["kills"] += 1
            while not self.ready():
                time.sleep(0.1)

    def ready(self) -> bool:
        return self.server.returncode is None and self.server.client(retries=0).health() == "ready"


def footprint(server: LlamaServer) -> dict[str, float]:
    """What must not grow."""
    mine, child = psutil.Process(), psutil.Process(server.pid)
    return {
        "server MiB": child.memory_info().rss / 2**20,
        "server descriptors": child.num_fds(),
        "own descriptors": mine.num_fds(),
        "own threads": mine.num_threads(),
    }


def judge(before: dict[str, float], after: dict[str, float]) -> list[str]:
    """Growth beyond what caches and allocators explain (64 MiB, 4 descriptors, 2 threads)."""
    room = {"server MiB": 64.0, "server descriptors": 4, "own descriptors": 4, "own threads": 2}
    return [
        f"{name} grew from {before[name]:.0f} to {after[name]:.0f}"
        for name in before
        if after[name] > before[name] + room[name]
    ]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--kill-every", type=float, default=45)
    parser.add_argument("--build", type=Path)
    given = parser.parse_args()
    pair = pairs.load_pair()
    target = pairs.ensure_target(pair)
    drafter = pairs.ensure_drafter(pair, target=target)
    server = LlamaServer(
        target, drafter, build=given.build, spec_draft_n_max=4, threads=1, ctx_size=1024, cache_ram=0
    )
    server.supervisor = Identity.of_this()
    with server:
        soak = Soak(server, given.seconds, given.kill_every)
        watching = threading.Thread(target=lambda: look_after(server, soak), daemon=True)
        watching.start()
        for question in QUESTIONS:
            server.client().chat(question, **OPTIONS)
        before = footprint(server)
        soak.run()
        time.sleep(1)
        after = footprint(server)
    problems = soak.problems + judge(before, after)
    for name, count in sorted(soak.counts.items()):
        print(f"{name:<24} {count}")
    for name in before:
        print(f"{name:<24} {before[name]:.0f} -> {after[name]:.0f}")
    print("\n".join(problems) or "nothing lost, nothing mixed up, nothing grew")
    return 1 if problems else 0


def look_after(server: LlamaServer, soak: Soak) -> None:
    try:
        supervise.watch(server, restart=True, first_wait=0.2)
    except DflashError as error:
        soak.problems.append(error.message)


if __name__ == "__main__":
    sys.exit(main())
