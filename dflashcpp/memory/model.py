"""What the memory of a model depends on, read from its GGUF header alone.

Keys and defaults follow llama.cpp src/llama-model.cpp (`load_hparams`) and src/llama-hparams.cpp;
what is decided per architecture stands in `models/architectures.toml`.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from dflashcpp import knowledge
from dflashcpp.errors import DflashError


class HeaderLike(Protocol):
    """What this module needs of `gguf_file.Header`."""

    @property
    def source(self) -> str: ...

    @property
    def tensors(self) -> Mapping[str, Any]: ...

    def get(self, key: str, default: Any = ...) -> Any: ...


@dataclass(frozen=True)
class Ssm:
    """Recurrent layers: sizes in elements. `conv` is the kernel length."""

    conv: int
    inner: int
    state: int
    heads: int
    groups: int

    @property
    def conv_channels(self) -> int:
        return self.inner + 2 * self.groups * self.state

    @property
    def row(self) -> tuple[int, int]:
        """Elements a sequence keeps for convolution and for the state (n_embd_r, n_embd_s)."""
        return max(self.conv - 1, 0) * self.conv_channels, self.state * self.inner


@dataclass(frozen=True)
class Layer:
    """One block of a model: head counts, sizes in elements, whether it slides or is recurrent."""

    heads: int
    kv_heads: int
    head_k: int
    head_v: int
    ffn: int
    sliding: bool
    recurrent: bool
    own_kv: bool = True

    @property
    def kv_row(self) -> tuple[int, int]:
        """Elements of K and V a token takes in the cache."""
        return self.kv_heads * self.head_k, self.kv_heads * self.head_v


@dataclass(frozen=True, eq=False)
class Model:
    """A model as the planner sees it, equal only to itself; `tensors` are the header's, in ggml shapes."""

    source: str
    arch: str
    embd: int
    vocab: int
    tokens: int
    context: int
    layers: tuple[Layer, ...]
    window: int
    experts: int
    experts_used: int
    ssm: Ssm | None
    tensors: Mapping[str, Any]
    rules: Mapping[str, Any]
    keys: Mapping[str, Any]

    @property
    def known(self) -> bool:
        """Whether the architecture is one the planner was checked against."""
        return bool(self.rules)

    @property
    def tied(self) -> bool:
        return "output.weight" not in self.tensors

    def ne(self, name: str) -> tuple[int, ...]:
        """The shape of tensor `name`; DflashError when the file has none."""
        try:
            return tuple(self.tensors[name].ne)
        except KeyError:
            raise DflashError(
                f"{self.source}: tensor {name} is missing, a {self.arch} model needs it",
                hint="is this the whole model, or one part of a split file?",
            ) from None

    def has(self, layer: int, part: str) -> bool:
        """Whether block `layer` has `part` (with its ending, e.g. `attn_q.bias`)."""
        return f"blk.{layer}.{part}" in self.tensors


def rules_of(arch: str) -> Mapping[str, Any]:
    """The row of `models/architectures.toml`, empty for an unknown architecture."""
    table: Mapping[str, Any] = knowledge.table("models/architectures.toml")
    return table.get(arch, {})


def read_model(header: HeaderLike) -> Model:
    """The model a header describes; DflashError names a missing key, as `Header.get` does."""
    arch = header.get("general.architecture")
    rules = rules_of(arch)
    get = functools.partial(_key, header, arch)
    embedding = header.tensors.get("token_embd.weight")
    tokens = _token_count(header, arch)
    return Model(
        source=header.source,
        arch=arch,
        embd=int(get("embedding_length")),
        vocab=int(embedding.ne[1]) if embedding else tokens,
        tokens=tokens,
        context=int(get("context_length", 0)),
        layers=_layers(header, arch, rules),
        window=int(get("attention.sliding_window", 0)),
        experts=int(get("expert_count", 0)),
        experts_used=_first(get("expert_used_count", 0)),
        ssm=_ssm(header, arch),
        tensors=header.tensors,
        rules=rules,
        keys=_scalars(header, arch),
    )


_FACTS = (
    "embedding_scale",
    "final_logit_softcapping",
    "attn_logit_softcapping",
    "logit_scale",
    "attention.scale",
    "attention.causal",
    "attention.causal_pattern",
    "attention.temperature_scale",
    "attention.value_scale",
    "embedding_length_per_layer_input",
    "expert_weights_scale",
    "rope.dimension_sections",
    "target_layers",
    "block_size",
    "conv_kernel_size",
    "conv_group_size",
    "selector_rank",
    "selector_top_k",
)


def _scalars(header: HeaderLike, arch: str) -> dict[str, Any]:
    found = {name: _key(header, arch, name, None) for name in _FACTS}
    return {name: value for name, value in found.items() if value is not None}


def _key(header: HeaderLike, arch: str, name: str, *default: Any) -> Any:
    return header.get(f"{arch}.{name}", *default)


def _first(value: Any) -> int:
    return int(max(value)) if isinstance(value, Sequence) and value else int(value or 0)


def _token_count(header: HeaderLike, arch: str) -> int:
    stored = getattr(header, "kv", {}).get("tokenizer.ggml.tokens")
    if stored is not None:
        return int(stored.count)
    return int(_key(header, arch, "vocab_size", 0))


def _ssm(header: HeaderLike, arch: str) -> Ssm | None:
    inner = _key(header, arch, "ssm.inner_size", None)
    if inner is None:
        return None
    return Ssm(
        conv=int(_key(header, arch, "ssm.conv_kernel")),
        inner=int(inner),
        state=int(_key(header, arch, "ssm.state_size")),
        heads=int(_key(header, arch, "ssm.time_step_rank", 0)),
        groups=int(_key(header, arch, "ssm.group_count", 0)),
    )


def _per_layer(value: Any, count: int) -> list[int]:
    if isinstance(value, Sequence):
        return [int(item) for item in value[:count]] + [0] * (count - len(value))
    return [int(value)] * count


def _layers(header: HeaderLike, arch: str, rules: Mapping[str, Any]) -> tuple[Layer, ...]:
    """The blocks of the trunk: the extra multi-token-prediction blocks at the end do not run."""
    get = functools.partial(_key, header, arch)
    count = int(get("block_count")) - int(get("nextn_predict_layers", 0))
    heads = _per_layer(get("attention.head_count"), count)
    kv_heads = _per_layer(get("attention.head_count_kv", get("attention.head_count")), count)
    ffn = _per_layer(get("feed_forward_length", 0), count)
    widest = max(heads, default=0) or 1
    head_k = int(get("attention.key_length", int(get("embedding_length")) // widest))
    head_v = int(get("attention.value_length", int(get("embedding_length")) // widest))
    swa_k = int(get("attention.key_length_swa", head_k))
    swa_v = int(get("attention.value_length_swa", head_v))
    sliding = _sliding(header, arch, rules, count)
    recurrent = _recurrent(header, arch, rules, kv_heads, ffn)
    with_kv = count - int(get("attention.shared_kv_layers", 0))
    return tuple(
        Layer(
            heads=heads[i],
            kv_heads=kv_heads[i],
            head_k=swa_k if sliding[i] else head_k,
            head_v=swa_v if sliding[i] else head_v,
            ffn=ffn[i],
            sliding=sliding[i],
            recurrent=recurrent[i],
            own_kv=i < with_kv,
        )
        for i in range(count)
    )


def _sliding(header: HeaderLike, arch: str, rules: Mapping[str, Any], count: int) -> list[bool]:
    """load_swa_pattern (src/llama-model.cpp): an array of flags, or a period, or the architecture's."""
    reads_window = not rules or "sliding" in rules
    if not reads_window or not int(_key(header, arch, "attention.sliding_window", 0)):
        return [False] * count
    pattern = _key(header, arch, "attention.sliding_window_pattern", rules.get("sliding", 0))
    if isinstance(pattern, Sequence):
        return [bool(flag) for flag in pattern[:count]] + [False] * (count - len(pattern))
    period = int(pattern)
    return [period > 0 and i % period < period - 1 for i in range(count)]


def _recurrent(
    header: HeaderLike, arch: str, rules: Mapping[str, Any], kv_heads: list[int], ffn: list[int]
) -> list[bool]:
    count = len(kv_heads)
    if _key(header, arch, "ssm.inner_size", None) is None:
        return [False] * count
    flags = _key(header, arch, "attention.recurrent_layers", None)
    if flags is not None:
        return [bool(flag) for flag in flags[:count]]
    if rules.get("recurrent") == "interval":
        period = int(_key(header, arch, "full_attention_interval", 4))
        return [(i + 1) % period != 0 for i in range(count)]
    return [kv == 0 and size == 0 for kv, size in zip(kv_heads, ffn, strict=True)]
