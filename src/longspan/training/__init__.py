"""The training loop and what it needs: steps, state, saving, guard, watchdog."""

from longspan.training.loop import Result, train

__all__ = ["Result", "train"]
