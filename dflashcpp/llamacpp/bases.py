"""The llama.cpp commits we build on (`patches/bases.toml`)."""

from __future__ import annotations

from dataclasses import dataclass

from dflashcpp import knowledge
from dflashcpp.errors import DflashError


@dataclass(frozen=True)
class Base:
    """One llama.cpp commit: git's hashes, the release that carries it, what it knows and what we add."""

    tag: str
    commit: str
    tree: str
    date: str
    sdist: str
    sdist_sha256: str
    sdist_bytes: int
    knows: tuple[str, ...]
    adds: tuple[str, ...]
    repository: str


def all_bases() -> tuple[Base, ...]:
    """Every base, the default one first, the others from new to old."""
    table = knowledge.table("patches/bases.toml")
    bases = [
        Base(
            tag=tag,
            repository=table["repository"],
            **{**row, "knows": tuple(row["knows"]), "adds": tuple(row.get("adds", ()))},
        )
        for tag, row in table["bases"].items()
    ]
    bases.sort(key=lambda base: base.date, reverse=True)
    bases.sort(key=lambda base: base.tag != table["default"])
    return tuple(bases)


def find_base(name: str | None = None) -> Base:
    """The base called `name`: its tag, or its commit or seven digits and more of it; None is the default.

    Raises DflashError that lists the bases when there is no such one.
    """
    bases = all_bases()
    if name is None:
        return bases[0]
    wanted = name.strip().lower()
    for base in bases:
        if wanted == base.tag or (len(wanted) >= 7 and base.commit.startswith(wanted)):
            return base
    known = ", ".join(f"{base.tag} ({base.date})" for base in bases)
    raise DflashError(f"no llama.cpp base is called {name!r}", hint=f"the bases are: {known}")
