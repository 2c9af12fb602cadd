"""Memory of a GPU in measured runs of other training systems: a formula with fitted constants.

Longspan's own runs are counted by `memory.py` instead. This says how far a formula can go, with the
same constants for every run. Imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from longspan.planning.step_time import Array, Workload


@dataclass(frozen=True)
class MemoryConstants:
    """Bytes, by what they are proportional to."""

    weight: float = 6.0
    """Of a parameter: weight and gradient."""
    optimizer: float = 12.0
    """Of a parameter, which ZeRO shards."""
    block: float = 20.0
    """Of a token and feature in a layer: activations that are kept for the backward pass."""
    mlp: float = 6.0
    """Of a token and feature in the MLP."""
    logits: float = 6.0
    """Of a token and word."""
    base: float = 1e9
    """Of the framework, on every GPU."""


def run_memory(work: Workload, constants: MemoryConstants) -> Array:
    """Bytes on the fullest GPU of each run."""
    c, tensor = constants, work.tensor
    share = work.layers / work.pipeline
    features = c.block * work.hidden + c.mlp * work.ffn
    activations = share * work.tokens * features / tensor
    of_state = c.weight + np.where(work.zero > 0, c.optimizer / work.data, c.optimizer)
    parameters = (share * work.layer_parameters + work.vocab * work.hidden) / tensor
    logits = c.logits * work.tokens * work.vocab / tensor
    # The first stage keeps as many micro-batches as there are stages, the last one the logits.
    in_flight = np.minimum(work.accumulation, work.pipeline)
    fullest = np.maximum(in_flight * activations, activations + logits)
    return of_state * parameters + fullest + c.base
