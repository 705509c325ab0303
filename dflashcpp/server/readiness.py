"""Is it up, is it ours, does it draft: waiting for a server by its progress, and proving what it does."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from dflashcpp.client import Client, ClientError
from dflashcpp.errors import DflashError
from dflashcpp.progress import SILENT, Progress

STALL_SECONDS = 120.0
_PROMPTS = (
    "def add(a, b):\n    return a + b\n\n\ndef subtract(a, b):\n",
    "1, 2, 3, 4, 5, 6, 7, 8,",
    "The quick brown fox jumps over the lazy dog. The quick brown fox",
)


@dataclass(frozen=True)
class Proof:
    """That drafting is on: a drafter is attached to the slots, and it made drafts."""

    attached: bool | None
    drafted: int
    accepted: int


def wait_ready(
    client: Client,
    nonce: str,
    log: Path,
    *,
    ended: Callable[[], DflashError | None],
    stall: float = STALL_SECONDS,
    progress: Progress = SILENT,
) -> None:
    """Wait until our own server has generated a token.

    A 503 and a growing log are life; `stall` seconds without either are not. `ended` tells why the child
    ended, when it did. Raises that error, or DflashError for a hang or a stranger on the port.
    """
    with progress.task("loading the model") as task:
        _wait_listening(client, log, ended, stall, task.note)
    _check_ours(client, nonce, ended)
    _check_model(client, ended)
    try:
        client.complete(_PROMPTS[1], n_predict=1, temperature=0, cache_prompt=False)
    except ClientError as error:
        raise _settled(ended) or error from error


def _wait_listening(
    client: Client,
    log: Path,
    ended: Callable[[], DflashError | None],
    stall: float,
    note: Callable[[str], None],
) -> None:
    size, life = -1, time.monotonic()
    while True:
        failure = ended()
        if failure is not None:
            raise failure
        state = client.health()
        if state == "ready":
            return
        now_size = log.stat().st_size if log.exists() else 0
        if now_size != size or state == "loading":
            size, life = now_size, time.monotonic()
            note(last_line(log))
        if time.monotonic() - life > stall:
            raise DflashError(
                f"llama-server has shown no sign of life for {stall:g} s; its last line: {last_line(log)}",
                hint=f"its log: {log}",
            )
        time.sleep(0.05)


def _settled(ended: Callable[[], DflashError | None], seconds: float = 5.0) -> DflashError | None:
    """Why the child ended, waiting a moment: the connection breaks before the process is gone."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        failure = ended()
        if failure is not None:
            return failure
        time.sleep(0.05)
    return None


def _check_ours(client: Client, nonce: str, ended: Callable[[], DflashError | None]) -> None:
    """The alias holds a word nobody else knows: another program may answer on the same port."""
    known: list[str] = []
    try:
        with suppress(KeyError, TypeError, AttributeError):
            for model in client.models():
                known += [str(model.get("id")), *map(str, model.get("aliases") or ())]
            if any(nonce in name for name in known):
                return
    except ClientError as error:
        if error.kind in ("unreachable", "cut", "timeout"):
            raise _settled(ended) or error from error
    raise _settled(ended, 1.0) or DflashError(
        f"{client.url} is answered by another server than the one just started", hint="choose another --port"
    )


def serves_nothing(client: Client) -> bool:
    """Whether it is a router: without a model llama-server answers as if all were well, but says that its
    `model_path` is `none` (llama.cpp tools/server/server-models.cpp). Raises ClientError.
    """
    return str(client.props().get("model_path", "unknown")) in ("", "none")


def _check_model(client: Client, ended: Callable[[], DflashError | None]) -> None:
    try:
        router = serves_nothing(client)
    except ClientError as error:
        if error.status in (404, 501):
            return  # a fork without /props: the token that follows tells enough
        raise _settled(ended) or error from error
    if router:
        raise DflashError(
            f"{client.url} runs without a model (router mode)",
            hint="is -m overruled by what stands after --?",
        )


def prove_drafting(
    client: Client, ended: Callable[[], DflashError | None], *, may_rest: bool = False
) -> Proof:
    """Generate until a draft was made. Raises DflashError when no drafter is attached or none drafts.

    `may_rest`: the server has been at work, or was started again and clients that waited came first, so an
    adaptive length may have found that drafting does not pay.
    """
    attached = client.speculative()
    if attached is False:
        raise DflashError(
            "llama-server runs without the drafter: it is not attached to its slots",
            hint="is --spec-type draft-dflash overruled? look at the log",
        )
    drafted = accepted = 0
    for prompt in _PROMPTS:
        try:
            answer = client.complete(prompt, n_predict=24, temperature=0, cache_prompt=False)
        except ClientError as error:
            raise _settled(ended) or error from error
        if answer.timings is not None and answer.timings.drafted:
            drafted += answer.timings.drafted
            accepted += answer.timings.accepted or 0
            break
        if may_rest and answer.timings is not None and answer.timings.steps_of_length:
            break
    else:
        raise DflashError(
            "the drafter is loaded but made no draft",
            hint="--spec-draft-p-min and --spec-draft-n-min can suppress every draft: leave them out",
        )
    return Proof(attached, drafted, accepted)


def last_line(log: Path) -> str:
    """The last line of a log, shortened; empty when there is none."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - 2000))
            lines = file.read().decode("utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    return next((line.strip()[:160] for line in reversed(lines) if line.strip()), "")
