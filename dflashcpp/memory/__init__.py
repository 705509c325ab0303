"""Memory of target and drafter: planned before start, as the engine says, as the device says."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dflashcpp.memory.planning import Plan
    from dflashcpp.memory.prepare import plan
    from dflashcpp.memory.report import as_dict

__all__ = ["Plan", "as_dict", "plan"]


def __getattr__(name: str) -> Any:
    if name == "Plan":
        from dflashcpp.memory.planning import Plan

        return Plan
    if name == "plan":
        from dflashcpp.memory.prepare import plan

        return plan
    if name == "as_dict":
        from dflashcpp.memory.report import as_dict

        return as_dict
    raise AttributeError(f"module 'dflashcpp.memory' has no attribute '{name}'")
