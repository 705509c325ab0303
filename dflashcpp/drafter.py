"""`Drafter`: geometry and settings of one drafter, the noun everything else speaks about.

It is made from a checkpoint (`dflashcpp.checkpoint.open_checkpoint(...).drafter`) or from a GGUF
header (`Drafter.from_gguf`). Tap numbers are those of the GGUF: the layer of the target whose
*input* is read, that is z-lab's `target_layer_ids` plus one.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from dflashcpp.errors import DflashError

if TYPE_CHECKING:
    from dflashcpp.gguf_file import Header

ARCHITECTURE = "dflash"


@dataclass(frozen=True)
class Rope:
    """Rotary positions, NeoX style (first half, second half of a head)."""

    theta: float
    type: str = "default"  # default, linear, yarn, llama3
    factor: float = 1.0
    original_context: int | None = None
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    attn_factor: float | None = None  # yarn: what multiplies cos and sin; None: 1 + 0.1 ln(factor)
    low_freq_factor: float | None = None  # llama3
    high_freq_factor: float | None = None  # llama3
    dims: int | None = None  # rotated part of a head; None: the whole head
    sections: tuple[int, ...] | None = None  # M-RoPE targets: (dims / 2, 0, 0, 0)

    @property
    def attention_factor(self) -> float:
        """What multiplies cos and sin: 1 unless YaRN (transformers `_compute_yarn_parameters`)."""
        if self.type != "yarn":
            return 1.0
        return yarn_magnitude(self.factor) if self.attn_factor is None else self.attn_factor

    def frequency_divisors(self, head_dim: int) -> list[float] | None:
        """llama3: by what each of the `dims / 2` frequencies is divided (`rope_freqs.weight`), else None.

        As transformers `_compute_llama3_parameters` and llama.cpp `conversion/llama.py`.
        """
        if self.type != "llama3":
            return None
        if self.low_freq_factor is None or self.high_freq_factor is None or self.original_context is None:
            return None  # a GGUF of somebody else: only its tensor knows
        dims = self.dims or head_dim
        return [self._llama3_divisor(self.theta ** (-2 * i / dims)) for i in range(dims // 2)]

    def _llama3_divisor(self, frequency: float) -> float:
        assert self.low_freq_factor and self.high_freq_factor and self.original_context
        turns = self.original_context * frequency / (2 * math.pi)
        if turns > self.high_freq_factor:
            return 1.0
        if turns < self.low_freq_factor:
            return self.factor
        smooth = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        return 1 / ((1 - smooth) / self.factor + smooth)


def yarn_magnitude(factor: float, mscale: float = 1.0) -> float:
    """YaRN's `0.1 * mscale * ln(factor) + 1` (1 where nothing is stretched)."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


@dataclass(frozen=True)
class Drafter:
    """One drafter. Sizes are in elements, `vocab` is the target's, `None` means "does not apply"."""

    version: int  # 1: DFlash, 2: DFlash-2
    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    taps: tuple[int, ...]  # number of the target layer whose input is read, in order
    block_size: int  # rows of a trained block: the anchor and block_size - 1 drafted
    mask_token_id: int
    rms_eps: float
    rope: Rope
    context: int
    sliding: tuple[bool, ...]  # per layer: attends within `window`
    causal: tuple[bool, ...]  # per layer: causal inside the block
    vocab: int | None = None
    window: int | None = None  # counts the query itself
    conv_kernel: int | None = None
    conv_group: int | None = None
    selector_rank: int | None = None
    selector_top_k: int | None = None
    logit_scale: float | None = None
    softcap: float | None = None
    embedding_scale: float | None = None
    attention_scale: float | None = None  # None: 1 / sqrt(head_dim)
    value_scale: float | None = None
    activation: str = "silu"
    sinks: bool = False
    own_embedding: bool = False
    own_head: bool = False
    draft_vocab: int | None = None  # rows of an own, reduced head; None: the whole vocabulary
    target_layers: int | None = None  # how many layers the target has, when the source says so

    @property
    def max_draft(self) -> int:
        """How many tokens one trained block drafts: its rows without the anchor."""
        return self.block_size - 1

    @property
    def target_layer_ids(self) -> list[int]:
        """The taps in z-lab's numbers: the layers of the target whose output is read."""
        return [tap - 1 for tap in self.taps]

    @property
    def conv_groups(self) -> int | None:
        """Channel groups of the local convolution (DFlash-2)."""
        return self.hidden // self.conv_group if self.conv_group else None

    def dimensions(self) -> dict[str, int]:
        """The sizes that the shapes of `convert/tensors.toml` are written in."""
        sizes = {
            "hidden": self.hidden,
            "ffn": self.ffn,
            "heads": self.heads,
            "kv_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "taps": len(self.taps),
            "layers": self.layers,
            "vocab": self.vocab,
            "draft_vocab": self.draft_vocab or self.vocab,
            "conv_kernel": self.conv_kernel,
            "conv_groups": self.conv_groups,
            "selector_rank": self.selector_rank,
            "rope_frequencies": (self.rope.dims or self.head_dim) // 2,
        }
        return {name: size for name, size in sizes.items() if size is not None}

    def features(self) -> frozenset[str]:
        """Which optional tensors exist: the words used in the column `when` of `convert/tensors.toml`."""
        present = {
            "always": True,
            "dflash2": self.version == 2,
            "sinks": self.sinks,
            "own_embedding": self.own_embedding,
            "own_head": self.own_head,
            "reduced_vocab": self.draft_vocab is not None,
            "llama3": self.rope.type == "llama3",
        }
        return frozenset(name for name, there in present.items() if there)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON, with `max_draft` and z-lab's numbers of the taps beside ours."""
        return {
            **asdict(self),
            "max_draft": self.max_draft,
            "target_layer_ids": self.target_layer_ids,
        }

    @classmethod
    def from_gguf(cls, header: Header) -> Drafter:
        """Read a drafter from a GGUF header of architecture `dflash`.

        Raises DflashError naming the file and the key that is missing or makes no sense.
        """
        return _Reader(header).drafter()


def whole_number(header: Header, key: str, *, least: int = 0, default: int | None = None) -> int | None:
    """The whole number at `key`; `default` when it is not there.

    Raises DflashError naming file and key for anything else than a number from `least` to 2^31 - 1.
    """
    value = header.get(key, None)
    if value is None:
        return default
    if type(value) is not int or not least <= value < 1 << 31:
        raise DflashError(
            f"{header.source}: {key} must be a whole number from {least}, it is {str(value)[:60]}"
        )
    return value


def real_number(header: Header, key: str) -> float | None:
    """The finite number at `key`, None when it is not there; DflashError for anything else."""
    value = header.get(key, None)
    if value is None:
        return None
    if type(value) not in (int, float) or not math.isfinite(value):
        raise DflashError(f"{header.source}: {key} must be a number, it is {str(value)[:60]}")
    return float(value)


_MAX_LAYERS = 512  # llama.cpp LLAMA_MAX_LAYERS


class _Reader:
    """Reads the `dflash.*` keys of one GGUF (llama.cpp `src/models/dflash.cpp`, `load_arch_hparams`)."""

    def __init__(self, header: Header) -> None:
        self.header = header
        found = header.get("general.architecture")
        if found != ARCHITECTURE:
            raise DflashError(
                f"{header.source} is a GGUF of architecture {found!r}, not a drafter ({ARCHITECTURE!r})",
                hint="pass the drafter's GGUF; `dflashcpp inspect FILE` says what a file is",
            )

    def size(self, key: str) -> int:
        """A number of at least 1 that must be there."""
        value = whole_number(self.header, f"dflash.{key}", least=1)
        return int(self.header.get(f"dflash.{key}")) if value is None else value

    def maybe(self, key: str) -> int | None:
        return whole_number(self.header, f"dflash.{key}")

    def real(self, key: str) -> float | None:
        return real_number(self.header, f"dflash.{key}")

    def must(self, key: str) -> float:
        value = self.real(key)
        return float(self.header.get(f"dflash.{key}")) if value is None else value

    def drafter(self) -> Drafter:
        tensors = self.header.tensors
        hidden, heads, layers = (
            self.size(key) for key in ("embedding_length", "attention.head_count", "block_count")
        )
        if layers > _MAX_LAYERS:
            raise DflashError(
                f"{self.header.source}: dflash.block_count is {layers}, more than {_MAX_LAYERS}"
            )
        head_dim = self.maybe("attention.key_length") or hidden // heads
        return Drafter(
            version=2 if "selector_hidden.weight" in tensors else 1,
            layers=layers,
            hidden=hidden,
            ffn=self.size("feed_forward_length"),
            heads=heads,
            kv_heads=self.maybe("attention.head_count_kv") or heads,
            head_dim=head_dim,
            taps=tuple(self._numbers("target_layers")),
            block_size=self._block_size(),
            mask_token_id=self._mask(),
            rms_eps=self.must("attention.layer_norm_rms_epsilon"),
            rope=self._rope(head_dim),
            context=self.size("context_length"),
            sliding=self._sliding(layers),
            causal=self._causal(layers),
            window=self.maybe("attention.sliding_window") or None,
            **self._version2(),
            **self._scales(),
            **self._vocabulary(),
            sinks="blk.0.attn_sinks.weight" in tensors,
            target_layers=whole_number(self.header, "dflashcpp.target.block_count"),
        )

    def _numbers(self, key: str) -> list[int]:
        values = self.header.get(f"dflash.{key}")
        if not isinstance(values, list) or not values or any(type(value) is not int for value in values):
            raise DflashError(f"{self.header.source}: dflash.{key} must be a list of whole numbers")
        return values

    def _block_size(self) -> int:
        size = self.maybe("block_size") or 0
        if size < 2:
            raise DflashError(
                f"{self.header.source}: dflash.block_size is {size or 'missing'}; it must be at least 2",
                hint="convert the checkpoint again with `dflashcpp convert`",
            )
        return size

    def _mask(self) -> int:
        mask = whole_number(self.header, "tokenizer.ggml.mask_token_id")
        if mask is None:
            raise DflashError(
                f"{self.header.source} has no tokenizer.ggml.mask_token_id: no draft would ever be accepted",
                hint="convert the checkpoint again with `dflashcpp convert`",
            )
        return mask

    def _sliding(self, layers: int) -> tuple[bool, ...]:
        if not self.maybe("attention.sliding_window"):
            return (False,) * layers
        return self._per_layer("attention.sliding_window_pattern", layers)

    def _causal(self, layers: int) -> tuple[bool, ...]:
        if "dflash.attention.causal_pattern" in self.header.kv:
            return self._per_layer("attention.causal_pattern", layers)
        return (bool(self.header.get("dflash.attention.causal", False)),) * layers

    def _per_layer(self, key: str, layers: int) -> tuple[bool, ...]:
        values = self.header.get(f"dflash.{key}")
        if not isinstance(values, list) or len(values) != layers:
            raise DflashError(f"{self.header.source}: dflash.{key} must list {layers} values, one a layer")
        return tuple(bool(value) for value in values)

    def _rope(self, head_dim: int) -> Rope:
        kind = str(self.header.get("dflash.rope.scaling.type", "default"))
        factor = self.real("rope.scaling.factor") or 1.0
        dims = self.maybe("rope.dimension_count") or head_dim
        scale = self.real("rope.scaling.attn_factor")
        rope: dict[str, Any] = {
            "theta": self.must("rope.freq_base"),
            "type": "default" if kind == "none" else kind,
            "factor": factor,
            "original_context": self.maybe("rope.scaling.original_context_length"),
            "beta_fast": self.real("rope.scaling.yarn_beta_fast") or 32.0,
            "beta_slow": self.real("rope.scaling.yarn_beta_slow") or 1.0,
            "attn_factor": None if scale is None else scale * yarn_magnitude(factor),
            "dims": None if dims == head_dim else dims,
            "sections": self._sections(),
        }
        return Rope(**{**rope, **self._llama3()})

    def _sections(self) -> tuple[int, ...] | None:
        if "dflash.rope.dimension_sections" not in self.header.kv:
            return None
        return tuple(self._numbers("rope.dimension_sections"))

    def _llama3(self) -> dict[str, Any]:
        """llama.cpp keeps llama3's scaling as a tensor only; our own keys keep the numbers."""
        if "rope_freqs.weight" not in self.header.tensors:
            return {}
        own: dict[str, Any] = {
            name: real_number(self.header, f"dflashcpp.rope.{name}")
            for name in ("factor", "low_freq_factor", "high_freq_factor")
        }
        own["original_context"] = whole_number(self.header, "dflashcpp.rope.original_context")
        return {"type": "llama3", **{name: value for name, value in own.items() if value is not None}}

    def _version2(self) -> dict[str, Any]:
        if "selector_hidden.weight" not in self.header.tensors:
            return {}
        return {
            "conv_kernel": self.size("conv_kernel_size"),
            "conv_group": self.size("conv_group_size"),
            "selector_rank": self.size("selector_rank"),
            "selector_top_k": self.size("selector_top_k"),
        }

    def _scales(self) -> dict[str, Any]:
        softcap = self.real("final_logit_softcapping")
        return {
            "logit_scale": self.real("logit_scale") or None,
            "softcap": softcap if softcap and softcap > 0 else None,
            "embedding_scale": self.real("embedding_scale") or None,
            "attention_scale": self.real("attention.scale") or None,
            "value_scale": self.real("attention.value_scale") or None,
            "activation": str(self.header.get("dflash.hidden_activation", "silu")),
        }

    def _vocabulary(self) -> dict[str, Any]:
        tensors, tokens = self.header.tensors, self.header.kv.get("tokenizer.ggml.tokens")
        reduced = tensors.get("d2t")
        return {
            "vocab": tokens.count if tokens is not None else None,
            "own_embedding": "token_embd.weight" in tensors,
            "own_head": "output.weight" in tensors,
            "draft_vocab": reduced.ne[0] if reduced is not None else None,
        }
