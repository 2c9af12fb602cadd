"""Muon for the matrices of blocks, and AdamW for the rest.

Muon (Jordan et al. 2024) replaces the momentum of a matrix by the nearest matrix with orthogonal
rows or columns, found by Newton-Schulz iterations. Its update is scaled by 0.2 · √max(shape), which
gives it about the RMS of AdamW's updates (Liu et al. 2025), so that learning rate and weight decay
are those of AdamW. Embedding, head, norms and biases are updated by AdamW.

The iteration needs the whole matrix. Of a sharded one every rank gathers the momentum, iterates
over the same values, and keeps its shard of the result: all layouts take the same step.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from longspan.constants import MUON_ITERATIONS
from longspan.parallel.dtensor import distribute_like, from_local_like, to_local

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the odd polynomial of degree five whose iteration brings singular values near 1 fastest."""
RMS = 0.2
"""Root mean square of AdamW's usual updates, as a fraction of the learning rate."""
MOMENTUM = "momentum"
"""The optimizer state of a matrix."""


def is_matrix(name: str, shape: tuple[int, ...]) -> bool:
    """Whether Muon updates the parameter `name` (blocks.3.mlp.up.weight) of the decoder."""
    return name.startswith("blocks.") and name.endswith(".weight") and len(shape) == 2


class Muon(torch.optim.Optimizer):
    """Updates `matrices` by Muon and the groups of `others` by AdamW with `options`."""

    def __init__(
        self,
        matrices: Iterable[nn.Parameter],
        others: Iterable[dict[str, Any]],
        *,
        momentum: float,
        weight_decay: float,
        **options: Any,
    ) -> None:
        self._adamw = torch.optim.AdamW(others, **options, fused=True)
        group = {"params": list(matrices), "weight_decay": weight_decay, MOMENTUM: momentum}
        super().__init__([group], self._adamw.defaults)
        self.param_groups += self._adamw.param_groups
        self.state = self._adamw.state

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Take a step, unless `found_inf` is 1.0: that is read on the device, without a sync."""
        assert closure is None
        found_inf: Tensor | None = getattr(self, "found_inf", None)
        self._adamw.found_inf = found_inf  # type: ignore[attr-defined]
        self._adamw.step()
        group = self.param_groups[0]
        for parameter in group["params"]:
            if parameter.grad is not None:
                self._step(parameter, group, found_inf)

    def _step(self, parameter: nn.Parameter, group: dict[str, Any], skip: Tensor | None) -> None:
        assert parameter.grad is not None
        state = self.state[parameter]
        if MOMENTUM not in state:
            state[MOMENTUM] = torch.zeros_like(parameter)
        weight, gradient, average = (
            to_local(x) for x in (parameter, parameter.grad, state[MOMENTUM])
        )
        new_average = average.lerp(gradient, 1 - group[MOMENTUM])
        full = gradient.lerp(new_average, group[MOMENTUM])  # Nesterov's
        if isinstance(parameter, DTensor):
            gathered = from_local_like(full, parameter)
            assert isinstance(gathered, DTensor)
            full = gathered.full_tensor()
        update = to_local(distribute_like(orthogonal(full), parameter))
        lr, size = group["lr"], RMS * math.sqrt(max(parameter.shape))
        new_weight = weight * (1 - lr * group["weight_decay"]) - lr * size * update
        if skip is not None:
            must_skip = skip.to(weight.device) != 0
            new_average = average.where(must_skip, new_average)
            new_weight = weight.where(must_skip, new_weight)
        average.copy_(new_average)
        weight.copy_(new_weight)


def orthogonal(matrix: Tensor) -> Tensor:
    """About the nearest matrix to `matrix` (rows, columns) whose singular values are all 1.

    They become 0.7 to 1.2, which trains as well. In bfloat16 on a GPU.
    """
    x = matrix.bfloat16() if matrix.is_cuda else matrix.float()
    is_tall = x.shape[0] > x.shape[1]
    x = x.T if is_tall else x
    x = x / x.norm().clamp(min=1e-7)
    a, b, c = COEFFICIENTS
    for _ in range(MUON_ITERATIONS):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    found: Tensor = x.T if is_tall else x
    return found.to(matrix.dtype)
