"""Checkpoints on disk. Knows tensors by name and nothing of models."""

from longspan.checkpoint.format import (
    Box,
    all_in,
    folder_of,
    latest,
    prune,
    set_aside,
    step_of,
)
from longspan.checkpoint.reading import Checkpoint, load, open_checkpoint
from longspan.checkpoint.writing import Draft, Part, remove_leftovers, save

__all__ = [
    "Box",
    "Checkpoint",
    "Draft",
    "Part",
    "all_in",
    "folder_of",
    "latest",
    "load",
    "open_checkpoint",
    "prune",
    "remove_leftovers",
    "save",
    "set_aside",
    "step_of",
]
