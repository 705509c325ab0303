"""The llama-server flags that decide how much memory a target and its drafter take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from dflashcpp.errors import UsageError

ALL_LAYERS = 1 << 30
_ALIGN = 256  # GGML_PAD(n_ctx, 256) in the llama_context constructor


@dataclass(frozen=True)
class Settings:
    """llama-server's flags by their meaning; sizes in tokens, `context` 0 is the target's own.

    `gpu_layers` and `draft_gpu_layers` count as llama.cpp does: the output layer first, then blocks
    from the last to the first. `draft_ubatch` and `draft_context` exist in the patched engine only.
    """

    context: int = 0
    batch: int = 2048
    ubatch: int = 512
    parallel: int = 1
    unified: bool = False
    gpu_layers: int = ALL_LAYERS
    draft_gpu_layers: int = ALL_LAYERS
    cache_k: str = "f16"
    cache_v: str = "f16"
    draft_cache_k: str = "f16"
    draft_cache_v: str = "f16"
    draft_max: int = 3
    draft_ubatch: int = 0
    draft_context: int = 0
    flash: bool = True
    swa_full: bool = False
    draft_sampling: bool = True
    repack: bool = True
    on_device: bool = True
    patched: bool = True

    def changed(self, **values: Any) -> Settings:
        return replace(self, **values)

    @property
    def block(self) -> int:
        """Rows a sequence drafts in one step: the anchor and `draft_max` masks."""
        return max(1, self.draft_max + 1)


# flag -> (field, kind); the names of llama.cpp's common/arg.cpp
_FLAGS: dict[str, tuple[str, str]] = {
    "-c": ("context", "int"),
    "--ctx-size": ("context", "int"),
    "-b": ("batch", "int"),
    "--batch-size": ("batch", "int"),
    "-ub": ("ubatch", "int"),
    "--ubatch-size": ("ubatch", "int"),
    "-np": ("parallel", "int"),
    "--parallel": ("parallel", "int"),
    "-kvu": ("unified", "yes"),
    "--kv-unified": ("unified", "yes"),
    "-no-kvu": ("unified", "no"),
    "--no-kv-unified": ("unified", "no"),
    "-ngl": ("gpu_layers", "layers"),
    "--gpu-layers": ("gpu_layers", "layers"),
    "--n-gpu-layers": ("gpu_layers", "layers"),
    "-ngld": ("draft_gpu_layers", "layers"),
    "--spec-draft-ngl": ("draft_gpu_layers", "layers"),
    "--gpu-layers-draft": ("draft_gpu_layers", "layers"),
    "--n-gpu-layers-draft": ("draft_gpu_layers", "layers"),
    "-ctk": ("cache_k", "type"),
    "--cache-type-k": ("cache_k", "type"),
    "-ctv": ("cache_v", "type"),
    "--cache-type-v": ("cache_v", "type"),
    "-ctkd": ("draft_cache_k", "type"),
    "--cache-type-k-draft": ("draft_cache_k", "type"),
    "--spec-draft-type-k": ("draft_cache_k", "type"),
    "-ctvd": ("draft_cache_v", "type"),
    "--cache-type-v-draft": ("draft_cache_v", "type"),
    "--spec-draft-type-v": ("draft_cache_v", "type"),
    "--spec-draft-n-max": ("draft_max", "int"),
    "-ubd": ("draft_ubatch", "int"),
    "--spec-draft-ubatch-size": ("draft_ubatch", "int"),
    "--spec-draft-ctx-size": ("draft_context", "int"),
    "-cd": ("draft_context", "int"),
    "-fa": ("flash", "switch"),
    "--flash-attn": ("flash", "switch"),
    "--swa-full": ("swa_full", "yes"),
    "--repack": ("repack", "yes"),
    "-nr": ("repack", "no"),
    "--no-repack": ("repack", "no"),
    "--spec-draft-backend-sampling": ("draft_sampling", "yes"),
    "--no-spec-draft-backend-sampling": ("draft_sampling", "no"),
}
# flags of llama-server that cost no memory: those with a value, and switches
# fmt: off
_FREE = frozenset((
    "-t", "--threads", "-tb", "--threads-batch", "--host", "--port", "-a",
    "--alias", "--spec-type", "--spec-draft-n-min", "--spec-draft-p-min", "--fit", "-fit", "--api-key",
    "--api-key-file", "-lv", "--verbosity", "--temp", "--top-k", "--top-p", "--min-p",
    "-s", "--seed", "-n", "--predict", "--n-predict", "--timeout", "--chat-template",
    "--chat-template-file",
))
# fmt: on
_FREE_SWITCHES = frozenset(
    ("--no-warmup", "--jinja", "--no-jinja", "--metrics", "--slots", "--no-slots", "--no-webui", "--props")
)
CACHE_TYPES = ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "iq4_nl", "q5_0", "q5_1")


def from_flags(arguments: Sequence[str], base: Settings | None = None) -> tuple[Settings, list[str]]:
    """Settings from llama-server flags, and the words that are none of ours.

    Flags that cost no memory are passed over.

    Raises UsageError for a missing or meaningless value.
    """
    values: dict[str, Any] = {}
    rest: list[str] = []
    words = iter(arguments)
    for word in words:
        name, joined, text = word.partition("=")
        known = _FLAGS.get(name)
        if known is None:
            if name in _FREE and not joined:
                _text(name, next(words, None))
            elif name not in _FREE and name not in _FREE_SWITCHES:
                rest.append(word)
            continue
        field, kind = known
        if kind in ("yes", "no"):
            values[field] = kind == "yes"
            continue
        values[field] = _value(name, kind, text if joined else next(words, None))
    return (base or Settings()).changed(**values), rest


def from_long_flags(flags: dict[str, Any], base: Settings | None = None) -> Settings:
    """Settings from the `flags` of a pair: long names without dashes (`ctx-size = 4096`)."""
    words = [text for name, value in flags.items() for text in (f"--{name}", str(value))]
    return from_flags(words, base)[0]


def _text(name: str, text: str | None) -> str:
    if text is None:
        raise UsageError(f"{name} needs a value")
    return text


def _value(name: str, kind: str, given: str | None) -> Any:
    text = _text(name, given)
    if kind == "switch":
        if text not in ("on", "off", "auto"):
            raise UsageError(f"{name} is on, off or auto, not {text!r}")
        return text != "off"
    if kind == "type":
        if text not in CACHE_TYPES:
            raise UsageError(f"{name} {text}: no such cache type", hint=f"known: {', '.join(CACHE_TYPES)}")
        return text
    if kind == "layers" and text in ("all", "auto"):
        return ALL_LAYERS
    try:
        number = int(text)
    except ValueError:
        raise UsageError(f"{name} needs a number, not {text!r}") from None
    return _counted(name, kind, number)


def _counted(name: str, kind: str, number: int) -> int:
    if kind == "layers":
        return ALL_LAYERS if number < 0 else number
    least = 0 if _FLAGS[name][0] in ("context", "draft_ubatch", "draft_context") else 1
    if number < least:
        raise UsageError(f"{name} {number}: must be at least {least}")
    return number


@dataclass(frozen=True)
class Cells:
    """What one context holds: tokens in all, a stream, and how many streams (llama_context).

    `asked`: the context before it is padded, which bounds the batch.
    """

    asked: int
    context: int
    per_stream: int
    streams: int
    swa: int


def pad(number: int, unit: int = _ALIGN) -> int:
    return -(-number // unit) * unit


def cells(settings: Settings, context: int, window: int) -> Cells:
    """Cells of the full and the sliding cache of one context of `context` tokens.

    llama_context (src/llama-context.cpp) and llama_kv_cache_iswa (src/llama-kv-cache-iswa.cpp).
    """
    parallel = settings.parallel
    ubatch = min(settings.ubatch, settings.batch, context)
    total = pad(context)
    streams = 1 if settings.unified else parallel
    per_stream = total if settings.unified else pad(max(total // parallel, 1))
    total = per_stream * streams
    sequences = parallel if settings.unified else 1
    sliding = pad(min(per_stream, window * sequences + ubatch))
    return Cells(context, total, per_stream, streams, per_stream if settings.swa_full else sliding)


def to_flags(settings: Settings) -> list[str]:
    """The llama-server flags that give these settings, whatever the engine's defaults are."""
    first: dict[str, tuple[str, str]] = {}
    for flag, (field, kind) in _FLAGS.items():
        if kind != "no":
            first.setdefault(field, (flag, kind))
    words: list[str] = []
    for field, (flag, kind) in first.items():
        value = getattr(settings, field)
        if field in _PATCHED_ONLY and not value:
            continue
        if kind == "yes":
            words += [flag] if value else [_OFF[field]] if field in _OFF else []
        else:
            words += [flag, _word(value, kind)]
    return words


_PATCHED_ONLY = ("draft_ubatch", "draft_context")
_OFF = {
    "unified": "--no-kv-unified",
    "draft_sampling": "--no-spec-draft-backend-sampling",
    "repack": "--no-repack",
}


def _word(value: object, kind: str) -> str:
    if kind == "switch":
        return "on" if value else "off"
    if kind == "layers" and value == ALL_LAYERS:
        return "all"
    return str(value)
