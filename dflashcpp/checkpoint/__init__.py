"""Drafter checkpoints: safetensors and config.json of any known flavour, read lazily."""

from __future__ import annotations

from dflashcpp.checkpoint.checkpoint import Checkpoint, open_checkpoint
from dflashcpp.checkpoint.flavour import Flavour
from dflashcpp.checkpoint.weights import SourceTensor

__all__ = ["Checkpoint", "Flavour", "SourceTensor", "open_checkpoint"]
