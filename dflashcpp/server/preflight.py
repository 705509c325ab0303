"""What can be said about a target and a drafter before anything is started, from their headers alone."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflashcpp import knowledge
from dflashcpp.errors import DflashError

if TYPE_CHECKING:
    from dflashcpp.drafter import Drafter
    from dflashcpp.gguf_file import Header


@dataclass(frozen=True)
class Checked:
    """What was learnt: the drafter's description (None without one), and things to know all the same."""

    drafter: Drafter | None = None
    target_context: int | None = None
    warnings: tuple[str, ...] = field(default=())


def check_files(model: Path, draft: Path | None, base: str | None = None) -> Checked:
    """Read both headers and see whether they can work together.

    `base` is the llama.cpp base of the build, when it is known. Raises DflashError naming the file and
    what is wrong: no GGUF, cut off, an ordinary model given as drafter, another hidden size, fewer
    layers, another vocabulary, a DFlash-2 drafter for a base that only knows DFlash.
    """
    from dflashcpp.gguf_file import read_header

    target = read_header(model)
    if target.architecture == "dflash":
        raise DflashError(
            f"{model} is a drafter, not a target", hint="the target goes to -m, the drafter to -md"
        )
    context = _number(target, "context_length")
    if draft is None:
        return Checked(target_context=context)
    from dflashcpp.drafter import Drafter

    header = read_header(draft)
    drafter = Drafter.from_gguf(header)
    _check_shapes(drafter, str(draft), target)
    _check_base(drafter, draft, base)
    warnings = [*_vocabulary(drafter, header, target), *_architecture(target, base)]
    return Checked(drafter, context, tuple(warnings))


def _number(target: Header, key: str) -> int | None:
    value = target.get(f"{target.architecture}.{key}", None)
    return int(value) if isinstance(value, int) else None


def _check_shapes(drafter: Drafter, name: str, target: Header) -> None:
    hidden, layers = _number(target, "embedding_length"), _number(target, "block_count")
    if hidden is not None and hidden != drafter.hidden:
        raise _mismatch(name, target, f"hidden size {drafter.hidden}, the target's is {hidden}")
    if layers is not None and max(drafter.taps) > layers:
        raise _mismatch(name, target, f"a tap at layer {max(drafter.taps)}, the target has {layers} layers")
    if drafter.target_layers is not None and layers is not None and drafter.target_layers != layers:
        raise _mismatch(
            name,
            target,
            f"been trained for a target of {drafter.target_layers} layers, this one has {layers}",
        )


def _mismatch(name: str, target: Header, what: str) -> DflashError:
    return DflashError(
        f"{name} does not fit {target.source}: the drafter has {what}",
        hint="a drafter works with the one target it was trained for; `dflashcpp pairs` lists known pairs",
    )


def _check_base(drafter: Drafter, draft: Path, base: str | None) -> None:
    """A DFlash-2 file on a build that only knows DFlash fails on a missing tensor, long after the start."""
    if base is None:
        return
    bases: dict[str, Any] = knowledge.table("patches/bases.toml")["bases"]
    knows = bases.get(base, {}).get("knows")
    if knows is None or (drafter.version == 2 and "dflash2" in knows) or drafter.version == 1:
        return
    if _backported(base, "dflash2"):
        return
    newest = knowledge.table("patches/bases.toml")["default"]
    raise DflashError(
        f"{draft} is a DFlash-2 drafter and the build is llama.cpp {base}, which only knows "
        f"{', '.join(knows) or 'no drafter of this kind'}",
        hint=f"build a newer one with: dflashcpp build --base {newest}",
    )


def _backported(base: str, feature: str) -> bool:
    """Whether a patch series of ours says that it brings this feature to the base."""
    bases = knowledge.table("patches/bases.toml")["bases"]
    return feature in bases.get(base, {}).get("adds", ())


def _vocabulary(drafter: Drafter, header: Header, target: Header) -> list[str]:
    """The drafter speaks in the target's token ids: refuse other sizes, warn about other tokens."""
    mine, theirs = header.kv.get("tokenizer.ggml.tokens"), target.kv.get("tokenizer.ggml.tokens")
    rows = target.tensors["token_embd.weight"].ne[1] if "token_embd.weight" in target.tensors else None
    if rows is not None and drafter.mask_token_id >= rows:
        raise _mismatch(
            header.source, target, f"mask token {drafter.mask_token_id}, the target has {rows} tokens"
        )
    bound = drafter.version == 2 or drafter.own_head
    if bound and drafter.vocab is not None and rows is not None and drafter.vocab != rows:
        raise _mismatch(
            header.source, target, f"a vocabulary of {drafter.vocab} tokens, the target's has {rows}"
        )
    if mine is None or theirs is None or _digest(mine.raw) == _digest(theirs.raw):
        return []
    differing = _differing(mine.value, theirs.value)
    if not differing:
        return []
    return [
        f"{differing} tokens of {header.source} differ from the target's: drafts of those are always refused"
    ]


def _digest(raw: bytes) -> bytes:
    return hashlib.sha256(raw).digest()


def _differing(mine: Sequence[str], theirs: Sequence[str]) -> int:
    """Tokens that differ; padding at the end (`[PAD...]`) and a longer list do not count."""
    return sum(
        one != other and not one.startswith("[PAD") and not other.startswith("[PAD")
        for one, other in zip(mine, theirs, strict=False)
    )


def _architecture(target: Header, base: str | None) -> list[str]:
    known = knowledge.table("models/serving.toml")["targets"].get(base or "0c1e570")
    if known is None or target.architecture in known:
        return []
    return [
        f"llama.cpp {base or '0c1e570'} is not known to expose the layers of a target of architecture "
        f"{target.architecture}: llama-server may abort at the first token"
    ]
