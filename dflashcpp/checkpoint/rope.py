"""Rotary settings: theta and scaling from wherever a config keeps them; never a default theta."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dflashcpp.checkpoint.config import Config, as_kind
from dflashcpp.checkpoint.flavour import Flavour
from dflashcpp.drafter import Rope, yarn_magnitude
from dflashcpp.errors import DflashError

_INSIDE = ["transformer_layer_config.", ""]
_GROUPS = ["rope_parameters", "rope_scaling"]
_KINDS = ["full_attention", "sliding_attention"]


def read_rope(config: Config, flavour: Flavour, head_dim: int, warnings: list[str]) -> Rope:
    """The rope of a config. DflashError: no theta, places that disagree, an unknown scaling."""
    parameters = _parameters(config)
    theta = _theta(config)
    dims = _dims(config, flavour, head_dim, warnings)
    if "mrope_section" in parameters:
        warnings.append(
            f"{config.source} carries the target's mrope_section; a drafter's positions have one dimension, "
            "so it is not used (M-RoPE targets get their sections from the target)"
        )
    _check_local_base(config, theta, warnings)
    kind = _kind(config, parameters)
    if kind in ("default", "mrope"):
        return Rope(theta=theta, dims=dims)
    readers = {"linear": _linear, "yarn": _yarn, "llama3": _llama3}
    if not isinstance(kind, str) or kind not in readers:
        raise DflashError(
            f"{config.source}: rope type {str(kind)[:40]!r} is not one that llama.cpp's DFlash can do",
            hint="known: default, linear, yarn, llama3",
        )
    return Rope(theta=theta, type=kind, dims=dims, **readers[kind](_Group(config, parameters), warnings))


def _kind(config: Config, parameters: Mapping[str, Any]) -> Any:
    """The rope type; what says nothing but scales all the same, or says two things, is an error."""
    said = [parameters[key] for key in ("rope_type", "type") if parameters.get(key) is not None]
    if len(said) == 2 and said[0] != said[1]:
        raise DflashError(
            f"{config.source}: the rope settings say rope_type {str(said[0])[:40]!r} "
            f"but type {str(said[1])[:40]!r}",
            hint="correct it, or take the config.json that belongs to these weights",
        )
    if not said and parameters.get("factor") is not None:
        raise DflashError(
            f"{config.source}: the rope settings have a factor ({str(parameters['factor'])[:40]}) but no "
            "rope_type that says how it is meant",
            hint="known: default, linear, yarn, llama3; for example --set rope_scaling.rope_type=linear",
        )
    return said[0] if said else "default"


def _check_local_base(config: Config, theta: float, warnings: list[str]) -> None:
    """Gemma's second theta, for sliding layers: a drafter's class has one."""
    found = config.found([f"{inside}rope_local_base_freq" for inside in _INSIDE])
    if found and found[0][1] != theta:
        warnings.append(
            f"{config.source}: {found[0][0]} is taken for a leak of the target's config: all layers of a "
            f"drafter rotate by rope_theta ({theta:g})"
        )


def _parameters(config: Config) -> dict[str, Any]:
    """The group of rope settings that says most; DflashError when two disagree (thetas: see `_theta`)."""
    groups = _groups(config)
    scaling = [group for group in groups if _scaling(group[1])]
    for place, group in scaling[1:]:
        if _scaling(group) != _scaling(scaling[0][1]):
            raise _disagree(config, scaling[0][0], place)
    spoken = [place for place, group in groups if _type(group) == "default"]
    if scaling and spoken:
        raise _disagree(config, spoken[0], scaling[0][0])
    found = scaling or groups
    return found[0][1] if found else {}


def _scaling(group: Mapping[str, Any]) -> dict[str, Any]:
    """What a group says beyond theta; empty for the default rope."""
    kind = _type(group)
    if kind in (None, "default", "mrope") and group.get("factor") is None:
        return {}
    same = {key: value for key, value in group.items() if key not in ("rope_theta", "type", "rope_type")}
    return {**same, "rope_type": kind}


def _type(group: Mapping[str, Any]) -> Any:
    return group.get("rope_type") or group.get("type")


def _disagree(config: Config, one: str, other: str) -> DflashError:
    return DflashError(
        f"{config.source}: {one} and {other} say different things about the rope",
        hint=f"say which one is right by taking the other out: --set {other}=null",
    )


def _groups(config: Config) -> list[tuple[str, dict[str, Any]]]:
    """Place and content of every group there is; of per-layer-type groups the one both share."""
    groups = []
    for inside in _INSIDE:
        for group in _GROUPS:
            found = config.at(inside + group)
            if found is None:
                continue
            if not isinstance(found, Mapping):
                raise DflashError(
                    f"{config.source}: {inside}{group} must be an object, it is {str(found)[:60]!r}"
                )
            nested = [found[kind] for kind in _KINDS if isinstance(found.get(kind), Mapping)]
            if len(nested) == 2 and nested[0] != nested[1]:
                raise DflashError(
                    f"{config.source}: {inside}{group} gives full and sliding layers different positions; "
                    "llama.cpp's DFlash has one rope for all",
                    hint="there is no way to convert this drafter without loss",
                )
            groups.append((f"{inside}{group}", dict(nested[0]) if nested else dict(found)))
    return groups


def _theta(config: Config) -> float:
    nested = [f"{group}.{kind}.rope_theta" for group in _GROUPS for kind in _KINDS]
    flat = [*(f"{group}.rope_theta" for group in _GROUPS), "rope_theta", *nested]
    paths = [inside + path for inside in _INSIDE for path in flat]
    base = ["dflash_config.backbone_rotary_base", "backbone_rotary_base"]
    found = config.found([*paths, *base])
    if not found:
        raise DflashError(
            f"{config.source} does not say rope_theta (or rope_parameters.rope_theta); there is no default",
            hint="take the config.json that belongs to these weights, or pass --set rope_theta=VALUE",
        )
    values = [(path, as_kind(value, "float", f"{config.source}: {path}")) for path, value in found]
    for path, value in values[1:]:
        if value != values[0][1]:
            raise DflashError(
                f"{config.source}: {values[0][0]} is {values[0][1]:g} but {path} is {value:g}",
                hint=f"say which one the drafter was trained with: --set {values[0][0]}=VALUE",
            )
    if values[0][1] <= 0:
        raise DflashError(f"{config.source}: {values[0][0]} is {values[0][1]:g}; it must be greater than 0")
    return float(values[0][1])


def _dims(config: Config, flavour: Flavour, head_dim: int, warnings: list[str]) -> int | None:
    """The rotated part of a head; a factor that only the target could mean is not used."""
    paths = [f"{inside}{group}.partial_rotary_factor" for inside in _INSIDE for group in _GROUPS]
    paths += ["partial_rotary_factor", "transformer_layer_config.partial_rotary_factor"]
    own = config.found(["dflash_config.partial_rotary_factor"])
    found = own or config.found(paths)
    if not found:
        return None
    path, factor = found[0][0], as_kind(found[0][1], "float", f"{config.source}: {found[0][0]}")
    if not 0 < factor <= 1 or int(head_dim * factor) % 2 or int(head_dim * factor) == 0:
        raise DflashError(f"{config.source}: {path} is {factor:g}, which makes no even part of {head_dim}")
    if factor == 1:
        return None
    if not own and not flavour.partial_rotary and path not in config.overrides:
        warnings.append(
            f"{config.source}: {path} {factor:g} is taken for a leak of the target's config: "
            f"{flavour.title} drafters rotate whole heads. If yours does not, pass --set {path}={factor:g}"
        )
        return None
    return int(head_dim * factor)


class _Group:
    """The numbers of one group of rope settings."""

    def __init__(self, config: Config, values: Mapping[str, Any]) -> None:
        self.config, self.values = config, values

    def number(self, key: str, kind: str = "float", default: float | None = None) -> Any:
        value = self.values.get(key)
        if value is None:
            value = self.config.at(key)
        if value is None and default is not None:
            return default
        if value is None:
            raise DflashError(
                f"{self.config.source}: the rope scaling has no {key}",
                hint="take the config.json of these weights",
            )
        if kind == "int" and isinstance(value, float) and value.is_integer():
            value = int(value)
        found = as_kind(value, kind, f"{self.config.source}: {key} of the rope scaling")
        if found <= 0:
            raise DflashError(
                f"{self.config.source}: {key} of the rope scaling is {found}; it must be above 0"
            )
        return found

    def maybe(self, key: str) -> Any:
        return self.number(key) if self.values.get(key) is not None else None


def _linear(group: _Group, warnings: list[str]) -> dict[str, Any]:
    return {"factor": group.number("factor")}


def _yarn(group: _Group, warnings: list[str]) -> dict[str, Any]:
    """As transformers `_compute_yarn_parameters`; beta_fast 32 and beta_slow 1 are the method's own."""
    factor = group.number("factor")
    attention = group.maybe("attention_factor") or group.maybe("attn_factor")
    mscale, all_dim = group.maybe("mscale"), group.maybe("mscale_all_dim")
    if attention is None and mscale and all_dim:
        attention = yarn_magnitude(factor, mscale) / yarn_magnitude(factor, all_dim)
    if group.values.get("truncate") is False:
        warnings.append(
            f"{group.config.source}: rope scaling says truncate false; llama.cpp always rounds "
            "YaRN's correction range to whole dimensions"
        )
    return {
        "factor": factor,
        "original_context": group.number("original_max_position_embeddings", "int"),
        "beta_fast": group.number("beta_fast", default=32.0),
        "beta_slow": group.number("beta_slow", default=1.0),
        "attn_factor": attention,
    }


def _llama3(group: _Group, warnings: list[str]) -> dict[str, Any]:
    low, high = group.number("low_freq_factor"), group.number("high_freq_factor")
    if high <= low:
        raise DflashError(
            f"{group.config.source}: high_freq_factor {high:g} of the rope scaling must be above "
            f"low_freq_factor {low:g}",
            hint="take the config.json of these weights",
        )
    return {
        "factor": group.number("factor"),
        "original_context": group.number("original_max_position_embeddings", "int"),
        "low_freq_factor": low,
        "high_freq_factor": high,
    }
