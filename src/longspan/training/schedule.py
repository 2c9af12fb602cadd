"""Learning rate over steps: linear warmup, then constant, cosine, linear, or stable-then-decay."""

from __future__ import annotations

import math

from longspan.config import Train


def learning_rate(train: Train, step: int) -> float:
    """The rate of the optimizer step that follows `step` finished ones."""
    if step < train.warmup:
        return train.peak_lr * (step + 1) / train.warmup
    if train.schedule == "constant":
        return train.peak_lr
    if train.schedule == "wsd":
        assert train.decay is not None  # config's rule
        start, length = train.steps - train.decay, train.decay
    else:
        start, length = train.warmup, train.steps - train.warmup
    done = min(1.0, max(0.0, (step - start) / max(1, length)))
    left = 0.5 * (1 + math.cos(math.pi * done)) if train.schedule == "cosine" else 1 - done
    return train.peak_lr * (train.min_lr + (1 - train.min_lr) * left)
