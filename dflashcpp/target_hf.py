"""A target given as a Hugging Face folder: config.json and tokenizer files, no weights."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dflashcpp.checkpoint.config import as_kind
from dflashcpp.checkpoint.json_file import read_object
from dflashcpp.errors import DflashError
from dflashcpp.knowledge import table
from dflashcpp.target import Target
from dflashcpp.tokenizer_files import read_tokenizer


def read_target_folder(folder: Path) -> Target:
    """The target of a folder with config.json and tokenizer.json or tokenizer.model.

    Raises DflashError naming what is missing, or a tokenizer whose way of splitting text is unknown.
    """
    path = folder / "config.json"
    if not path.is_file():
        there = sorted(entry.name for entry in folder.iterdir())
        raise DflashError(
            f"{folder} has neither a GGUF nor a config.json; there is {', '.join(there[:8]) or 'nothing'}",
            hint="give the target's GGUF or its Hugging Face folder",
        )
    whole = read_object(path)
    config = whole["text_config"] if isinstance(whole.get("text_config"), Mapping) else whole
    hidden, layers = (_number(config, key, path) for key in ("hidden_size", "num_hidden_layers"))
    vocab = _number(config, "vocab_size", path)
    known = table("convert/targets.toml")
    kind = str(config.get("model_type") or whole.get("model_type") or "unknown")
    arch = known["architectures"].get(kind, kind)
    tokenizer = read_tokenizer(folder, whole, vocab)
    return Target(
        source=str(folder),
        architecture=arch,
        name=_name(folder, whole),
        layers=layers,
        hidden=hidden,
        vocab=vocab,
        tokens=tokenizer["tokenizer.ggml.tokens"].count,
        tokenizer=tokenizer,
        mrope="mrope_section" in _rope(config),
        embedding_scale=math.sqrt(hidden) if arch in known["scaled_embedding"] else None,
        logit_scale=_maybe(config, "output_multiplier", path),
        softcap=_maybe(config, "final_logit_softcapping", path),
    )


def _number(config: Mapping[str, Any], key: str, path: Path) -> int:
    value = as_kind(config.get(key), "int", f"{path}: {key}")
    if value <= 0:
        raise DflashError(f"{path}: {key} is {value}")
    return int(value)


def _maybe(config: Mapping[str, Any], key: str, path: Path) -> float | None:
    value = config.get(key)
    return None if value is None else float(as_kind(value, "float", f"{path}: {key}"))


def _rope(config: Mapping[str, Any]) -> Mapping[str, Any]:
    found = config.get("rope_parameters") or config.get("rope_scaling") or {}
    return found if isinstance(found, Mapping) else {}


def _name(folder: Path, config: Mapping[str, Any]) -> str:
    from dflashcpp.provenance import hub_origin

    repo, _ = hub_origin(folder)
    said = config.get("_name_or_path")
    name = repo or (said if isinstance(said, str) and said else folder.absolute().name)
    return (name.rpartition("/")[2] or name).encode("utf-8", "replace").decode()
