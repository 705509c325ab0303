"""The user's config file: the pair to use by default, and profiles of machines behind SSH.

    pair = "muse-glimmer-30b"

    [remote.a4000]
    host = "a4000"             # as in ~/.ssh/config
    local_port = 8001
    remote_port = 8001
    directory = "models"       # on the far side, for models that are pushed there
    server = "/opt/llama.cpp/build/bin/llama-server"
    pair = "muse-glimmer-30b"
    arguments = ["-c", "32768"]

Values are changed line by line, so that comments and order stay as the person wrote them.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import os
import secrets
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflashcpp import paths
from dflashcpp.errors import DflashError

DEFAULT_PORT = 8001
_BARE = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_")
_SECRETS = ("password", "passphrase", "secret", "token", "api_key", "api-key", "apikey", "private_key")


@dataclass(frozen=True)
class Profile:
    """One machine behind SSH. A plain host name is a profile with nothing set but `host`."""

    name: str
    host: str
    local_port: int = DEFAULT_PORT
    remote_port: int = DEFAULT_PORT
    directory: str | None = None
    server: str | None = None
    pair: str | None = None
    arguments: tuple[str, ...] = ()
    ssh_options: tuple[str, ...] = ()
    api_key_file: str | None = None


def load(path: Path | None = None) -> dict[str, Any]:
    """The config file as a dictionary; empty when there is no file.

    Raises DflashError when the file cannot be read or is no TOML.
    """
    path = path or paths.config_file()
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise DflashError(f"{path} is no valid TOML: {error}", hint="mend the line it names") from None


def default_pair(path: Path | None = None) -> str | None:
    """The pair set by `dflashcpp use PAIR`, or None."""
    return _text(load(path), "pair", str(path or paths.config_file()))


def profiles(path: Path | None = None) -> dict[str, Profile]:
    """Every `[remote.NAME]` of the config file. Raises DflashError for keys or values that mean nothing."""
    table = load(path).get("remote", {})
    where = path or paths.config_file()
    if not isinstance(table, dict) or not all(isinstance(entry, dict) for entry in table.values()):
        raise DflashError(f"{where}: 'remote' must hold tables, [remote.NAME]")
    return {name: _profile(name, entry, f"{where}: [remote.{name}]") for name, entry in table.items()}


def profile(name: str, path: Path | None = None) -> Profile:
    """The profile `name`, else a profile for the plain SSH destination `name` (host or user@host)."""
    return profiles(path).get(name) or Profile(name=name, host=name)


def set_value(keys: Sequence[str], value: str | int | bool | list[str], path: Path | None = None) -> Path:
    """Set one value, for example `("remote", "a4000", "host")`, and leave all else untouched.

    The edited text is parsed before it replaces the file: it must mean the old contents with just
    this value changed. Returns the file. Raises DflashError when a line edit cannot do that.
    """
    path = (path or paths.config_file()).resolve()
    before = load(path)
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    for edited in _edits(text, keys, value):
        if _parses_to(edited, _with_value(before, keys, value)):
            _replace(path, edited)
            return path
    line = f"{_key(keys[-1])} = {_value(value)}"
    raise DflashError(f"{path} is written in a way that {line} cannot be set in", hint="set it by hand")


def _profile(name: str, entry: dict[str, Any], where: str) -> Profile:
    known = {field.name for field in dataclasses.fields(Profile)} - {"name"}
    for key in entry:
        if key not in known:
            raise _unknown_key(key, known, where)
    texts = {key: _text(entry, key, where) for key in ("host", "directory", "server", "pair", "api_key_file")}
    ports = {key: _port(entry, key, where) for key in ("local_port", "remote_port")}
    lists = {key: _texts(entry, key, where) for key in ("arguments", "ssh_options")}
    host = texts.pop("host") or name
    return Profile(name=name, host=host, **texts, **ports, **lists)  # type: ignore[arg-type]


def _unknown_key(key: str, known: set[str], where: str) -> DflashError:
    if any(word in key.lower() for word in _SECRETS):
        return DflashError(
            f"{where} holds '{key}': secrets do not belong in the config file",
            hint="for an API key write api_key_file = PATH; SSH keys belong to ssh-agent or ~/.ssh/config",
        )
    near = difflib.get_close_matches(key, known, 1)
    meant = f"did you mean {near[0]}?" if near else f"known: {', '.join(sorted(known))}"
    return DflashError(f"{where} holds '{key}', which is unknown", hint=meant)


def _text(entry: dict[str, Any], key: str, where: str) -> str | None:
    value = entry.get(key)
    if value is not None and (not isinstance(value, str) or not value):
        raise DflashError(f"{where}: {key} must be a text, found {value!r}")
    return value


def _texts(entry: dict[str, Any], key: str, where: str) -> tuple[str, ...]:
    value = entry.get(key, [])
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise DflashError(f"{where}: {key} must be a list of texts, found {value!r}")
    return tuple(value)


def _port(entry: dict[str, Any], key: str, where: str) -> int:
    value = entry.get(key, DEFAULT_PORT)
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 65535:
        raise DflashError(f"{where}: {key} must be a port from 1 to 65535, found {value!r}")
    return value


def _edits(text: str, keys: Sequence[str], value: Any) -> list[str]:
    """Candidate texts, likeliest first; the caller keeps the first that parses to what is wanted."""
    lines = text.splitlines(keepends=True)
    if lines and not lines[-1].endswith("\n"):
        lines[-1] += "\n"
    new = f"{_key(keys[-1])} = {_value(value)}\n"
    header = f"[{'.'.join(_key(key) for key in keys[:-1])}]\n" if len(keys) > 1 else ""
    start, end = _section(lines, keys[:-1])
    found = []
    if start is not None:
        for index in range(start, end):
            name = lines[index].partition("=")[0].strip().strip("\"'")
            if name == keys[-1]:  # a value may span lines: try every length
                found += ["".join([*lines[:index], new, *lines[stop:]]) for stop in range(index + 1, end + 1)]
        found.append("".join([*lines[:start], new, *lines[start:]]))
    elif header:
        gap = "\n" if lines else ""
        found.append("".join([*lines, gap, header, new]))
    return found


def _section(lines: list[str], table: Sequence[str]) -> tuple[int | None, int]:
    """The lines [start, end) that belong to `table`; start is None when it has no header."""
    start = 0 if not table else None
    for index, line in enumerate(lines):
        if not line.lstrip().startswith("["):
            continue
        if start is not None:
            return start, index
        if _header(line) == list(table):
            start = index + 1
    return start, len(lines)


def _header(line: str) -> list[str] | None:
    """The dotted name in a `[table]` line, or None for another kind of line."""
    try:
        parsed: Any = tomllib.loads(line)
    except tomllib.TOMLDecodeError:
        return None
    names = []
    while isinstance(parsed, dict) and len(parsed) == 1:
        (name, parsed), *_ = parsed.items()
        names.append(name)
    return names if parsed == {} else None


def _with_value(before: dict[str, Any], keys: Sequence[str], value: Any) -> dict[str, Any]:
    after = json.loads(json.dumps(before, default=str))
    place = after
    for key in keys[:-1]:
        place = place.setdefault(key, {})
        if not isinstance(place, dict):
            raise DflashError(f"the config file holds '{key}' as a value, not as a table")
    place[keys[-1]] = value
    return after


def _parses_to(text: str, wanted: dict[str, Any]) -> bool:
    try:
        return json.loads(json.dumps(tomllib.loads(text), default=str)) == wanted
    except tomllib.TOMLDecodeError:
        return False


def _key(key: str) -> str:
    return key if key and set(key) <= _BARE else _quoted(key)


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list):
        return f"[{', '.join(_value(item) for item in value)}]"
    return str(value) if isinstance(value, int) else _quoted(value)


def _quoted(text: str) -> str:
    """A TOML basic string. JSON escapes the same characters but leaves DEL, which TOML forbids."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _replace(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    mode = path.stat().st_mode & 0o777 if path.exists() else 0o600
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        with open(
            os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8"
        ) as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.chmod(mode)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
