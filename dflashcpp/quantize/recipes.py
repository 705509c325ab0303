"""Which tensor gets which type: llama-quantize's policy, from the table convert/quantization.toml.

Mirrors llama.cpp src/llama-quant.cpp (`llama_tensor_get_type` and what it calls), commit 0c1e570.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from dflashcpp import knowledge
from dflashcpp.errors import DflashError
from dflashcpp.gguf_file.types import TensorType, block_size, is_quantised, layer_of
from dflashcpp.quantize.patterns import Override


class TensorLike(Protocol):
    """What a recipe must know of a tensor; `gguf_file.TensorInfo` fits.

    `ne` is the ggml shape (row length first), `type` how the tensor is stored when it is not
    quantised (F32 for norms and convolution bases, the source's type for matrices).
    """

    @property
    def name(self) -> str: ...
    @property
    def ne(self) -> tuple[int, ...]: ...
    @property
    def type(self) -> int: ...


@dataclass(frozen=True)
class Rule:
    """One line of a recipe: tensors of `group` (None: all) in `layers` (None: all) get `type`."""

    type: TensorType
    group: str | None = None
    layers: str | None = None
    gqa_min: int | None = None


@dataclass(frozen=True)
class Recipe:
    """A named mix. `file_type` is the value of `general.file_type`."""

    name: str
    file_type: int
    type: TensorType
    rules: tuple[Rule, ...] = ()
    head: TensorType | None = None

    @property
    def types(self) -> frozenset[TensorType]:
        """Every type the recipe asks for by itself; what a file of this name should consist of."""
        return frozenset({self.type, *(rule.type for rule in self.rules), self._head_type()})

    def _head_type(self) -> TensorType:
        table = _table()["head"]
        if self.head is not None:
            return self.head
        if not is_quantised(self.type) or self.type.name in table["keep"]:
            return self.type
        return TensorType[table["type"]]


@dataclass(frozen=True)
class Choice:
    """The type one tensor gets. `wanted` is the recipe's or the user's; `fallback` says why not that one."""

    name: str
    ne: tuple[int, ...]
    type: TensorType
    wanted: TensorType
    quantisable: bool
    fallback: str | None = None
    by_user: bool = False


def _table() -> dict[str, Any]:
    return knowledge.table("convert/quantization.toml")


def recipe_names() -> list[str]:
    """Every recipe that needs no importance matrix, as it is written in file names."""
    return list(_table()["recipes"])


@functools.cache
def recipe(name: str) -> Recipe:
    """The recipe of that name or alias, in any case. DflashError: unknown, or needs an importance matrix."""
    wanted = name.upper().replace("-", "_")
    table = _table()
    if wanted in table["needs_imatrix"]:
        raise DflashError(
            f"the type {wanted} needs an importance matrix, which a drafter does not have",
            hint=f"types that need none: {' '.join(recipe_names())}",
        )
    for own, row in table["recipes"].items():
        if wanted == own or wanted in row.get("aliases", ()):
            return _recipe(own, row)
    raise DflashError(f"unknown type {name!r}", hint=f"known: {' '.join(recipe_names())}")


def _recipe(name: str, row: dict[str, Any]) -> Recipe:
    rules = tuple(Rule(**{**rule, "type": TensorType[rule["type"]]}) for rule in row.get("rules", ()))
    head = TensorType[row["head"]] if "head" in row else None
    return Recipe(name, row["file_type"], TensorType[row["type"]], rules, head)


def is_quantisable(name: str, ne: Sequence[int]) -> bool:
    """Whether recipes apply to the tensor: a matrix whose name ends in `weight`, no norm, no gate input."""
    matrix = any(n > 1 for n in ne[1:])  # ggml_n_dims >= 2
    return (
        matrix and name.endswith("weight") and not any(part in name for part in _table()["never"]["contains"])
    )


def group_of(name: str) -> str:
    """The group a tensor belongs to (`attn_v`, `ffn_down`, ...), else `other`."""
    for row in _table()["groups"]:
        if name in row.get("is", ()) or any(part in name for part in row.get("has", ())):
            return str(row["name"])
    return "other"


def choose_types(
    name: str | Recipe,
    tensors: Iterable[TensorLike],
    *,
    overrides: Sequence[Override] = (),
    pure: bool = False,
    gqa: int | None = None,
    layers: int | None = None,
) -> dict[str, Choice]:
    """The type of every tensor under a recipe, in the order of `tensors`.

    overrides: from `parse_overrides`, first match wins; pure: the recipe's own type everywhere.
    gqa: heads / kv_heads; layers: number of layers; both are read off the shapes when left out.
    DflashError: unknown recipe, a type that needs an importance matrix, a row no type fits, an
    override that matches nothing.
    """
    chosen = name if isinstance(name, Recipe) else recipe(name)
    listed = list(tensors)
    chooser = _Chooser(chosen, listed, overrides, pure, gqa, layers)
    by_layer = sorted(listed, key=lambda t: (layer_of(t.name), t.name.encode()))  # llama.cpp's order
    choices = {tensor.name: chooser.choose(tensor) for tensor in by_layer}
    _check_overrides_used(overrides, listed)
    return {tensor.name: choices[tensor.name] for tensor in listed}


@dataclass
class _Chooser:
    """Walks the tensors in llama.cpp's order and counts per group, as its rules do.

    As in llama-quantize a tensor that is overridden is not counted.
    """

    recipe: Recipe
    tensors: list[TensorLike]
    overrides: Sequence[Override]
    pure: bool
    gqa: int | None
    layers: int | None
    seen: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        names = [tensor.name for tensor in self.tensors]
        self.has_head = "output.weight" in names
        self.attn_v = sum(group_of(name) == "attn_v" for name in names)
        if self.layers is None:
            self.layers = 1 + max((layer_of(name) for name in names), default=-1)
        if self.gqa is None:
            self.gqa = _gqa(self.tensors)

    def choose(self, tensor: TensorLike) -> Choice:
        ne, stored = tuple(tensor.ne), TensorType(tensor.type)
        if not is_quantisable(tensor.name, ne):
            return Choice(tensor.name, ne, stored, stored, quantisable=False)
        override = next((o for o in self.overrides if o.matches(tensor.name)), None)
        wanted = override.type if override else self._by_recipe(tensor)
        _refuse_imatrix(tensor.name, wanted)
        final, why = _fitting(tensor.name, wanted, ne[0])
        return Choice(tensor.name, ne, final, wanted, True, why, by_user=override is not None)

    def _by_recipe(self, tensor: TensorLike) -> TensorType:
        default = self.recipe.type
        if self.pure or not is_quantised(default):
            return default
        group = group_of(tensor.name)
        if group == "output" or (group == "token_embd" and not self.has_head):
            return self._head(tensor.ne[0])
        index = self.seen.get(group, 0)
        self.seen[group] = index + 1
        for rule in self.recipe.rules:
            if rule.group in (None, group) and self._gqa_fits(rule) and self._in(rule, group, index):
                return rule.type
        return default

    def _head(self, row: int) -> TensorType:
        table = _table()["head"]
        if self.recipe.head is not None:
            return self.recipe.head
        if row % block_size(self.recipe.type):
            return TensorType[table["uneven"]]
        return self.recipe.type if self.recipe.type.name in table["keep"] else TensorType[table["type"]]

    def _gqa_fits(self, rule: Rule) -> bool:
        return rule.gqa_min is None or (self.gqa or 0) >= rule.gqa_min

    def _in(self, rule: Rule, group: str, index: int) -> bool:
        if rule.layers is None:
            return True
        count = self.attn_v if group == "attn_v" else self.layers
        return _LAYERS[rule.layers](index, count or 0)


_LAYERS = {
    "more_bits": lambda i, n: i < n // 8 or i >= 7 * n // 8 or (i - n // 8) % 3 == 2,
    "eighth": lambda i, n: i < n // 8,
    "sixteenth": lambda i, n: i < n // 16,
    "first_2": lambda i, n: i < 2,
    "first_4": lambda i, n: i < 4,
}


def _gqa(tensors: Iterable[TensorLike]) -> int:
    """Heads / kv_heads of the first layer, from the rows of attn_q and attn_k (0 when there is none)."""
    rows = {tensor.name: tensor.ne[1] for tensor in tensors if len(tensor.ne) > 1}
    query, key = rows.get("blk.0.attn_q.weight", 0), rows.get("blk.0.attn_k.weight", 0)
    return query // key if key else 0


def _fitting(name: str, wanted: TensorType, row: int) -> tuple[TensorType, str | None]:
    """`wanted`, or the next type a row of this length fits, with the reason."""
    block = block_size(wanted)
    if row % block == 0:
        return wanted, None
    why = f"rows of {row} are no multiple of {block}"
    table = _table()["fallback"]
    if wanted.name not in table:
        raise DflashError(
            f"{name} cannot be {wanted.name}: {why}, and there is no type to fall back to",
            hint=f"give it another type: --tensor-type '{re.escape(name)}=Q8_0'",
        )
    instead = TensorType[table[wanted.name]]
    return (TensorType.F16 if row % block_size(instead) else instead), why


def _refuse_imatrix(name: str, wanted: TensorType) -> None:
    if wanted.name in _table()["imatrix"]["types"]:
        raise DflashError(
            f"{name} cannot be {wanted.name}: that type needs an importance matrix, "
            "which a drafter does not have",
            hint="take IQ3_S, IQ4_XS or a K type",
        )


def _check_overrides_used(overrides: Sequence[Override], tensors: Sequence[TensorLike]) -> None:
    names = [t.name for t in tensors if is_quantisable(t.name, t.ne)]
    for override in overrides:
        if not any(override.matches(name) for name in names):
            raise DflashError(
                f"{override.text}: no tensor that can be quantised matches {override.pattern!r}",
                hint="tensor names are those of the GGUF, such as blk.0.ffn_down.weight",
            )
