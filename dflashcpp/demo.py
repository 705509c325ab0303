"""The main job on the built-in pair, from nothing to a proof: what `make demo` and `dflashcpp demo` do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflashcpp.agreement import Agreement, compare
from dflashcpp.errors import DflashError
from dflashcpp.progress import SILENT, Progress
from dflashcpp.stats import Timings, number

if TYPE_CHECKING:
    from dflashcpp.client import Client
    from dflashcpp.llamacpp import Build
    from dflashcpp.pairs import Pair
    from dflashcpp.server import LlamaServer

QUESTIONS = (
    (
        "code",
        "Please implement a helper in Python to find the largest number in a list and show how to call it.",
    ),
    ("prose", "Could you tell a ten year old what a volcano is?"),
)
LEAST_CODE_LENGTH = 1.5
MAX_TOKENS = 128
CONTEXT = 2048


@dataclass(frozen=True)
class Asked:
    """One question, answered without and with the drafter."""

    kind: str
    question: str
    text: str
    agreement: Agreement
    plain: Timings
    drafted: Timings

    @property
    def ratio(self) -> float | None:
        """Speed with the drafter divided by speed without."""
        with_, without = self.drafted.predicted_per_second, self.plain.predicted_per_second
        return with_ / without if with_ and without else None


@dataclass(frozen=True)
class DemoResult:
    """What the demo showed. `problems` is empty when all of it was as it must be."""

    llama_server: Path
    version: str
    target: Path
    drafter: Path
    threads: int
    n_max: int
    asked: tuple[Asked, ...]
    memory: dict[str, dict[str, float]]
    memory_rows: tuple[tuple[str, ...], ...]
    problems: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain values for `--json`."""
        return {
            "llama_server": str(self.llama_server),
            "version": self.version,
            "target": str(self.target),
            "drafter": str(self.drafter),
            "threads": self.threads,
            "spec_draft_n_max": self.n_max,
            "questions": [_asked_json(one) for one in self.asked],
            "memory": self.memory,
            "problems": list(self.problems),
            "pass": not self.problems,
        }


def _asked_json(one: Asked) -> dict[str, Any]:
    return {
        "kind": one.kind,
        "question": one.question,
        "text": one.text,
        "agreement": asdict(one.agreement),
        "without_drafter": one.plain.as_json(),
        "with_drafter": one.drafted.as_json(),
        "ratio": one.ratio,
    }


@dataclass(frozen=True)
class _Answer:
    prompt: list[int]
    tokens: tuple[int, ...]
    text: str
    timings: Timings


def run(
    *,
    build: Build | Path | str | None = None,
    draft_type: str | None = None,
    n_max: int = 4,
    threads: int | None = None,
    questions: Sequence[tuple[str, str]] = QUESTIONS,
    progress: Progress = SILENT,
) -> DemoResult:
    """Build llama.cpp, convert the drafter, fetch the target, answer the questions with and without it.

    What was made before is used again. `build`: another llama-server than our own build. `threads`: for
    llama-server, one less than the machine's cores when left out. Raises DflashError when a step fails;
    what the comparison shows is in `problems`.
    """
    from dflashcpp import llamacpp, pairs
    from dflashcpp.server import spare_threads

    made = build if build is not None else llamacpp.build(progress=progress)
    pair: Pair = pairs.load_pair()
    target = pairs.ensure_target(pair, progress)
    drafter = pairs.ensure_drafter(pair, progress, type=draft_type, target=target)
    threads = threads or spare_threads()
    options: dict[str, Any] = {"build": made, "ctx_size": CONTEXT, "threads": threads, "progress": progress}
    progress.say("with the drafter")
    with _server(target, drafter, options, n_max) as server:
        drafted = _ask_all(server, questions, progress)
        memory = server.memory.engine if server.memory else None
        version = str(server.client().props().get("build_info", ""))
        binary = server.launch.binary
        n_max = min(n_max, server.launch.depth or n_max)
    progress.say("without it: another start, so that no drafter is loaded at all")
    with _server(target, None, options, None) as server:
        asked = _compared(server, questions, drafted, progress)
    assert memory is not None
    return DemoResult(
        llama_server=binary,
        version=version,
        target=target,
        drafter=drafter,
        threads=threads,
        n_max=n_max,
        asked=asked,
        memory=memory.as_dict(),
        memory_rows=tuple(tuple(row) for row in memory.table()[1]),
        problems=tuple(_problems(asked)),
    )


def _server(target: Path, drafter: Path | None, options: dict[str, Any], n_max: int | None) -> LlamaServer:
    from dflashcpp.server import LlamaServer

    # a fixed length, so that what is shown is the drafter's doing and not the choice of the adaptive length
    adaptive = False if drafter is not None else None
    return LlamaServer(target, drafter, spec_draft_n_max=n_max, spec_draft_adaptive=adaptive, **options)


def _ask_all(server: LlamaServer, questions: Sequence[tuple[str, str]], progress: Progress) -> list[_Answer]:
    client = server.client()
    return [_ask(client, kind, question, progress) for kind, question in questions]


def _ask(client: Client, kind: str, question: str, progress: Progress) -> _Answer:
    """The greedy answer, with its token ids."""
    prompt = client.apply_template(question)
    with progress.task(f"asking the {kind} question", MAX_TOKENS, "tokens") as task:
        stream = client.complete(
            prompt, True, n_predict=MAX_TOKENS, temperature=0, cache_prompt=False, return_tokens=True
        )
        for piece in stream:
            task.advance(len(piece.tokens))
    answer = stream.answer
    if answer.timings is None:
        raise DflashError(f"{client.url} told no timings of its answer")
    return _Answer(client.tokenize(prompt, begin=True), answer.tokens, answer.text, answer.timings)


def _compared(
    server: LlamaServer, questions: Sequence[tuple[str, str]], drafted: Sequence[_Answer], progress: Progress
) -> tuple[Asked, ...]:
    """The questions again without a drafter, each beside the answer that had one."""
    client = server.client()
    if client.speculative():
        raise DflashError(
            "the baseline has a drafter loaded", hint="is LLAMA_ARG_SPEC_TYPE set in the environment?"
        )
    found = []
    for (kind, question), other in zip(questions, drafted, strict=True):
        plain = _ask(client, kind, question, progress)
        if plain.timings.drafted:
            raise DflashError("the baseline drafted tokens", hint="unset the LLAMA_ARG_SPEC_* variables")
        agreement = compare(client, plain.prompt, plain.tokens, other.tokens)
        found.append(Asked(kind, question, plain.text, agreement, plain.timings, other.timings))
    return tuple(found)


def _problems(asked: Sequence[Asked]) -> list[str]:
    """What is not as it must be, a sentence each."""
    problems = []
    for one in asked:
        if not one.agreement.agrees:
            problems.append(f"the drafter changed the {one.kind} answer: {one.agreement.text()}")
        length = one.drafted.mean_accepted_length
        if one.kind == "code" and (length is None or length <= LEAST_CODE_LENGTH):
            problems.append(
                f"mean accepted length on code: {number(length, 2)}, must be above {LEAST_CODE_LENGTH}"
            )
    return problems


def table(result: DemoResult) -> tuple[list[str], list[list[str]]]:
    """Headers and rows for a person: one line a question."""
    headers = [
        "question",
        "texts",
        "tok/s without",
        "tok/s with",
        "ratio",
        "drafted",
        "accepted",
        "mean length",
    ]
    rows = [
        [
            one.kind,
            one.agreement.verdict,
            number(one.plain.predicted_per_second, 1),
            number(one.drafted.predicted_per_second, 1),
            number(one.ratio, 2),
            number(one.drafted.drafted, 0),
            number(one.drafted.accepted, 0),
            number(one.drafted.mean_accepted_length, 2),
        ]
        for one in result.asked
    ]
    return headers, rows
