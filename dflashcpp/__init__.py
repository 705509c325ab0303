"""DFlash and DFlash-2 drafters in llama.cpp: convert, build, plan memory, serve, measure.

Everything the command line does can be done from here. Names are loaded when first used, so that
`import dflashcpp` costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dflashcpp.client import Client
    from dflashcpp.conversion import convert
    from dflashcpp.drafter import Drafter
    from dflashcpp.errors import DflashError
    from dflashcpp.llamacpp import build
    from dflashcpp.memory import plan
    from dflashcpp.server import LlamaServer

_HOME = {
    "Client": "dflashcpp.client",
    "Drafter": "dflashcpp.drafter",
    "DflashError": "dflashcpp.errors",
    "LlamaServer": "dflashcpp.server",
    "build": "dflashcpp.llamacpp",
    "convert": "dflashcpp.conversion",
    "plan": "dflashcpp.memory",
}

__all__ = ["Client", "DflashError", "Drafter", "LlamaServer", "build", "convert", "plan"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'dflashcpp' has no attribute '{name}'")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
