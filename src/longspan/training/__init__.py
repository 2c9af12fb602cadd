"""The training loop and what it needs: optimizer, schedule, device choice, state."""

from longspan.training.loop import Result, train
from longspan.training.state import load_trained

__all__ = ["Result", "load_trained", "train"]
