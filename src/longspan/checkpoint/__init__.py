"""Sharded checkpoints on disk: tensors by name, independent of any model."""

from longspan.checkpoint.format import (
    CHECKPOINTS,
    Region,
    checkpoint_path,
    latest,
    list_checkpoints,
    prune,
    quarantine,
    step_of,
)
from longspan.checkpoint.reading import FLOATS, Checkpoint, check_shapes, load, open_checkpoint
from longspan.checkpoint.signing import read_key
from longspan.checkpoint.writing import (
    PendingCheckpoint,
    TensorShard,
    remove_leftovers,
    save,
    save_file,
)

__all__ = [
    "CHECKPOINTS",
    "FLOATS",
    "Checkpoint",
    "PendingCheckpoint",
    "Region",
    "TensorShard",
    "check_shapes",
    "checkpoint_path",
    "latest",
    "list_checkpoints",
    "load",
    "open_checkpoint",
    "prune",
    "quarantine",
    "read_key",
    "remove_leftovers",
    "save",
    "save_file",
    "step_of",
]
