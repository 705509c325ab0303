"""`--tensor-type NAME=TYPE`: a regular expression that is searched for in tensor names.

The semantics are llama-quantize's (llama.cpp tools/quantize/quantize.cpp `parse_tensor_type`:
the name part is made lower case and used with std::regex_search, first match wins).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from dflashcpp.errors import UsageError
from dflashcpp.gguf_file.types import TensorType

# what ggml_quantize_chunk can make; the other types exist for computing or for integers
_OUTPUT_TYPES = {t for t in TensorType if t.name not in {"Q8_1", "Q8_K", "I8", "I16", "I32", "I64", "F64"}}
# bracket expressions std::regex knows and Python does not
_POSIX = {
    "[:digit:]": "0-9",
    "[:alpha:]": "a-zA-Z",
    "[:alnum:]": "a-zA-Z0-9",
    "[:lower:]": "a-z",
    "[:upper:]": "A-Z",
    "[:xdigit:]": "0-9a-fA-F",
    "[:space:]": r"\s",
}
SELECTOR = r"^selector_"


@dataclass(frozen=True)
class Override:
    """Tensors whose name contains a match of `pattern` get `type`. `text` is what the user wrote."""

    pattern: str
    type: TensorType
    text: str
    _regex: re.Pattern[str] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_regex", _compile(self.pattern, self.text))

    def matches(self, name: str) -> bool:
        return self._regex.search(name) is not None


def parse_overrides(items: Iterable[str], *, keep_selector: str | None = None) -> tuple[Override, ...]:
    """`NAME=TYPE` texts as overrides; `keep_selector` is a type for the DFlash-2 selector, after them.

    UsageError says which text is wrong and how.
    """
    overrides = [_parse(item) for item in items]
    if keep_selector is not None:
        text = f"--keep-selector {keep_selector}"
        overrides.append(Override(SELECTOR, tensor_type(keep_selector, text), text))
    return tuple(overrides)


def _parse(item: str) -> Override:
    name, equals, kind = item.partition("=")
    if not (name and equals and kind):
        raise UsageError(f"--tensor-type {item}: expected NAME=TYPE, for example ffn_down=Q6_K")
    text = f"--tensor-type {item}"
    return Override(name.lower(), tensor_type(kind, text), text)


def tensor_type(name: str, text: str) -> TensorType:
    """The type of that name, in any case; UsageError, which cites `text`, when we write no such type."""
    kind = TensorType.__members__.get(name.strip().upper())
    if kind is None or kind not in _OUTPUT_TYPES:
        known = " ".join(sorted(t.name for t in _OUTPUT_TYPES))
        raise UsageError(f"{text}: there is no tensor type {name!r} to write", hint=f"known: {known}")
    return kind


def _compile(pattern: str, text: str) -> re.Pattern[str]:
    translated = pattern
    for theirs, ours in _POSIX.items():
        translated = translated.replace(theirs, ours)
    if re.search(r"\(\?(?![:=!])", translated):
        raise UsageError(f"{text}: (?...) groups other than (?: (?= (?! are not supported")
    try:
        return re.compile(translated)
    except re.error as error:
        raise UsageError(f"{text}: {pattern!r} is no regular expression: {error}") from None
