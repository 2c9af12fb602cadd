"""Steps that would harm the model are not taken.

A step is bad where its loss or gradient is no number or, if asked for, its gradient norm is many
times the usual one. Whether it is bad is known on the device alone: the optimizer reads it there,
and the host hears of it when it reads the loss.
"""

from __future__ import annotations

from typing import Annotated

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

USUAL_STEPS = 100
"""The usual norm is a mean over about as many steps…"""
LEAST_STEPS = 20
"""…of which so many must have been seen before a norm can stand out."""


class Usual(BaseModel):
    """What a checkpoint holds of it."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    norm: float = 0.0
    seen: Annotated[int, Field(ge=0)] = 0


class Guard:
    """`spike`: how many times the usual norm is too many; 0 for any that is a number."""

    def __init__(self, spike: float, device: torch.device) -> None:
        self._spike, self._device = spike, device
        self.skipped = torch.zeros((), device=device)
        self.set_usual(Usual())

    def set_usual(self, usual: Usual) -> None:
        """Go on from a checkpoint."""
        self._norm = torch.tensor(usual.norm, device=self._device)
        self._seen = torch.tensor(float(usual.seen), device=self._device)
        self.streak = torch.zeros((), device=self._device)
        """Bad steps in a row, to the last one."""

    def usual(self) -> Usual:
        return Usual(norm=self._norm.item(), seen=int(self._seen))

    def judge(self, loss: Tensor, norm: Tensor, *, overflows: bool) -> Tensor:
        """1.0 for a bad step, else 0.0; `overflows`: a norm may be infinite for another reason."""
        is_bad = ~loss.isfinite()
        if not overflows:
            is_bad = is_bad | ~norm.isfinite()
        if self._spike > 0:
            is_bad = is_bad | ((norm > self._spike * self._norm) & (self._seen >= LEAST_STEPS))
        seen = self._seen + 1
        weight = 1 / seen.clamp(max=USUAL_STEPS)
        is_good = ~is_bad & norm.isfinite()
        self._norm = torch.where(is_good, torch.lerp(self._norm, norm.float(), weight), self._norm)
        self._seen = torch.where(is_good, seen, self._seen)
        self.streak = (self.streak + 1) * is_bad
        self.skipped = self.skipped + is_bad
        return is_bad.float()
