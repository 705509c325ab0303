"""What a recipe really gave: counts, sizes, bits per weight, and how much of it bears the recipe's name."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from dflashcpp.errors import DflashError
from dflashcpp.gguf_file.types import tensor_bytes
from dflashcpp.quantize.recipes import Choice, Recipe


@dataclass(frozen=True)
class Mix:
    """The real mix of a file. `covered` is the share of quantisable parameters in the recipe's own types."""

    counts: dict[str, int]  # type name -> tensors, most bytes first
    bytes_by_type: dict[str, int]
    parameters: int
    bytes: int  # of all tensors, without padding
    bits_per_weight: float
    covered: float
    fallbacks: tuple[Choice, ...]

    @property
    def mib(self) -> float:
        return self.bytes / 2**20

    def text(self) -> str:
        """One line: `45 Q4_K, 4 Q6_K, 32 F32: 1556.95 MiB, 4.71 bits per weight`."""
        counts = ", ".join(f"{count} {name}" for name, count in self.counts.items())
        return f"{counts}: {self.mib:.2f} MiB, {self.bits_per_weight:.2f} bits per weight"


def mix_of(recipe: Recipe, choices: Iterable[Choice]) -> Mix:
    """Add up the choices of `choose_types`."""
    listed = list(choices)
    sizes: dict[str, int] = {}
    counts: dict[str, int] = {}
    for choice in listed:
        sizes[choice.type.name] = sizes.get(choice.type.name, 0) + tensor_bytes(choice.type, choice.ne)
        counts[choice.type.name] = counts.get(choice.type.name, 0) + 1
    order = sorted(sizes, key=lambda name: -sizes[name])
    parameters, total = sum(math.prod(c.ne) for c in listed), sum(sizes.values())
    return Mix(
        {name: counts[name] for name in order},
        {name: sizes[name] for name in order},
        parameters,
        total,
        8 * total / parameters if parameters else 0.0,
        _covered(recipe, listed),
        tuple(c for c in listed if c.fallback),
    )


def _covered(recipe: Recipe, choices: list[Choice]) -> float:
    matrices = [c for c in choices if c.quantisable]
    whole = sum(math.prod(c.ne) for c in matrices)
    named = sum(math.prod(c.ne) for c in matrices if c.type in recipe.types and not c.fallback)
    return named / whole if whole else 1.0


def check_name(recipe: Recipe, mix: Mix) -> list[str]:
    """Warnings where the file is not what its name says.

    DflashError when not one tensor has a type of the recipe: such a file must not bear the name.
    """
    if mix.covered == 0:
        raise DflashError(
            f"no tensor can be {recipe.name}: {_why(mix)}; the file would be {_largest(mix)} in truth",
            hint=f"convert with -q {_largest(mix)}, or -q Q8_0",
        )
    warnings = []
    if mix.covered < 0.5:
        warnings.append(
            f"only {100 * mix.covered:.0f} % of the weights are {recipe.name}, "
            f"{len(mix.fallbacks)} tensors got another type ({_why(mix)})"
        )
    elif mix.fallbacks:
        warnings.append(
            f"{len(mix.fallbacks)} tensors got another type than {recipe.name} asks for ({_why(mix)})"
        )
    return warnings


def _why(mix: Mix) -> str:
    reasons = list(dict.fromkeys(c.fallback for c in mix.fallbacks if c.fallback))
    return "; ".join(reasons[:3]) or "every tensor was given another type"


def _largest(mix: Mix) -> str:
    return next(iter(mix.counts))
