"""What shapes cannot say, from the config, into a `Drafter`: taps, mask, windows, causality, scales."""

from __future__ import annotations

from dflashcpp.checkpoint.config import Config
from dflashcpp.checkpoint.flavour import Flavour
from dflashcpp.checkpoint.rope import read_rope
from dflashcpp.drafter import Drafter
from dflashcpp.errors import DflashError

_LAYER_TYPES = {"full_attention": False, "sliding_attention": True}
_ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_pytorch_tanh"}


class Settings:
    """Reads one config for tensors of given sizes. `warnings` collects what the user should know."""

    def __init__(
        self, config: Config, flavour: Flavour, sizes: dict[str, int], features: frozenset[str]
    ) -> None:
        self.config = config
        self.flavour = flavour
        self.sizes = sizes
        self.features = features
        self.warnings: list[str] = []

    def drafter(self) -> Drafter:
        """The drafter. Raises DflashError naming the key that is missing or makes no sense."""
        self._refuse_unsupported()
        get, sizes, two = self.config.get, self.sizes, "dflash2" in self.features
        sliding, window = self._sliding()
        block_size = get("block_size")
        vocab = sizes.get("vocab") or get("vocab")
        if two:
            self._check_version2(block_size)
        return Drafter(
            version=2 if two else 1,
            layers=sizes["layers"],
            hidden=sizes["hidden"],
            ffn=sizes["ffn"],
            heads=sizes["heads"],
            kv_heads=sizes["kv_heads"],
            head_dim=sizes["head_dim"],
            taps=self._taps(),
            block_size=block_size,
            mask_token_id=self._mask(vocab),
            rms_eps=get("rms_eps"),
            rope=read_rope(self.config, self.flavour, sizes["head_dim"], self.warnings),
            context=get("context"),
            sliding=sliding,
            causal=self._causal(sliding),
            vocab=vocab,
            window=window,
            conv_kernel=sizes.get("conv_kernel"),
            conv_group=sizes.get("conv_group"),
            selector_rank=sizes.get("selector_rank"),
            selector_top_k=get("selector_top_k") if two else None,
            logit_scale=get("logit_scale"),
            softcap=self._positive("softcap"),
            embedding_scale=get("embedding_scale"),
            value_scale=get("value_scale"),
            activation=self._activation(),
            sinks="sinks" in self.features,
            own_embedding="own_embedding" in self.features,
            own_head="own_head" in self.features,
            draft_vocab=sizes.get("draft_vocab") if "reduced_vocab" in self.features else None,
            target_layers=get("target_layers"),
        )

    def _refuse_unsupported(self) -> None:
        config = self.config
        if config.get("attention_bias"):
            raise DflashError(
                f"{config.source}: {config.place('attention_bias')} is true; llama.cpp's DFlash has none",
                hint="there is no way to convert this drafter without loss",
            )
        if config.get("sample_from_anchor"):
            raise DflashError(
                f"{config.source}: sample_from_anchor is true: the anchor's row predicts, "
                "which llama.cpp's plain DFlash does not do",
                hint="only drafters with sample_from_anchor false can be converted",
            )
        self._check_sinks()
        hidden = config.get("target_hidden")
        if hidden is not None and hidden != self.sizes["hidden"]:
            raise DflashError(
                f"{config.source}: {config.place('target_hidden')} is {hidden}, the drafter's hidden size is "
                f"{self.sizes['hidden']}; llama.cpp's DFlash needs the same in both",
                hint="look for a drafter of the same target whose hidden size is the target's",
            )

    def _check_sinks(self) -> None:
        config, there = self.config, "sinks" in self.features
        said = config.get("sinks")
        if said and not there:
            raise DflashError(
                f"{config.source}: {config.place('sinks')} is true, but no layer has a tensor of sinks",
                hint="the checkpoint is incomplete; download it again",
            )
        if there and said is False:
            raise DflashError(
                f"{config.source}: {config.place('sinks')} is false, but layers have sinks, which llama.cpp "
                "would use",
                hint=f"if they are to be used: --set {config.place('sinks')}=true",
            )

    def _check_version2(self, block_size: int) -> None:
        """What llama.cpp's loader wants of a DFlash-2 drafter (`src/models/dflash.cpp`)."""
        sizes, top_k = self.sizes, self.config.get("selector_top_k")
        if top_k is None:
            raise self.config.missing("selector_top_k")
        if sizes["hidden"] < top_k * (top_k + 1):
            self.warnings.append(
                f"hidden size {sizes['hidden']} is under the {top_k * (top_k + 1)} numbers of a lattice row "
                f"(selector_top_k {top_k}): only a llama.cpp with our patches loads this drafter"
            )
        if sizes["conv_kernel"] > block_size:
            self.warnings.append(
                f"the convolution has {sizes['conv_kernel']} taps but a block only {block_size} rows: "
                "the last taps never count"
            )

    def _taps(self) -> tuple[int, ...]:
        config = self.config
        ids, aux = config.get("target_layer_ids"), config.get("aux_layer_ids")
        if ids is None and aux is None:
            field = "aux_layer_ids" if self.flavour.name.startswith("speculators") else "target_layer_ids"
            raise config.missing(field, hint=self._taps_hint(field))
        if ids is not None and aux is not None and [number + 1 for number in ids] != aux:
            raise DflashError(
                f"{config.source}: {config.place('target_layer_ids')} {ids} and "
                f"{config.place('aux_layer_ids')} {aux} disagree; the second must be the first plus one",
                hint="say which is right with --set",
            )
        field = "aux_layer_ids" if ids is None else "target_layer_ids"
        taps = tuple(aux) if ids is None else tuple(number + 1 for number in ids)
        self._check_taps(taps, field)
        return taps

    def _check_taps(self, taps: tuple[int, ...], field: str) -> None:
        config, layers = self.config, self.config.get("target_layers")
        shown = f"{config.source}: {config.place(field)} {config.get(field)}"
        least = 0 if field == "aux_layer_ids" else 1
        if any(tap < least for tap in taps):
            raise DflashError(f"{shown} has a negative layer")
        if layers is not None and max(taps, default=0) > layers:
            raise DflashError(f"{shown} goes beyond the target's {layers} layers")
        if len(taps) != self.sizes["taps"]:
            raise DflashError(
                f"{shown} lists {len(taps)} layers, fc.weight takes {self.sizes['taps']} "
                f"({self.sizes['taps'] * self.sizes['hidden']} columns of {self.sizes['hidden']} each)",
                hint="config.json and weights belong to different checkpoints",
            )
        if len(set(taps)) != len(taps):
            self.warnings.append(f"{shown} names a layer twice")
        if field == "aux_layer_ids" and layers:
            self.warnings += numbering_warnings(config, taps, layers)

    def _taps_hint(self, field: str) -> str:
        layers = self.config.get("target_layers")
        key = "aux_hidden_state_layer_ids" if field == "aux_layer_ids" else field
        text = f"take the config.json of these weights, or pass --set {key}=[...]"
        if layers is None or field == "aux_layer_ids":
            return text
        guess = published_taps(layers, self.sizes["taps"])
        return f"{text} (z-lab's formula would give {guess}, but it is wrong for most published drafters)"

    def _mask(self, vocab: int | None) -> int:
        named = self.config.get("mask_token")
        mask = self.config.get("mask_token_id", needed=not named)
        if mask is None:
            raise UnnumberedMask(self.config, named)
        if vocab is not None and mask >= vocab:
            raise DflashError(
                f"{self.config.source}: {self.config.place('mask_token_id')} is {mask}, but there are only "
                f"{vocab} tokens (0 to {vocab - 1})",
                hint="the mask token's row is looked up in the target's embedding",
            )
        return int(mask)

    def _sliding(self) -> tuple[tuple[bool, ...], int | None]:
        """Which layers slide and their window, as `layer_types`, `use_swa` or transformers' rule say."""
        config, layers = self.config, self.sizes["layers"]
        everywhere = bool(config.get("use_swa"))
        sliding = (True,) * layers if everywhere else self._layer_types(layers)
        if not any(sliding):
            return sliding, None
        window = config.get("swa_window") if everywhere else None
        window = window if window is not None else config.get("window") or config.get("swa_window")
        if window is None or window <= 0:
            raise DflashError(
                f"{config.source} makes {sum(sliding)} layers slide but gives no window above 0 "
                f"({config.place('window')} is {config.get('window')})",
                hint="take the config.json of these weights, or pass --set sliding_window=N",
            )
        return sliding, int(window)

    def _layer_types(self, layers: int) -> tuple[bool, ...]:
        config = self.config
        found = config.found(["transformer_layer_config.layer_types", "layer_types"])
        if not found:
            return self._by_max_window_layers(layers)
        path, types = found[0]
        if not isinstance(types, list) or len(types) != layers:
            raise DflashError(f"{config.source}: {path} must list {layers} layers, it is {str(types)[:120]}")
        unknown = [kind for kind in types if not isinstance(kind, str) or kind not in _LAYER_TYPES]
        if unknown:
            raise DflashError(
                f"{config.source}: {path} has the layer type {str(unknown[0])[:60]!r}",
                hint="llama.cpp's DFlash has full_attention and sliding_attention",
            )
        sliding = tuple(_LAYER_TYPES[kind] for kind in types)
        if any(sliding) and not config.get("use_sliding_window") and not self.flavour.sliding_without_switch:
            self.warnings.append(
                f"{config.source}: use_sliding_window is not true, but {path} has sliding layers; "
                "they get their window (llama.cpp's own converter loses it)"
            )
        return sliding

    def _by_max_window_layers(self, layers: int) -> tuple[bool, ...]:
        """transformers' Qwen3Config without layer_types: layers from max_window_layers on slide."""
        config = self.config
        if not config.get("use_sliding_window") or not config.get("window"):
            return (False,) * layers
        first = config.at("max_window_layers")
        if type(first) is not int:
            raise DflashError(
                f"{config.source}: use_sliding_window is true, but neither layer_types nor max_window_layers "
                "says which layers slide",
                hint="pass --set max_window_layers=N (layers from N on slide)",
            )
        return tuple(layer >= first for layer in range(layers))

    def _causal(self, sliding: tuple[bool, ...]) -> tuple[bool, ...]:
        """In-block causality: is_causal, dflash_config.causal, speculators' key, the format's rule."""
        config = self.config
        for field in ("is_causal", "causal"):
            said = config.get(field)
            if said is not None:
                return (bool(said),) * len(sliding)
        non_causal = config.get("sliding_non_causal")
        if non_causal is not None:
            return (False,) * len(sliding) if non_causal else sliding
        causal = {"none": (False,) * len(sliding), "all": (True,) * len(sliding)}.get(
            self.flavour.causal, sliding
        )
        if any(sliding) and (self.flavour.unsaid_warns or len(set(causal)) > 1):
            self.warnings.append(self._causal_warning(causal))
        return causal

    def _causal_warning(self, causal: tuple[bool, ...]) -> str:
        said = "sliding layers are causal inside the block, full ones are not"
        if len(set(causal)) == 1:
            said = f"all layers are {'causal' if causal[0] else 'not causal'} inside the block"
        text = f"{self.config.source} does not say is_causal; by the rule of {self.flavour.title} {said}"
        if len(set(causal)) > 1:
            text += (
                ". Plain llama.cpp has one flag for all layers and makes none causal (some acceptance is "
                "lost); the file carries dflash.attention.causal_pattern for engines that can do both"
            )
        return text

    def _positive(self, field: str) -> float | None:
        value = self.config.get(field)
        return value if value is not None and value > 0 else None

    def _activation(self) -> str:
        said = self.config.get("activation") or "silu"
        if said not in _ACTIVATIONS:
            raise DflashError(
                f"{self.config.source}: {self.config.place('activation')} is {said!r}; "
                "llama.cpp's DFlash has silu and gelu",
                hint="there is no way to convert this drafter without loss",
            )
        return _ACTIVATIONS[said]


class UnnumberedMask(DflashError):
    """The config gives the mask token's text only: its number is for a target's tokenizer to say."""

    def __init__(self, config: Config, text: str) -> None:
        wanted = config.missing(
            "mask_token_id",
            hint=f"it names the mask token {text[:60]!r}: give the target with --target, whose tokenizer "
            "knows its number, or pass --set mask_token_id=NUMBER",
        )
        super().__init__(wanted.message, hint=wanted.hint)
        self.text = text


def numbering_warnings(config: Config, taps: tuple[int, ...], layers: int) -> list[str]:
    """A word of warning when speculators' numbers, layer inputs, are those of z-lab's formula for outputs."""
    place = config.place("aux_layer_ids")
    if config.get("aux_layer_ids") is None or list(taps) != published_taps(layers, len(taps)):
        return []
    return [
        f"{config.source}: {place} {list(taps)} looks like z-lab's numbering, one lower than this key means; "
        f"if acceptance is poor, convert with --set target_layer_ids={list(taps)} --set {place}=null"
    ]


def published_taps(target_layers: int, count: int) -> list[int]:
    """z-lab's formula for `target_layer_ids` (dflash 0.1.0, `build_target_layer_ids`); for messages only."""
    if count <= 1:
        return [target_layers // 2]
    return [round(1 + number * (target_layers - 4) / (count - 1)) for number in range(count)]
