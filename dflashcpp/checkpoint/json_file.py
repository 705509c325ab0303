"""JSON objects out of files that anybody may have written: bounded, no duplicate keys, no deep nesting."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dflashcpp.errors import DflashError

_MAX_BYTES = 32 << 20
_AGAIN = "download it again"


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in `path`; DflashError when it is missing, too large or no JSON object."""
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise DflashError(
                f"{path} has more than {_MAX_BYTES >> 20} MiB; that is no JSON file of a checkpoint"
            )
        raw = path.read_bytes()
    except OSError as error:
        raise DflashError(f"{path} cannot be read: {error.strerror}") from None
    if raw.startswith(b"version https://git-lfs"):
        raise DflashError(f"{path} is a Git LFS pointer, not the file", hint="run `git lfs pull` there")
    return parse_object(raw, str(path))


def parse_object(raw: bytes, what: str) -> dict[str, Any]:
    """`raw` as a JSON object; `what` names it in the error."""
    try:
        value = json.loads(raw.decode("utf-8-sig"), object_pairs_hook=_without_duplicates)
    except RecursionError:
        raise DflashError(f"{what} is nested too deeply to be JSON of a checkpoint") from None
    except _Duplicate as error:
        raise DflashError(f"{what} says {error.args[0][:100]!r} twice", hint="keep one of them") from None
    except ValueError as error:
        raise DflashError(f"{what} is not JSON: {str(error)[:160]}", hint=_AGAIN) from None
    if not isinstance(value, dict):
        raise DflashError(f"{what} is no JSON object", hint=_AGAIN)
    return value


class _Duplicate(Exception):
    pass


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        raise _Duplicate(next(key for key, _ in pairs if key in seen or seen.add(key)))  # type: ignore[func-returns-value]
    return result
