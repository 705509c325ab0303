"""Memory of target and drafter: planned before start, as the engine says, as the device says."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dflashcpp.memory.planning import Plan
    from dflashcpp.memory.prepare import as_dict, plan

__all__ = ["Plan", "as_dict", "plan"]


def __getattr__(name: str) -> Any:
    if name == "Plan":
        from dflashcpp.memory.planning import Plan

        return Plan
    if name in ("plan", "as_dict"):
        from dflashcpp.memory import prepare

        return getattr(prepare, name)
    raise AttributeError(f"module 'dflashcpp.memory' has no attribute '{name}'")
