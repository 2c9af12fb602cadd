"""The exponential moving average (EMA) of weights, as one more state of the optimizer.

So it is sharded, offloaded, saved and restored as Adam's moments are. It starts as the weights
after the first step.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from longspan.parallel.dtensor import to_local

EMA = "ema"
"""The kind of optimizer state."""


def track_average(optimizer: torch.optim.Optimizer, decay: float) -> None:
    """Have every step of `optimizer` update the averages: decay · average + (1 − decay) · weight.

    A step that is skipped, as `found_inf` says on the device, leaves them.
    """

    @torch.no_grad()
    def update(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        found_inf: Tensor | None = getattr(optimizer, "found_inf", None)
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                state = optimizer.state.get(parameter)
                if not state:  # the optimizer has not seen its gradient
                    continue
                if EMA not in state:
                    state[EMA] = parameter.detach().to(torch.float32, copy=True)
                    continue
                average = to_local(state[EMA])
                weight = to_local(parameter).to(average.dtype)
                if found_inf is None:
                    average.lerp_(weight, 1 - decay)
                else:
                    share = (1 - decay) * (1 - found_inf.to(average.device, average.dtype))
                    average.lerp_(weight, share)

    optimizer.register_step_post_hook(update)
    optimizer.defaults[EMA] = decay


def has_average(optimizer: torch.optim.Optimizer) -> bool:
    return EMA in optimizer.defaults
