"""AdamW with moments in 8 bits: torchao's state and arithmetic, in steps of our own.

torchao passes its tensor subclasses through torch.compile, of which each parameter costs the host
half a millisecond, while the device waits. This computes the same on plain tensors, and reads on
the device whether to skip the step, so that the host can launch it ahead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torchao.optim import AdamW8bit
from torchao.optim.quant_utils import (
    _fp32_to_bf16_sr,
    dequant_with_qmap,
    quantize_8bit_with_qmap,
    scale_tensor,
)

from longspan.parallel.dtensor import to_local
from longspan.torch_internals import raise_recompile_limit

Moment = tuple[Tensor, ...]
"""Codes, a scale per block, and the values of codes; or for small tensors the moment itself."""


class EightBitAdamW(AdamW8bit):  # type: ignore[misc, unused-ignore]
    """With `is_rounded`, bf16 parameters are rounded up or down at random, such that the mean is
    exact.
    """

    def __init__(
        self, groups: Iterable[dict[str, Any]], *, is_rounded: bool, **options: Any
    ) -> None:
        super().__init__(groups, **options, bf16_stochastic_round=is_rounded)
        self.defaults["fused"] = True  # `found_inf` is read, and steps counted, on the device

    @staticmethod
    def _subclass_zeros(p: Tensor, signed: bool, block_size: int) -> Any:
        """The smallest code of a second moment is not 0: beside a far larger one in its block,
        that would divide the first moment by `eps`, and a weight would jump.
        """
        state = AdamW8bit._subclass_zeros(p, signed, block_size)
        if not signed:
            state.qmap[0] = state.qmap[1] / 2
        return state

    def _new_buffer(self, p: Tensor, signed: bool) -> Any:
        """Moments like those of a float32 parameter, whose small tensors are not quantized."""
        like = torch.empty_like(p, dtype=torch.float32) if self.bf16_stochastic_round else p
        return super()._new_buffer(like, signed)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Take a step, unless `found_inf` is 1.0."""
        assert closure is None
        found_inf: Tensor | None = getattr(self, "found_inf", None)
        raise_recompile_limit(sum(len(group["params"]) for group in self.param_groups))
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step(parameter, group, found_inf)

    def _step(self, parameter: nn.Parameter, group: dict[str, Any], skip: Tensor | None) -> None:
        assert parameter.grad is not None
        state = self.state[parameter]
        if "step" not in state:
            state["step"] = torch.zeros((), device=parameter.device)
            state["exp_avg"] = self._new_buffer(parameter, True)
            state["exp_avg_sq"] = self._new_buffer(parameter, False)
        weight, gradient, first, second = (
            to_local(x)
            for x in (parameter.detach(), parameter.grad, state["exp_avg"], state["exp_avg_sq"])
        )
        if skip is None:
            skip = torch.zeros_like(state["step"])
        is_rounded = self.bf16_stochastic_round and weight.dtype == torch.bfloat16
        _compiled_update()(
            weight, gradient, state["step"], skip.to(weight.device), _parts(first), _parts(second),
            group["lr"], *group["betas"], group["weight_decay"], group["eps"], is_rounded,
        )  # fmt: skip


def _parts(state: Any) -> Moment:
    return (state,) if type(state) is Tensor else (state.codes, state.scale, state.qmap)


@cache
def _compiled_update() -> Callable[..., None]:
    return torch.compile(_update, fullgraph=True, dynamic=False)


def _update(
    weight: Tensor, gradient: Tensor, step: Tensor, skip: Tensor, first: Moment, second: Moment,
    lr: Tensor, beta1: float, beta2: float, weight_decay: float, eps: float, is_rounded: bool,
) -> None:  # fmt: skip
    """AdamW in float32, in place; with `skip` = 1.0 everything stays as it is."""
    must_skip, count = skip != 0, step + 1
    exact, gradient = weight.float(), gradient.float()
    average = _values(first).lerp(gradient, 1 - beta1)
    square = _values(second).lerp(gradient.square(), 1 - beta2)
    denominator = square.sqrt() / (1 - beta2**count).sqrt() + eps
    exact = exact - lr * weight_decay * exact
    exact = exact - lr * (average / (1 - beta1**count)) / denominator
    new = _fp32_to_bf16_sr(exact) if is_rounded else exact.to(weight.dtype)
    weight.copy_(weight.where(must_skip, new))
    _store(first, average, must_skip)
    _store(second, square, must_skip)
    step.add_(1 - skip)


def _values(moment: Moment) -> Tensor:
    if len(moment) == 1:
        return moment[0]
    codes, scale, values = moment
    found: Tensor = dequant_with_qmap(codes, values, scale)
    return found


def _store(moment: Moment, new: Tensor, must_skip: Tensor) -> None:
    if len(moment) == 1:
        moment[0].copy_(moment[0].where(must_skip, new))
        return
    codes, scale, values = moment
    scaled, new_scale = scale_tensor(new, codes.numel() // scale.numel())
    codes.copy_(codes.where(must_skip, quantize_8bit_with_qmap(scaled, values)))
    scale.copy_(scale.where(must_skip, new_scale))
