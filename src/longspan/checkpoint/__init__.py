"""Checkpoints on disk. Knows tensors by name and nothing of models."""

from longspan.checkpoint.format import Checkpoint, latest, load, prune, save

__all__ = ["Checkpoint", "latest", "load", "prune", "save"]
