"""From what the user gave to the exact argv of llama-server, with every default and risk said aloud."""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dflashcpp import knowledge
from dflashcpp.errors import DflashError, UsageError
from dflashcpp.server.flags import FlagTable, Given

SPEC_TYPE = "draft-dflash"
DEFAULT_N_MAX = 4
_QUANTISED = re.compile(r"(?!f16$|bf16$|f32$).*")
_DROPPED = (
    "MODEL",
    "SPEC_TYPE",
    "SPEC_DRAFT_MODEL",
    "SPEC_DRAFT_HF_REPO",
    "HF_REPO",
    "HOST",
    "PORT",
    "ALIAS",
)


@dataclass(frozen=True)
class Launch:
    """One start of llama-server, complete. `depth`: how many tokens the drafter was trained to draft;
    `patched`: whether our patches are in the build.

    `notes` are defaults we set, `warnings` risks that are taken.
    """

    binary: Path
    flags: tuple[Given, ...]
    verbatim: tuple[str, ...]
    model: Path
    draft: Path | None
    host: str
    port: int
    alias: str
    nonce: str
    api_key_file: Path | None = None
    depth: int | None = None
    patched: bool = False
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def argv(self) -> list[str]:
        """The command line."""
        return [str(self.binary), *(word for flag in self.flags for word in flag.argv()), *self.verbatim]

    @property
    def url(self) -> str:
        """Where a client on this machine finds it."""
        host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(self.host, self.host)
        host = f"[{host}]" if ":" in host and not host.startswith("[") else host
        return f"http://{host}:{self.port}"

    @property
    def spec_type(self) -> str:
        """The value of `--spec-type`, `none` without a drafter."""
        return next((flag.value or "" for flag in self.flags if flag.name == "--spec-type"), "none")

    def same_work(self) -> list[str]:
        """The argv without what differs from start to start (the nonce in the alias): to compare servers."""
        return [word.replace(f",{self.nonce}", "") for word in self.argv]


def environment() -> dict[str, str]:
    """The child's environment: ours, without what argv says anyway, and without gdb on an abort.

    A stray `LLAMA_ARG_SPEC_DRAFT_MODEL` would put a drafter into a baseline that must have none.
    """
    own = {
        key: value
        for key, value in os.environ.items()
        if key not in {f"LLAMA_ARG_{name}" for name in _DROPPED}
    }
    return {**own, "GGML_NO_BACKTRACE": "1"}


def inherited() -> list[str]:
    """Variables of the environment that llama-server will read as flags."""
    return sorted(key for key in environment() if key.startswith("LLAMA_ARG_"))


class _Composer:
    """Collects flags; the user's come last and win, as in llama.cpp, but no flag is said twice."""

    def __init__(self, table: FlagTable, given: Sequence[Given]) -> None:
        self.table = table
        self.given = list(given)
        self.notes: list[str] = []
        self.warnings: list[str] = []

    def value(self, name: str) -> str | None:
        """What was given for this flag under any of its names, the last time."""
        found = [flag for flag in self.given if self.table.same(flag.name, name)]
        return found[-1].value if found else None

    def has(self, name: str) -> bool:
        return any(self.table.same(flag.name, name) for flag in self.given)

    def take(self, name: str) -> str | None:
        """The value, and the flag is taken out."""
        value = self.value(name)
        self.given = [flag for flag in self.given if not self.table.same(flag.name, name)]
        return value

    def put(self, name: str, value: str | None = None) -> None:
        """Set a flag, if the build knows it."""
        self.take(name)
        if self.table.has(name):
            self.given.append(Given(name, value))

    def default(self, name: str, value: str | None, why: str) -> None:
        """Set a flag that was not given, and say so."""
        if not self.has(name) and self.table.has(name):
            self.given.append(Given(name, value))
            self.notes.append(f"{name}{f' {value}' if value is not None else ''}: {why}")


def compose(
    table: FlagTable,
    binary: Path,
    given: Sequence[Given],
    verbatim: Sequence[str] = (),
    *,
    model: Path,
    draft: Path | None,
    depth: int | None = None,
    version: int | None = None,
    trained_context: int | None = None,
    recommended: Mapping[str, Any] | None = None,
    alias: str | None = None,
) -> Launch:
    """Put the launch together.

    `depth`: how many tokens the drafter was trained to draft; `version`: 1 DFlash, 2 DFlash-2.
    `trained_context`: how many tokens of context the target was trained for.
    `recommended`: a pair's flags, used where the user gave none.

    Raises UsageError and DflashError for what cannot work.
    """
    from dflashcpp.server.ports import free_port

    check_allowed(table, given, verbatim)
    _check_values(table, given)
    made = _Composer(table, given)
    made.take("--model")
    made.take("--model-draft")
    for name, value in (recommended or {}).items():
        if draft is None and any(made.table.same(f"--{name}", other) for other in _DRAFT_ONLY):
            continue
        made.default(f"--{name}", None if value is True else str(value), "as models/pairs.toml recommends")
    host = made.take("--host") or "127.0.0.1"
    port = _whole(made.take("--port") or "8080", "--port")
    alias = made.take("--alias") or alias or model.stem
    nonce = f"~dflashcpp-{secrets.token_hex(6)}"
    spec = _drafting(made, draft, depth)
    _defaults(made, host)
    _check_context(made, trained_context)
    _risks(made, version, draft)
    key_file = _api_key_file(made)
    port = port or free_port(host)
    head = [Given("--model", str(model)), *spec]
    tail = [Given("--host", host), Given("--port", str(port)), Given("--alias", f"{alias},{nonce}")]
    return Launch(
        binary=binary,
        flags=(*head, *made.given, *tail),
        verbatim=tuple(verbatim),
        model=model,
        draft=draft,
        host=host,
        port=port,
        alias=alias,
        nonce=nonce,
        api_key_file=key_file,
        depth=depth,
        notes=tuple(made.notes),
        warnings=tuple(made.warnings),
    )


def _drafting(made: _Composer, draft: Path | None, depth: int | None) -> list[Given]:
    """A drafter without `--spec-type draft-dflash` is silently ignored by llama-server: always say it."""
    asked = made.take("--spec-type")
    if draft is None:
        if asked and SPEC_TYPE in asked.split(","):
            raise UsageError(f"--spec-type {asked} needs a drafter", hint="pass its GGUF with -md")
        for name in _DRAFT_ONLY:
            if made.has(name):
                made.take(name)
                made.notes.append(f"{name} means nothing without a drafter: left out")
        return [Given("--spec-type", asked)] if asked else []
    if not made.table.has("--spec-type") or SPEC_TYPE not in made.table.spec_types():
        raise DflashError(
            f"{made.table.source} does not know --spec-type {SPEC_TYPE}: it cannot run a drafter",
            hint="build one that can: dflashcpp build",
        )
    types = [kind for kind in (asked or "").split(",") if kind and kind != SPEC_TYPE]
    if "none" in types:
        raise UsageError(
            "--spec-type none with a drafter: nothing would be drafted", hint="leave -md out instead"
        )
    if types:
        made.warnings.append(f"--spec-type {asked}: {SPEC_TYPE} and others take turns, they are not combined")
    made.put("--spec-draft-n-max", str(_n_max(made, depth)))
    made.default(
        "--spec-draft-adaptive", None, "drafts as many tokens as pay, none where drafting would cost time"
    )
    return [Given("--model-draft", str(draft)), Given("--spec-type", ",".join([SPEC_TYPE, *types]))]


_DRAFT_ONLY = (
    "--spec-draft-n-max",
    "--spec-draft-n-min",
    "--spec-draft-p-min",
    "--spec-draft-ngl",
    "--spec-draft-adaptive",
    "--spec-draft-block",
    "--spec-draft-ctx-size",
    "--spec-draft-inject",
    "--spec-draft-sampling",
    "--spec-draft-ubatch-size",
)


def _n_max(made: _Composer, depth: int | None) -> int:
    asked = made.value("--spec-draft-n-max")
    wanted = _whole(asked, "--spec-draft-n-max") if asked is not None else DEFAULT_N_MAX
    if wanted < 1:
        raise UsageError(
            f"--spec-draft-n-max {wanted}: nothing would be drafted", hint="leave -md out instead"
        )
    if depth is not None and wanted > depth:
        text = f"--spec-draft-n-max {wanted} is more than the drafter was trained for: {depth} is used"
        (made.warnings if asked is not None else made.notes).append(text)
        wanted = depth
    elif asked is None:
        made.notes.append(f"--spec-draft-n-max {wanted}: our default (llama-server's is 3)")
    _check_ubatch(made, wanted)
    return wanted


def _check_ubatch(made: _Composer, n_max: int) -> None:
    """Without our loop all blocks are decoded in one ubatch; llama-server aborts if they do not fit."""
    if made.table.has("--spec-draft-inject"):
        return
    slots = max(1, _whole(made.value("--parallel") or "1", "--parallel"))
    ubatch = _whole(made.value("--ubatch-size") or "512", "--ubatch-size")
    rows = slots * (n_max + 1)
    if rows > ubatch:
        raise UsageError(
            f"{slots} slots drafting {n_max} tokens need {rows} rows at once, but --ubatch-size is {ubatch}: "
            "llama-server would abort",
            hint=f"use -ub {rows} or more, fewer slots, or a smaller --spec-draft-n-max",
        )


def _defaults(made: _Composer, host: str) -> None:
    made.default("--parallel", "1", "one slot, so that the whole context is yours and drafting pays")
    made.default("--metrics", None, "the verify steps, for the mean accepted length")
    if not made.has("--verbose"):
        made.default("--verbosity", "4", "llama-server tells its buffer sizes only then")
    if any(_QUANTISED.fullmatch(made.value(name) or "f16") for name in ("--cache-type-k", "--cache-type-v")):
        made.default("--flash-attn", "on", "a quantised KV cache needs it")
    if host not in ("127.0.0.1", "localhost", "::1") and not (
        made.has("--api-key-file") or made.has("--api-key")
    ):
        made.warnings.append(
            f"--host {host} lets other machines in, and no API key is asked: use --api-key-file FILE"
        )
    for name in inherited():
        made.notes.append(f"{name} is set in the environment: llama-server reads it too")


def _check_context(made: _Composer, trained: int | None) -> None:
    """llama-server caps a slot at the trained context, and all the same keeps memory for what was asked."""
    asked = _whole(made.value("--ctx-size") or "0", "--ctx-size")
    slots = max(1, _whole(made.value("--parallel") or "1", "--parallel"))
    if trained and asked > trained * slots:
        made.warnings.append(
            f"-c {asked} is more than the {trained} tokens the target was trained for: llama-server uses "
            f"{trained} for each slot and keeps memory for all of it (use -c {trained * slots})"
        )


_NOT_NEGATIVE = ("--spec-draft-block", "--spec-draft-ubatch-size", "--spec-draft-ctx-size")


def _check_values(table: FlagTable, given: Sequence[Given]) -> None:
    """What llama-server would refuse only after the start: values of our flags, and those a build lists."""
    for flag in given:
        known = table.find(flag.name)
        if known is None or known.value is None or flag.value is None:
            continue
        if known.choices and flag.value not in known.choices:
            raise UsageError(
                f"{flag.name} {flag.value}: no such value", hint=f"there are: {', '.join(known.choices)}"
            )
        if known.long in _NOT_NEGATIVE and _whole(flag.value, flag.name) < 0:
            raise UsageError(f"{flag.name} {flag.value}: a number from 0 on is expected")
        if known.long == "--parallel" and _whole(flag.value, flag.name) == 0:
            raise UsageError(f"{flag.name} 0: a server needs a slot", hint=f"{flag.name} 1")


def check_allowed(table: FlagTable, given: Sequence[Given], verbatim: Sequence[str] = ()) -> None:
    """Refuse what never works here, or gives a key away, also after `--`; to be asked before anything is
    fetched. Raises UsageError.
    """
    rows = knowledge.table("models/serving.toml")["risk"]
    never = {risk["flag"]: risk for risk in rows if risk.get("never")}
    for name in [*(flag.name for flag in given), *(word.partition("=")[0] for word in verbatim)]:
        if table.same(name, "--api-key"):
            raise UsageError(
                "--api-key would show the key to everybody who lists processes",
                hint="write it into a file only you can read, and pass --api-key-file FILE",
            )
        found = next((risk for flag, risk in never.items() if table.same(name, flag)), None)
        if found is not None:
            raise UsageError(found["text"], hint=found["fix"])


def _risks(made: _Composer, version: int | None, draft: Path | None) -> None:
    """The table `[[risk]]` of models/serving.toml."""
    holds = {
        "always": True,
        "drafter": draft is not None,
        "dflash2": draft is not None and version == 2,
    }
    said: set[str] = set()
    for risk in knowledge.table("models/serving.toml")["risk"]:
        if not holds[risk["when"]] or not made.has(risk["flag"]) or risk["flag"] in said:
            continue
        if not re.fullmatch(risk.get("value", ".*"), made.value(risk["flag"]) or ""):
            continue
        if risk["level"] == "refuse":
            raise UsageError(risk["text"], hint=risk["fix"])
        said.add(risk["flag"])
        made.warnings.append(f"{risk['text']} ({risk['fix']})")


def _api_key_file(made: _Composer) -> Path | None:
    value = made.value("--api-key-file")
    if value is None:
        return None
    path = Path(value).expanduser()
    if not path.is_file():
        raise DflashError(f"--api-key-file {value}: there is no such file")
    if path.stat().st_mode & 0o077:
        made.warnings.append(f"{value} can be read by others: chmod 600 it")
    made.put("--api-key-file", str(path))
    return path


def read_api_key(path: Path | None) -> str | None:
    """The first key of a key file; without a file the environment's, as llama-server has it.

    Raises DflashError when the file cannot be read or holds no key.
    """
    if path is None:
        return os.environ.get("LLAMA_API_KEY", "").split(",")[0] or None
    try:
        lines = [line.strip() for line in path.expanduser().read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise DflashError(f"the API key file {path} cannot be read: {reason}") from error
    found = next((line for line in lines if line and not line.startswith("#")), None)
    if found is None:
        raise DflashError(f"{path} holds no API key", hint="write the key into its first line")
    return found


def _whole(text: str, name: str) -> int:
    try:
        return int(text)
    except ValueError as error:
        raise UsageError(f"{name} {text}: that is no whole number") from error


def on_port(launch: Launch, port: int) -> Launch:
    """The same launch on another port."""
    flags = tuple(Given("--port", str(port)) if flag.name == "--port" else flag for flag in launch.flags)
    return replace(launch, flags=flags, port=port)
