"""Micro-batches in flight on a pipeline rank, and the buffers in which stages receive."""

from __future__ import annotations

import math

from longspan.config import Run
from longspan.planning.activations import Activations
from longspan.planning.parameters import ModelSplit


def in_flight(
    run: Run, split: ModelSplit, stage: int, activations: Activations
) -> tuple[list[int], int]:
    """Micro-batches whose activations each of a rank's stages holds at once, and bytes of buffers.

    PyTorch's stages allocate a buffer for the input and one for the gradient of every micro-batch
    of a step; the buffer of an input is what its first block keeps.
    """
    ranks = split.degrees.pipeline
    if split.stages is None:
        return [1], 0
    micro_batches = run.train.global_batch // (run.train.micro_batch * split.degrees.data)
    held = split.stages.by_rank[stage]
    schedule = run.layout.schedule
    if schedule == "gpipe":
        flights = [micro_batches] * len(held)
    elif schedule == "1f1b":
        flights = [min(micro_batches, ranks - stage)]
    elif schedule == "interleaved":
        # Forward passes before the first backward pass, in rounds of one micro-batch per rank.
        ahead = (len(held) - 1) * ranks + 2 * (ranks - stage - 1) + 1
        ahead = min(ahead, len(held) * micro_batches)
        flights = []
        for _ in held:
            flights.append(min(micro_batches, ranks, ahead - sum(flights)))
        rest = ahead - sum(flights)
        flights[0] = min(micro_batches, flights[0] + rest)
    else:  # zbv: no rank holds more than one micro-batch per rank in its two stages together
        flights = [min(micro_batches, ranks)] * len(held)
    stream = math.ceil(activations.stream * activations.tokens)
    inputs = sum(micro_batches - n for i, n in zip(held, flights, strict=True) if i > 0)
    gradients = micro_batches * sum(1 for i in held if i < split.stages.last)
    return flights, stream * (inputs + gradients)
