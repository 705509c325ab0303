"""Where a drafter comes from, as `general.*` and `dflashcpp.*` keys."""

from __future__ import annotations

import importlib.metadata
import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dflashcpp.checkpoint import Checkpoint
from dflashcpp.gguf_file import Kv
from dflashcpp.progress import SILENT, Progress
from dflashcpp.target import Target

_CARD_BYTES = 1 << 20
_HUB = "https://huggingface.co"


@dataclass(frozen=True)
class Provenance:
    """What the file says of its origin; None where nobody says it."""

    name: str
    repo: str | None = None
    revision: str | None = None
    sha256: str | None = None
    licence: str | None = None
    base_model: str | None = None
    overrides: dict[str, Any] = field(default_factory=dict)
    target: Target | None = None

    def general(self, size_label: str) -> dict[str, Kv]:
        """Keys that llama.cpp and the Hub know (gguf-py `Keys.General`)."""
        texts = {"general.name": self.name, "general.size_label": size_label, "general.license": self.licence}
        if self.repo:
            texts["general.source.url"] = texts["general.source.repo_url"] = f"{_HUB}/{self.repo}"
        found = {key: Kv.string(text) for key, text in texts.items() if text}
        return {**found, **self._base()}

    def _base(self) -> dict[str, Kv]:
        """The target as the base model: by the model card, else by its own name."""
        owner, _, name = (self.base_model or "").rpartition("/")
        texts = {"name": name.replace("-", " ") or (self.target.name if self.target else None)}
        if owner:
            texts |= {"organization": owner, "repo_url": f"{_HUB}/{self.base_model}"}
        found = {f"general.base_model.0.{key}": Kv.string(text) for key, text in texts.items() if text}
        return {"general.base_model.count": Kv.u32(1), **found} if found else {}

    def own(self, recipe: str) -> dict[str, Kv]:
        """Our own keys; no dates, so that the same input gives the same bytes."""
        texts = {
            "dflashcpp.version": importlib.metadata.version("dflashcpp"),
            "dflashcpp.recipe": recipe,
            "dflashcpp.source.repo": self.repo,
            "dflashcpp.source.revision": self.revision,
            "dflashcpp.source.sha256": self.sha256,
            "dflashcpp.source.overrides": json.dumps(self.overrides, sort_keys=True)
            if self.overrides
            else None,
        }
        found = {key: Kv.string(text) for key, text in texts.items() if text}
        if self.target is not None:
            found["dflashcpp.target.architecture"] = Kv.string(self.target.architecture)
            if self.target.name:
                found["dflashcpp.target.name"] = Kv.string(self.target.name)
        return found


def provenance_of(
    place: Path, checkpoint: Checkpoint, target: Target, progress: Progress = SILENT, *, hashed: bool = True
) -> Provenance:
    """The origin of the checkpoint at `place`; `hashed` false leaves a stand-in for the sha256."""
    repo, revision = hub_origin(checkpoint.path)
    card = read_card(checkpoint.path)
    return Provenance(
        name=model_name(place, checkpoint),
        repo=repo,
        revision=revision,
        sha256=_sha256(checkpoint, progress) if hashed else "0" * 64,
        licence=card.get("license"),
        base_model=card.get("base_model"),
        overrides=checkpoint.config.overrides,
        target=target,
    )


def _sha256(checkpoint: Checkpoint, progress: Progress) -> str:
    """Of the weights: the file's hash, or the hash of the shards' hashes in order of their names."""
    import hashlib

    from dflashcpp.pairs import file_sha256

    digests = [hub_sha256(path) or file_sha256(path, progress) for path in checkpoint.files.weights]
    return digests[0] if len(digests) == 1 else hashlib.sha256("\n".join(digests).encode()).hexdigest()


def hub_sha256(path: Path) -> str | None:
    """The sha256 that names a blob of the Hub's cache, when `path` is a link to one."""
    real = path.resolve()
    return real.name if real.parent.name == "blobs" and re.fullmatch(r"[0-9a-f]{64}", real.name) else None


def hub_origin(folder: Path) -> tuple[str | None, str | None]:
    """Repository and revision of a folder inside the Hub's cache (`models--org--name/snapshots/<rev>`)."""
    match = re.search(
        r"models--([^/\\]+?)--([^/\\]+)[/\\]snapshots[/\\]([0-9a-f]{40})", str(folder.absolute())
    )
    return (f"{match[1]}/{match[2]}", match[3]) if match else (None, None)


def model_name(place: Path, checkpoint: Checkpoint) -> str:
    """The repository's name, else the folder's, else the file's: letters that any file system takes."""
    repo, _ = hub_origin(checkpoint.path)
    stem = place.stem if place.is_file() and place.stem != "model" else None
    name = repo.rpartition("/")[2] if repo else stem or checkpoint.path.absolute().name
    return re.sub(r"[^A-Za-z0-9._+-]+", "-", name).strip("-.") or "drafter"


def verifier(checkpoint: Checkpoint) -> str | None:
    """The target's name in a speculators config."""
    found = checkpoint.config.at("speculators_config.verifier.name_or_path")
    return found if isinstance(found, str) and found else None


def read_card(folder: Path) -> dict[str, str]:
    """`license` and `base_model` out of the front matter of README.md; nothing when there is none.

    The front matter is YAML of which only `key: value` and the first `- value` of a list are needed.
    """
    path = folder / "README.md"
    try:
        text = path.read_bytes()[:_CARD_BYTES].decode("utf-8", "replace")
    except OSError:
        return {}
    front = re.match(r"---\r?\n(.*?)\r?\n---", text, re.DOTALL)
    found = {}
    for key in ("license", "base_model"):
        match = (
            re.search(rf"^{key}:[ \t]*(?:\r?\n[ \t]*-[ \t]*)?([^\s#\[\]]+)", front[1], re.MULTILINE)
            if front
            else None
        )
        if match:
            found[key] = match[1].strip("'\"")
    return found
