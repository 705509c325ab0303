"""A DFlash checkpoint out of a DFlash-2 one: the convolutions and the selector left away."""

from __future__ import annotations

import json
import struct
from pathlib import Path

from dflashcpp import knowledge
from dflashcpp.conversion import convert

_ADDED = ("_conv.", "candidate_selector.")
_KEYS = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")


def both_versions(target: Path, folder: Path) -> dict[int, Path]:
    """GGUFs in Q8_0 of the small real drafter as it is (2), and without what DFlash-2 adds (1)."""
    second = knowledge.folder("models") / "smollm2-135m-dflash2"
    sources = {2: second, 1: strip_second_version(second, folder / "v1")}
    return {
        version: convert(source, target=target, type="Q8_0", output=folder / f"v{version}.gguf").file
        for version, source in sources.items()
    }


def strip_second_version(source: Path, folder: Path) -> Path:
    """Write `source` (a folder with model.safetensors and config.json) to `folder` as version 1."""
    raw = (source / "model.safetensors").read_bytes()
    start = 8 + struct.unpack_from("<Q", raw)[0]
    kept, data = {}, bytearray()
    for name, tensor in json.loads(raw[8:start]).items():
        if name == "__metadata__" or any(part in name for part in _ADDED):
            continue
        begin, end = (start + offset for offset in tensor["data_offsets"])
        kept[name] = {**tensor, "data_offsets": [len(data), len(data) + end - begin]}
        data += raw[begin:end]
    header = json.dumps(kept).encode()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + data)
    config = json.loads((source / "config.json").read_text())
    config["architectures"] = ["DFlashDraftModel"]
    for key in _KEYS:
        del config["dflash_config"][key]
    (folder / "config.json").write_text(json.dumps(config))
    return folder
