"""One vector out of a small file of torch.save, without torch and without running its pickle.

The file is a zip with `data.pkl` and the bytes of each storage in `data/<key>`. The pickle's opcodes
are walked over as data: names of functions and classes stay names, nothing is looked up or called.
"""

from __future__ import annotations

import pickletools
import struct
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflashcpp.checkpoint.safetensors_file import WIDTH
from dflashcpp.checkpoint.weights import decode
from dflashcpp.errors import DflashError

if TYPE_CHECKING:
    import numpy as np

_MAX_PICKLE = 1 << 16
# what zipfile lets through when a directory is damaged: names that are no text, fields that end too early ...
_ZIP_FAULTS: tuple[type[Exception], ...] = (zipfile.BadZipFile, zlib.error, struct.error, RuntimeError)
_ZIP_FAULTS += (EOFError, ValueError, LookupError, OverflowError, TypeError)
_MAX_HALF = 65504.0
_MAX_VECTOR = 1 << 20  # numbers
_STORAGES = {"torch BFloat16Storage": "BF16", "torch HalfStorage": "F16", "torch FloatStorage": "F32"}
_TENSOR = "torch._utils _rebuild_tensor_v2"
_PARAMETER = "torch._utils _rebuild_parameter"


@dataclass(frozen=True)
class _Name:
    text: str


@dataclass(frozen=True)
class _Call:
    function: Any
    arguments: Any


@dataclass(frozen=True)
class _Storage:
    description: Any


class _Mark:
    pass


def read_mask_embedding(path: Path, hidden: int) -> tuple[int, np.ndarray]:
    """`mask_token_id` and the vector `embedding` [hidden] of MiMo's `mask_embedding.pt`.

    Raises DflashError when the file holds anything else.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            return _read(path, archive, hidden)
    except _ZIP_FAULTS as error:
        raise _unreadable(path, str(error)) from None
    except OSError as error:
        raise _unreadable(path, error.strerror or str(error)) from None


def _read(path: Path, archive: zipfile.ZipFile, hidden: int) -> tuple[int, np.ndarray]:
    names = [name for name in archive.namelist() if name.endswith("data.pkl")]
    if len(names) != 1 or archive.getinfo(names[0]).file_size > _MAX_PICKLE:
        raise _unreadable(path, "no small data.pkl in it")
    content = walk(archive.read(names[0]), path)
    token = content.get("mask_token_id") if isinstance(content, dict) else None
    if type(token) is not int:
        raise _unreadable(path, "it has no mask_token_id")
    dtype, key, offset = _tensor(content.get("embedding"), path, hidden)
    member, width = f"{names[0].removesuffix('data.pkl')}data/{key}", WIDTH[dtype]
    if member not in archive.namelist() or archive.getinfo(member).file_size > _MAX_VECTOR * width:
        raise _unreadable(path, f"the numbers {key!r} are missing")
    raw = archive.read(member)[offset * width : (offset + hidden) * width]
    if len(raw) != hidden * width:
        raise _unreadable(path, "the embedding is cut off")
    values = decode(raw, dtype)
    _check_numbers(values, path)
    return token, values


def _check_numbers(values: np.ndarray, path: Path) -> None:
    """The vector replaces a row of the embedding, which may be F16."""
    import numpy as np

    bad = np.flatnonzero(~(np.abs(values) <= _MAX_HALF))
    if len(bad):
        raise DflashError(
            f"{path}: embedding[{int(bad[0])}] is {float(values[bad[0]]):g}, too large or no number",
            hint="the file is damaged; download it again",
        )


def _tensor(value: Any, path: Path, hidden: int) -> tuple[str, str, int]:
    """dtype, storage key and offset of a described tensor of shape [hidden]."""
    if isinstance(value, _Call) and value.function == _Name(_PARAMETER) and value.arguments:
        value = value.arguments[0]
    known = isinstance(value, _Call) and value.function == _Name(_TENSOR) and len(value.arguments) >= 4
    if not known:
        raise _unreadable(path, "embedding is no tensor")
    storage, offset, shape, stride = value.arguments[:4]
    if shape != (hidden,) or stride != (1,):
        raise _unreadable(path, f"embedding has the shape {shape}, the drafter's hidden size is {hidden}")
    said: tuple[Any, ...] = storage.description if isinstance(storage, _Storage) else ()
    dtype = (
        _STORAGES.get(said[1].text)
        if isinstance(said, tuple) and len(said) > 2 and isinstance(said[1], _Name)
        else None
    )
    if dtype is None or not isinstance(said[2], str) or type(offset) is not int or offset < 0:
        raise _unreadable(path, "embedding is of an unknown type")
    return dtype, said[2], offset


def _unreadable(path: Path, why: str) -> DflashError:
    return DflashError(f"{path} is not the file of a mask embedding: {why}", hint="download it again")


def walk(data: bytes, path: Path) -> Any:
    """The object a pickle describes, with calls and classes left as descriptions."""
    stack: list[Any] = []
    memo: dict[int, Any] = {}
    try:
        for opcode, argument, _ in pickletools.genops(data):
            if opcode.name == "STOP":
                return stack.pop()
            _step(opcode.name, argument, stack, memo)
    except (ValueError, IndexError, KeyError, TypeError, UnicodeDecodeError) as error:
        raise _unreadable(path, f"its pickle is damaged ({str(error)[:80]})") from None
    raise _unreadable(path, "its pickle does not end")


_CONSTANTS: dict[str, Any] = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
_PUSHED = {"BININT", "BININT1", "BININT2", "LONG1", "BINUNICODE", "SHORT_BINUNICODE", "BINFLOAT"}
_IGNORED = {"PROTO", "FRAME"}


def _step(name: str, argument: Any, stack: list[Any], memo: dict[int, Any]) -> None:
    if name in _IGNORED:
        return
    if name in _PUSHED:
        stack.append(argument)
    elif name in _CONSTANTS:
        stack.append(_CONSTANTS[name])
    elif name in _ACTIONS:
        _ACTIONS[name](stack)
    elif name == "GLOBAL":
        stack.append(_Name(argument))
    elif name in ("BINPUT", "LONG_BINPUT"):
        memo[argument] = stack[-1]
    elif name == "MEMOIZE":
        memo[len(memo)] = stack[-1]
    elif name in ("BINGET", "LONG_BINGET"):
        stack.append(memo[argument])
    else:
        raise ValueError(f"opcode {name}")


def _to_mark(stack: list[Any]) -> list[Any]:
    taken = []
    while not isinstance(stack[-1], _Mark):
        taken.append(stack.pop())
    stack.pop()
    return taken[::-1]


def _last(stack: list[Any], count: int) -> tuple[Any, ...]:
    taken = tuple(stack[len(stack) - count :])
    if len(taken) != count:
        raise IndexError("too few values")
    del stack[len(stack) - count :]
    return taken


def _set_items(stack: list[Any], items: list[Any]) -> None:
    stack[-1].update(zip(items[::2], items[1::2], strict=True))


def _set_one(stack: list[Any]) -> None:
    pair = _last(stack, 2)
    _set_items(stack, list(pair))


def _reduce(stack: list[Any]) -> None:
    function, arguments = _last(stack, 2)
    stack.append(_Call(function, arguments))


def _stack_global(stack: list[Any]) -> None:
    module, attribute = _last(stack, 2)
    stack.append(_Name(f"{module} {attribute}"))


_ACTIONS = {
    "EMPTY_DICT": lambda stack: stack.append({}),
    "MARK": lambda stack: stack.append(_Mark()),
    "TUPLE": lambda stack: stack.append(tuple(_to_mark(stack))),
    "TUPLE1": lambda stack: stack.append(_last(stack, 1)),
    "TUPLE2": lambda stack: stack.append(_last(stack, 2)),
    "TUPLE3": lambda stack: stack.append(_last(stack, 3)),
    "BINPERSID": lambda stack: stack.append(_Storage(stack.pop())),
    "REDUCE": _reduce,
    "STACK_GLOBAL": _stack_global,
    "SETITEM": _set_one,
    "SETITEMS": lambda stack: _set_items(stack, _to_mark(stack)),
}
