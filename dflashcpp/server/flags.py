"""The flags of one llama-server, as its own `--help` tells them, and an argv made with them.

llama.cpp writes (common/arg.cpp, `common_arg::to_string`): names in the first columns, separated by commas,
the value's name after the last of them, the text from column 40 on, environment names in `(env: ...)`.
Flags that were removed stay listed and say what replaced them.
"""

from __future__ import annotations

import difflib
import functools
import re
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from dflashcpp.errors import DflashError, UsageError

_TEXT_COLUMN = 40
_YES_OR_NO = frozenset({"on", "off", "yes", "no", "true", "false", "enabled", "disabled", "0", "1"})
_OPTIONAL = re.compile(r"^\[.*\]$")


@dataclass(frozen=True)
class Flag:
    """One flag: its names as llama.cpp lists them, its value's name (None: a switch) and its text."""

    names: tuple[str, ...]
    value: str | None
    text: str = ""

    @property
    def removed(self) -> bool:
        """Whether the build lists it only to say that it is gone."""
        return "has been removed" in self.text

    @property
    def further_values(self) -> int:
        """How many values follow the first: 1 for `START END`."""
        return 1 if self.value and re.fullmatch(r"[A-Z]+ [A-Z]+", self.value) else 0

    @property
    def choices(self) -> tuple[str, ...]:
        """The values there are, where the help lists them all as `{one,other}`."""
        listed = re.fullmatch(r"\{([^{}]+)\}", self.value or "")
        return tuple(word.strip() for word in listed[1].split(",")) if listed else ()

    @property
    def long(self) -> str:
        """The first name with two dashes, the one that is easiest to read."""
        return next((name for name in self.names if name.startswith("--")), self.names[0])


@dataclass(frozen=True)
class Given:
    """A flag as somebody gave it: the name used, and its value as text (None for a switch).

    `more` holds further values, for the few flags that take two.
    """

    name: str
    value: str | None = None
    more: tuple[str, ...] = ()

    def argv(self) -> list[str]:
        """As arguments of a process."""
        return [self.name] if self.value is None else [self.name, self.value, *self.more]


@dataclass(frozen=True)
class Parsed:
    """A command line split by a table: flags in order, words that are no flags, and what came after `--`."""

    flags: tuple[Given, ...]
    words: tuple[str, ...] = ()
    verbatim: tuple[str, ...] = ()


@dataclass(frozen=True)
class FlagTable:
    """What one build of llama-server understands."""

    flags: tuple[Flag, ...]
    source: str = "llama-server"
    _by_name: Mapping[str, Flag] = field(init=False, repr=False, compare=False, default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_by_name", {name: flag for flag in self.flags for name in flag.names})

    @classmethod
    def parse(cls, text: str, source: str = "llama-server") -> FlagTable:
        """The table in a `--help` text. Raises DflashError when the text holds no flags."""
        flags = tuple(_flags(text.splitlines()))
        if not any("--model" in flag.names for flag in flags):
            raise DflashError(
                f"{source} --help lists no --model flag",
                hint="is it llama-server? build ours with: dflashcpp build",
            )
        return cls(flags, source)

    def find(self, name: str) -> Flag | None:
        """The flag of this name (`-md`, `--model-draft`, `--spec-draft-model` are one), or None."""
        return self._by_name.get(name)

    def has(self, name: str) -> bool:
        """Whether the build takes this flag (removed ones do not count)."""
        flag = self.find(name)
        return flag is not None and not flag.removed

    def same(self, one: str, other: str) -> bool:
        """Whether two names mean one flag."""
        first = self.find(one)
        return one == other or (first is not None and first is self.find(other))

    def near(self, name: str) -> list[str]:
        """Names that look like `name`, best first."""
        usable = [one for flag in self.flags if not flag.removed for one in flag.names]
        return difflib.get_close_matches(name, usable, n=3, cutoff=0.6)

    def check(self, name: str) -> Flag:
        """The flag of this name. Raises UsageError with the near matches, or what replaced a removed one."""
        flag = self.find(name)
        if flag is None:
            near = self.near(name)
            hint = f"did you mean {' or '.join(near)}? " if near else ""
            raise UsageError(
                f"this llama-server does not know {name}",
                hint=f"{hint}to pass it all the same, put it after --",
            )
        if flag.removed:
            raise UsageError(f"{name} was removed from llama-server", hint=_replacement(flag.text))
        return flag

    def split(self, arguments: Sequence[str]) -> Parsed:
        """Split a command line into flags with their values, plain words, and what follows `--`.

        Raises UsageError for a flag the build does not know, and for a missing value.
        """
        given: list[Given] = []
        words: list[str] = []
        rest = list(arguments)
        while rest:
            word = rest.pop(0)
            if word == "--":
                return Parsed(tuple(given), tuple(words), tuple(rest))
            if not _is_flag(word):
                words.append(word)
                continue
            given.append(self._take(word, rest))
        return Parsed(tuple(given), tuple(words))

    def _take(self, word: str, rest: list[str]) -> Given:
        name, equals, value = word.partition("=")
        if not equals:
            name, value = word, ""
        flag = self.check(name)
        if flag.value is None:
            if equals or (rest and rest[0].lower() in _YES_OR_NO):
                off = next((one for one in flag.names if one.startswith("--no-")), None)
                raise UsageError(
                    f"{name} takes no value, but '{value if equals else rest[0]}' was given",
                    hint=f"{off} turns it off" if off else None,
                )
            return Given(name)
        if equals:
            return Given(name, value)
        if rest and not self._must_be_flag(rest[0]):
            value = rest.pop(0)
            more = tuple(rest.pop(0) for _ in range(flag.further_values) if rest)
            return Given(name, value, more)
        if _OPTIONAL.match(flag.value):
            return Given(name)
        raise UsageError(f"{name} needs a value: {name} {flag.value}")

    def _must_be_flag(self, word: str) -> bool:
        """A value may open with a dash (`-1`, a text); a word that the build knows as a flag is none."""
        return word == "--" or self.find(word) is not None

    def spec_types(self) -> tuple[str, ...]:
        """The values of `--spec-type` this build lists."""
        flag = self.find("--spec-type")
        return tuple(flag.value.strip("[]{}").replace("|", ",").split(",")) if flag and flag.value else ()


def _is_flag(word: str) -> bool:
    return len(word) > 1 and word.startswith("-") and not word[1].isdigit()


def _flags(lines: Iterable[str]) -> Iterable[Flag]:
    """Flags in the order of the text. A line that begins with a dash opens one, an indented line goes on."""
    names: tuple[str, ...] = ()
    value: str | None = None
    text: list[str] = []
    for line in lines:
        if line.startswith("-") and not line.startswith("-----"):
            if names:
                yield Flag(names, value, " ".join(text))
            names, value, first = _head(line)
            text = [first] if first else []
        elif line.startswith(" ") and names:
            text.append(line.strip())
        elif names:
            yield Flag(names, value, " ".join(text))
            names, value, text = (), None, []
    if names:
        yield Flag(names, value, " ".join(text))


def _head(line: str) -> tuple[tuple[str, ...], str | None, str]:
    """Names, the value's name, and the beginning of the text, of a flag's first line."""
    head, text = line, ""
    if len(line) > _TEXT_COLUMN and line[_TEXT_COLUMN - 1] == " " and line[:_TEXT_COLUMN].strip():
        head, text = line[:_TEXT_COLUMN].rstrip(), line[_TEXT_COLUMN:].strip()
    names: list[str] = []
    rest = head.strip()
    while found := re.match(r"(-{1,2}[^\s,]+)(,?)\s*", rest):
        names.append(found.group(1))
        rest = rest[found.end() :]
        if not found.group(2):
            break
    return tuple(names), rest.strip() or None, text


def _replacement(text: str) -> str:
    """What the help says about a removed flag, from `use ...` on."""
    told = re.sub(r"\s*\(env: [^)]*\)", "", text)
    found = re.search(r"use .*", told)
    return found.group(0) if found else told


@functools.lru_cache(maxsize=8)
def _read(binary: Path, stamp: tuple[int, int]) -> FlagTable:
    try:
        done = subprocess.run(
            [str(binary), "--help"], capture_output=True, text=True, errors="replace", timeout=60
        )
    except OSError as error:
        raise DflashError(
            f"{binary} cannot be run: {error.strerror or error}", hint="build ours with: dflashcpp build"
        ) from error
    except subprocess.TimeoutExpired as error:
        raise DflashError(f"{binary} --help did not end within 60 s") from error
    if done.returncode != 0:
        last = done.stderr.strip().splitlines()[-1:] or ["it printed nothing"]
        raise DflashError(f"{binary} --help failed with exit code {done.returncode}: {last[0]}")
    return FlagTable.parse(done.stdout, str(binary))


def read_flags(binary: Path) -> FlagTable:
    """The flags of this llama-server, by running it with `--help` (once for each version of the file).

    Raises DflashError when it cannot be run or prints no flags.
    """
    try:
        info = binary.stat()
    except OSError as error:
        raise DflashError(f"{binary} is missing", hint="build it with: dflashcpp build") from error
    return _read(binary, (info.st_size, info.st_mtime_ns))


def from_options(options: Mapping[str, str | int | float | bool | None], table: FlagTable) -> list[Given]:
    """Flags from Python names: `ctx_size=4096` is `--ctx-size 4096`, True a switch, None nothing.

    False asks for the switch's `--no-` form. Raises UsageError for names the build does not know.
    """
    given = []
    for key, value in options.items():
        name = "--" + key.replace("_", "-")
        if value is None:
            continue
        if value is False:
            name, value = "--no-" + name[2:], True
        flag = table.check(name)
        if (flag.value is None) != (value is True):
            raise UsageError(f"{name} " + ("takes no value" if flag.value is None else "needs a value"))
        given.append(Given(name, None if value is True else str(value)))
    return given
