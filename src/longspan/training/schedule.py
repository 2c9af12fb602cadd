"""Learning rate over steps: linear warmup, then constant, cosine, linear, or stable-then-decay."""

from __future__ import annotations

import math

from longspan.config import Train


def learning_rate(train: Train, step: int) -> float:
    """The learning rate of the next optimizer step, after `step` finished ones."""
    if step < train.warmup_steps:
        return train.peak_lr * (step + 1) / train.warmup_steps
    if train.schedule == "constant":
        return train.peak_lr
    if train.schedule == "wsd":
        assert train.decay_steps is not None  # by rules/train.py
        start, length = train.steps - train.decay_steps, train.decay_steps
    else:
        start, length = train.warmup_steps, train.steps - train.warmup_steps
    done = min(1.0, max(0.0, (step - start) / max(1, length)))
    left = 0.5 * (1 + math.cos(math.pi * done)) if train.schedule == "cosine" else 1 - done
    return train.peak_lr * (train.min_lr_ratio + (1 - train.min_lr_ratio) * left)
