"""Checkpoints on disk. Knows tensors by name and nothing of models."""

from longspan.checkpoint.format import (
    CHECKPOINTS,
    Box,
    all_in,
    folder_of,
    latest,
    prune,
    set_aside,
    step_of,
)
from longspan.checkpoint.reading import Checkpoint, check_shapes, load, open_checkpoint
from longspan.checkpoint.writing import Draft, Part, remove_leftovers, save

__all__ = [
    "CHECKPOINTS",
    "Box",
    "Checkpoint",
    "Draft",
    "Part",
    "all_in",
    "check_shapes",
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
