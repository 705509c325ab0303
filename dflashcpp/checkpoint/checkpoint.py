"""`open_checkpoint`: files, flavour, tensors and settings put together; nothing is read but headers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from dflashcpp.checkpoint import weights
from dflashcpp.checkpoint.config import Config, as_kind
from dflashcpp.checkpoint.files import Files, locate
from dflashcpp.checkpoint.flavour import Flavour, architectures, recognise
from dflashcpp.checkpoint.fp8 import scale_layout
from dflashcpp.checkpoint.geometry import measure
from dflashcpp.checkpoint.json_file import read_object
from dflashcpp.checkpoint.own_vocabulary import draft_to_target, vocabulary_features
from dflashcpp.checkpoint.placement import Placed, check_complete, place, row_of, rows
from dflashcpp.checkpoint.safetensors_file import RawTensor
from dflashcpp.checkpoint.settings import Settings
from dflashcpp.checkpoint.torch_file import read_mask_embedding
from dflashcpp.checkpoint.weights import Reader, SourceTensor
from dflashcpp.drafter import Drafter
from dflashcpp.errors import DflashError

if TYPE_CHECKING:
    import numpy as np

_ROTATED = ("attn_q.weight", "attn_k.weight", "attn_q_norm.weight", "attn_k_norm.weight")


class Checkpoint:
    """A drafter checkpoint, opened: `drafter`, `tensors` by GGUF name (in file order), `warnings`.

    Use it as a context manager, or call `close`.
    """

    def __init__(
        self,
        files: Files,
        config: Config,
        flavour: Flavour,
        drafter: Drafter,
        placed: Placed,
        warnings: list[str],
    ) -> None:
        self.files = files
        self.config = config
        self.flavour = flavour
        self.drafter = drafter
        self.warnings = warnings
        self.dropped = placed.dropped
        self.mask_embedding = _mask_embedding(files.folder, drafter)
        self._reader = Reader()
        self.tensors = self._source_tensors(placed)

    @property
    def path(self) -> Path:
        """The checkpoint's folder."""
        return self.files.folder

    def read_rows(self, name: str, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Rows of tensor `name` (GGUF name) as float32 [rows, columns]; any thread may call this."""
        tensor = self.tensors[name]
        stop = tensor.rows if stop is None else stop
        rows = weights.read_rows(self._reader, tensor, start, stop)
        mask = self.drafter.mask_token_id
        if name == "token_embd.weight" and self.mask_embedding is not None and start <= mask < stop:
            rows[mask - start] = self.mask_embedding
        return rows

    def close(self) -> None:
        """Close the weight files."""
        self._reader.close()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _source_tensors(self, placed: Placed) -> dict[str, SourceTensor]:
        features, found = self.drafter.features(), {}
        for row in rows():
            if row["when"] not in features:
                continue
            for layer in range(self.drafter.layers) if "{i}" in row["name"] else [0]:
                name = row["name"].format(i=layer)
                found[name] = self._made(name, row) if "made" in row else self._source_tensor(name, placed)
        return found

    def _made(self, name: str, row: Mapping[str, Any]) -> SourceTensor:
        import numpy as np

        divisors = self.drafter.rope.frequency_divisors(self.drafter.head_dim)
        values = np.array(divisors, dtype=np.float32)
        return SourceTensor(
            name, row["made"], values.shape, "F32", self.path, 0, 0, row["store"], made=values
        )

    def _source_tensor(self, name: str, placed: Placed) -> SourceTensor:
        raw, row = placed.tensors[name], row_of(name)
        if row["store"] == "i64":
            return self._draft_to_target(raw)
        if raw.dtype not in weights.FLOATS + weights.FP8:
            raise DflashError(
                f"{raw.file.name}: tensor {raw.name} is {raw.dtype}; weights must be BF16, F16, F32 or FP8",
                hint="convert the unquantised release",
            )
        scale = placed.scales.get(name)
        blocks = scale_layout(raw, scale, self.config)
        heads = (
            self.drafter.head_dim if self.config.get("neox") is False and name.endswith(_ROTATED) else None
        )
        return SourceTensor(
            name,
            raw.name,
            raw.shape,
            raw.dtype,
            raw.file,
            raw.offset,
            raw.nbytes,
            row["store"],
            scale=scale,
            scale_block=blocks,
            interleaved_heads=heads,
        )

    def _draft_to_target(self, raw: RawTensor) -> SourceTensor:
        values = draft_to_target(self._reader, raw, self.drafter.vocab or 0)
        return SourceTensor(
            "d2t", raw.name, raw.shape, raw.dtype, raw.file, raw.offset, 0, "i64", made=values
        )


def open_checkpoint(
    source: str | Path, config: str | Path | None = None, *, overrides: Mapping[str, Any] | None = None
) -> Checkpoint:
    """Open the checkpoint at `source`, a `.safetensors` file or a folder; reads headers and config only.

    `config` is another place of config.json; `overrides` replaces single values of it by path.
    Raises DflashError for everything that is missing, contradictory or not a DFlash drafter.
    """
    files = locate(Path(source), Path(config) if config is not None else None)
    settings = Config(read_object(_config_path(files)), str(_config_path(files)), overrides)
    flavour = recognise(settings, files.tensors)
    where = str(files.weights[0] if len(files.weights) == 1 else files.folder)
    placed = place(files.tensors, where)
    warnings = [*files.warnings, *_unread(settings)]
    features = _features(placed, settings, where, warnings)
    layers = _layers(placed, settings)
    check_complete(placed, layers, features, where)
    sizes = {**measure(placed, settings, features), "layers": layers}
    reader = Settings(settings, flavour, sizes, features)
    drafter = reader.drafter()
    settings.check_overrides()
    return Checkpoint(files, settings, flavour, drafter, placed, warnings + reader.warnings)


def _unread(config: Config) -> list[str]:
    return [
        f"{config.source}: {key} is not known to dflashcpp and changes nothing" for key in config.unknown()
    ]


def _mask_embedding(folder: Path, drafter: Drafter) -> np.ndarray | None:
    """MiMo's vector for the mask token, float32 [hidden], out of `mask_embedding.pt` beside the weights."""
    path = folder / "mask_embedding.pt"
    if not path.is_file():
        return None
    token, vector = read_mask_embedding(path, drafter.hidden)
    if token != drafter.mask_token_id:
        raise DflashError(
            f"{path} is for token {token}, the config's mask token is {drafter.mask_token_id}",
            hint="the files belong to different checkpoints",
        )
    return vector


def _config_path(files: Files) -> Path:
    if files.config is None:
        raise DflashError(
            f"{files.folder} has no config.json; weights do not say taps, mask token, block size, rope",
            hint="put the config.json of the same repository beside the weights, or pass --config FILE",
        )
    return files.config


def _layers(placed: Placed, config: Config) -> int:
    """How many layers: the larger of what the tensors and the config say, so that missing ones are named."""
    found = config.found(["transformer_layer_config.num_hidden_layers", "num_hidden_layers"])
    said = as_kind(found[0][1], "int", f"{config.source}: {found[0][0]}") if found else 0
    there = placed.layers()
    if found and 0 < said < there:
        raise DflashError(
            f"{config.source}: {found[0][0]} is {said}, the checkpoint has layers up to {there - 1}",
            hint="config.json and weights belong to different checkpoints",
        )
    if not 0 < max(said, there) <= 256:
        raise DflashError(f"{config.source}: {max(said, there)} layers make no drafter")
    return max(said, there)


def _features(placed: Placed, config: Config, where: str, warnings: list[str]) -> frozenset[str]:
    """Which optional parts the tensors bring, with what the config's class promises checked against it."""
    two = placed.has("dflash2")
    named = architectures(config)
    if not two and "DFlash2DraftModel" in named and config.at("speculators_model_type") in (None, "dflash2"):
        raise DflashError(
            f"{config.source} says DFlash2DraftModel, but {where} has neither convolutions nor a selector",
            hint="a DFlash-2 drafter without them drafts badly and says nothing; download the weights again",
        )
    if two and "DFlashDraftModel" in named:
        warnings.append(
            f"{config.source} says DFlashDraftModel, but the tensors are DFlash-2's; converted as DFlash-2"
        )
    found = {"always"} | ({"dflash2"} if two else set())
    found |= {"sinks"} if placed.has("sinks") else set()
    return frozenset(found | vocabulary_features(placed, config, two, warnings))
