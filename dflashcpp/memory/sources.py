"""Where the planner gets its models from: GGUF headers here or behind a URL, checkpoints, known facts."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflashcpp import knowledge
from dflashcpp.errors import DflashError
from dflashcpp.memory.model import Model, read_model

if TYPE_CHECKING:
    from dflashcpp.drafter import Drafter
    from dflashcpp.quantize import Recipe


@dataclass(frozen=True)
class PlannedTensor:
    """A tensor of a file that does not exist yet; sizes in bytes, shape in ggml order."""

    name: str
    ne: tuple[int, ...]
    type: int
    nbytes: int


@dataclass(frozen=True)
class PlannedHeader:
    """Stands in for a GGUF header when only facts are known."""

    source: str
    values: Mapping[str, Any]
    tensors: Mapping[str, PlannedTensor] = field(default_factory=dict)

    def get(self, key: str, default: Any = ...) -> Any:
        if key in self.values:
            return self.values[key]
        if default is ...:
            raise DflashError(f"{self.source}: {key} is not known before the file is read")
        return default


def from_gguf(source: str | Path) -> Model:
    """The model of a GGUF file or of its URL; only the header is read.

    A split file names its parts: the first one is enough where all tensors stand in it.
    """
    from dflashcpp.gguf_file import read_header

    header = read_header(source)
    parts = int(header.get("split.count", 0) or 0)
    if parts > 1:
        return read_model(_joined(header, str(source), parts))
    return read_model(header)


def _joined(header: Any, source: str, parts: int) -> PlannedHeader:
    """The header of the first part with the tensors of all parts (`name-00001-of-00003.gguf`)."""
    from dflashcpp.gguf_file import read_header

    tensors: dict[str, Any] = dict(header.tensors)
    for number in range(2, parts + 1):
        name = re.sub(r"-(\d{5})-of-(\d{5})\.gguf", f"-{number:05d}-of-\\2.gguf", source)
        if name == source:
            raise DflashError(f"{source}: one of {parts} parts, but its name has no -00001-of-{parts:05d}")
        tensors |= read_header(name).tensors
    values = {key: value.value for key, value in header.kv.items() if not key.startswith("tokenizer.")}
    tokens = header.kv.get("tokenizer.ggml.tokens")
    if tokens is not None:
        values[f"{values['general.architecture']}.vocab_size"] = tokens.count
    return PlannedHeader(source, values, tensors)


def headers_of(source: str | Path) -> Any:
    """The GGUF header of any file, such as a vision projector."""
    from dflashcpp.gguf_file import read_header

    return read_header(source)


def is_gguf(source: str) -> bool:
    return source.split("?")[0].endswith(".gguf")


def drafter_of(source: str | Path, recipe: str | None) -> Model:
    """The drafter in a GGUF, or what a checkpoint becomes under `recipe` (Q4_K_M when not said)."""
    if is_gguf(str(source)):
        model = from_gguf(source)
        if model.arch != "dflash":
            raise DflashError(
                f"{source} is a {model.arch} model, not a DFlash drafter",
                hint="-md takes a drafter: a GGUF of architecture dflash, or a checkpoint with -q",
            )
        return model
    from dflashcpp.checkpoint import open_checkpoint

    with open_checkpoint(Path(source)) as checkpoint:
        return drafter_model(checkpoint.drafter, recipe or "Q4_K_M", str(source))


def drafter_model(
    drafter: Drafter, recipe: str | Recipe, source: str, tensor_types: Sequence[str] = ()
) -> Model:
    """The GGUF that converting `drafter` with `recipe` will give, before it exists."""
    from dflashcpp.gguf_file import TensorType, tensor_bytes
    from dflashcpp.quantize import choose_types, parse_overrides

    choices = choose_types(
        recipe,
        list(_declared(drafter)),
        overrides=parse_overrides(tensor_types),
        gqa=drafter.heads // drafter.kv_heads,
        layers=drafter.layers,
    )
    tensors = {
        name: PlannedTensor(name, choice.ne, choice.type, tensor_bytes(TensorType(choice.type), choice.ne))
        for name, choice in choices.items()
    }
    return read_model(PlannedHeader(source, drafter_keys(drafter), tensors))


def _declared(drafter: Drafter) -> Iterable[PlannedTensor]:
    """The tensors of `convert/tensors.toml` this drafter has, in the order of the table."""
    from dflashcpp.gguf_file import TensorType

    sizes, features = drafter.dimensions(), drafter.features()
    for row in knowledge.table("convert/tensors.toml")["tensor"]:
        if row["when"] not in features:
            continue
        ne = tuple(_size(text, sizes) for text in reversed(row["shape"]))
        kind = {"matrix": TensorType.BF16, "f32": TensorType.F32, "i64": TensorType.I64}[row["store"]]
        for index in range(drafter.layers if "{i}" in row["name"] else 1):
            yield PlannedTensor(row["name"].replace("{i}", str(index)), ne, kind, 0)


def _size(text: str | int, sizes: Mapping[str, int]) -> int:
    """A product of dimensions (`taps * hidden`), as the table writes shapes."""
    result = 1
    for factor in str(text).split("*"):
        word = factor.strip()
        result *= int(word) if word.isdigit() else sizes[word]
    return result


def drafter_keys(drafter: Drafter) -> dict[str, Any]:
    """The metadata that decides memory, as the converted GGUF will have it."""
    keys: dict[str, Any] = {
        "block_count": drafter.layers,
        "context_length": drafter.context,
        "embedding_length": drafter.hidden,
        "feed_forward_length": drafter.ffn,
        "attention.head_count": drafter.heads,
        "attention.head_count_kv": drafter.kv_heads,
        "attention.key_length": drafter.head_dim,
        "attention.value_length": drafter.head_dim,
        "attention.value_scale": drafter.value_scale,
        "block_size": drafter.block_size,
        "target_layers": list(drafter.taps),
        "conv_kernel_size": drafter.conv_kernel,
        "conv_group_size": drafter.conv_group,
        "selector_rank": drafter.selector_rank,
        "selector_top_k": drafter.selector_top_k,
        "logit_scale": drafter.logit_scale,
        "final_logit_softcapping": drafter.softcap,
        "embedding_scale": drafter.embedding_scale,
        "vocab_size": drafter.vocab,
    }
    if drafter.window:
        keys["attention.sliding_window"] = drafter.window
        keys["attention.sliding_window_pattern"] = list(drafter.sliding)
    if len(set(drafter.causal)) > 1:
        keys["attention.causal_pattern"] = list(drafter.causal)
    else:
        keys["attention.causal"] = drafter.causal[0]
    named = {f"dflash.{name}": value for name, value in keys.items() if value is not None}
    return {"general.architecture": "dflash"} | named


_NEEDED = ("layers", "hidden", "ffn", "heads", "kv_heads", "head_dim", "vocab")


def target_from_facts(facts: Mapping[str, Any], source: str) -> Model | None:
    """The target of a known pair before any download; None when too little is known.

    Tensor shapes come from `block` and `outside` of the architecture's row; their types are not known.
    """
    arch = str(facts.get("architecture", ""))
    rules = knowledge.table("models/architectures.toml").get(arch, {})
    if "block" not in rules or any(name not in facts for name in _NEEDED):
        return None
    sizes = {name: int(facts[name]) for name in _NEEDED}
    keys = _target_keys(facts, sizes) | dict(rules.get("facts", {}))
    values = {"general.architecture": arch} | {f"{arch}.{name}": value for name, value in keys.items()}
    recurrent = [layer.recurrent for layer in read_model(PlannedHeader(source, values)).layers]
    sizes |= _ssm_sizes(facts.get("keys", {}))
    tensors = {
        name: PlannedTensor(name, tuple(_size(text, sizes) for text in ne), 0, 0)
        for name, ne in _named(rules, recurrent)
        if name != "output.weight" or not facts.get("tied")
    }
    return read_model(PlannedHeader(source, values, tensors))


def _target_keys(facts: Mapping[str, Any], sizes: Mapping[str, int]) -> dict[str, Any]:
    return {
        "block_count": sizes["layers"],
        "context_length": facts.get("context", 0),
        "embedding_length": sizes["hidden"],
        "feed_forward_length": sizes["ffn"],
        "attention.head_count": sizes["heads"],
        "attention.head_count_kv": sizes["kv_heads"],
        "attention.key_length": sizes["head_dim"],
        "attention.value_length": sizes["head_dim"],
        "attention.sliding_window": facts.get("window", 0),
        "vocab_size": sizes["vocab"],
        **facts.get("keys", {}),
    }


def _ssm_sizes(keys: Mapping[str, Any]) -> dict[str, int]:
    """The sizes of recurrent blocks by their metadata names, and the channels of their convolution."""
    sizes = {name: int(value) for name, value in keys.items() if name.startswith("ssm.")}
    if sizes:
        wide = 2 * sizes["ssm.group_count"] * sizes["ssm.state_size"]
        sizes["ssm_channels"] = sizes["ssm.inner_size"] + wide
    return sizes


def _named(rules: Mapping[str, Any], recurrent: Sequence[bool]) -> Iterable[tuple[str, list[str]]]:
    yield from rules["outside"].items()
    for index, kind in enumerate(recurrent):
        for name, ne in rules["recurrent_block" if kind else "block"].items():
            yield f"blk.{index}.{name}", ne


def drafter_from_facts(
    facts: Mapping[str, Any], recipe: str, source: str, tensor_types: Sequence[str] = ()
) -> Model:
    """The drafter of a known pair, converted with `recipe`, before any download."""
    from dflashcpp.drafter import Drafter, Rope

    layers, window = int(facts["layers"]), facts.get("window")
    version = int(facts["version"])
    sliding = int(facts.get("sliding_layers", 0))
    drafter = Drafter(
        version=version,
        layers=layers,
        hidden=int(facts["hidden"]),
        ffn=int(facts["ffn"]),
        heads=int(facts["heads"]),
        kv_heads=int(facts["kv_heads"]),
        head_dim=int(facts["head_dim"]),
        taps=tuple(facts["taps"]),
        block_size=int(facts["block_size"]),
        mask_token_id=0,
        rms_eps=1e-5,
        rope=Rope(theta=1e6),
        context=int(facts.get("context", 0)),
        sliding=tuple(index < sliding for index in range(layers)),
        causal=(False,) * layers,
        vocab=int(facts["vocab"]),
        window=int(window) if window else None,
        conv_kernel=2 if version == 2 else None,
        conv_group=16 if version == 2 else None,
        selector_rank=facts.get("selector_rank") if version == 2 else None,
        selector_top_k=facts.get("selector_top_k") if version == 2 else None,
    )
    return drafter_model(drafter, recipe, source, tensor_types)
