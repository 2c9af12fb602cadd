"""Skips steps that would harm the model.

A step is skipped if its loss or gradient is non-finite or, if asked for, its gradient norm spikes
to a multiple of the recent average. The decision stays on the device: the optimizer reads it there,
and the host learns of it when it reads the loss.
"""

from __future__ import annotations

from typing import Annotated

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

AVERAGED_STEPS = 100
"""The gradient norm is averaged over about this many steps."""
WARMUP_STEPS = 20
"""Steps before a norm can count as a spike."""


class NormAverage(BaseModel):
    """The running average of the gradient norm, as a checkpoint holds it."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    norm: Annotated[float, Field(ge=0, le=torch.finfo(torch.float32).max)] = 0.0
    steps: Annotated[int, Field(ge=0)] = 0


class Guard:
    """`spike`: the multiple of the average norm above which a step is skipped; 0 for none."""

    def __init__(self, spike: float, device: torch.device) -> None:
        self._spike, self._device = spike, device
        self.skipped = torch.zeros((), device=device)
        self.load_norm_average(NormAverage())

    def load_norm_average(self, average: NormAverage) -> None:
        self._norm = torch.tensor(average.norm, device=self._device)
        self._steps = torch.tensor(float(average.steps), device=self._device)
        self.skipped_in_a_row = torch.zeros((), device=self._device)

    def skips(self) -> tuple[int, int]:
        """Steps that were skipped, in all and in a row."""
        return int(self.skipped), int(self.skipped_in_a_row)

    def load_skips(self, skipped: int, in_a_row: int) -> None:
        self.skipped = torch.tensor(float(skipped), device=self._device)
        self.skipped_in_a_row = torch.tensor(float(in_a_row), device=self._device)

    def norm_average(self) -> NormAverage:
        return NormAverage(norm=self._norm.item(), steps=int(self._steps))

    def must_skip(self, loss: Tensor, norm: Tensor, *, may_overflow: bool) -> Tensor:
        """1.0 if the step must be skipped, else 0.0.

        `may_overflow`: with fp16 an infinite norm means that the loss scale is too large.
        """
        skip = ~loss.isfinite()
        if not may_overflow:
            skip = skip | ~norm.isfinite()
        if self._spike > 0:
            skip = skip | ((norm > self._spike * self._norm) & (self._steps >= WARMUP_STEPS))
        steps = self._steps + 1
        weight = 1 / steps.clamp(max=AVERAGED_STEPS)
        counts = ~skip & norm.isfinite()
        average = torch.lerp(self._norm, norm.float(), weight)
        self._norm = torch.where(counts, average, self._norm)
        self._steps = torch.where(counts, steps, self._steps)
        self.skipped_in_a_row = (self.skipped_in_a_row + 1) * skip
        self.skipped = self.skipped + skip
        return skip.float()
