"""AdamW with 32-bit or 8-bit moments, or Muon, and their state to and from a checkpoint.

A checkpoint holds 32-bit moments whatever the optimizer, so that a run can resume with either.
8-bit moments (torchao) are a code per value and a scale per 256 values; tensors with fewer than
4,096 elements on a rank stay in 32 bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from longspan.config import Train
from longspan.engines.average import EMA, track_average
from longspan.engines.deepspeed_internals import full_dims
from longspan.engines.muon import MOMENTUM, Muon, is_matrix
from longspan.errors import UserError
from longspan.parallel.dtensor import from_local_like, to_local
from longspan.parallel.parameters import named_parameters

ADAMW_KEYS = {"exp_avg", "exp_avg_sq", "step"}
"""The state of AdamW for each parameter."""


def build_optimizer(model: nn.Module, train: Train) -> torch.optim.Optimizer:
    """The run's optimizer, which also averages weights if the run does.

    Weight decay applies to matrices, not to norms and biases.
    """
    optimizer = _build(model, train)
    if train.ema:
        track_average(optimizer, train.ema)
    return optimizer


def _build(model: nn.Module, train: Train) -> torch.optim.Optimizer:
    kinds: dict[tuple[bool, bool], list[nn.Parameter]] = {}
    matrices: list[nn.Parameter] = []
    for name, p in named_parameters(model):
        if p.requires_grad and train.optimizer == "muon" and is_matrix(name, tuple(p.shape)):
            matrices.append(p)
        elif p.requires_grad:
            # Fused kernels take no plain tensors beside DTensors: under tensor parallelism some
            # norms are split, others are not.
            kinds.setdefault((full_dims(p) > 1, isinstance(p, DTensor)), []).append(p)
    groups = [
        {"params": parameters, "weight_decay": train.weight_decay if is_matrix else 0.0}
        for (is_matrix, _), parameters in sorted(kinds.items(), reverse=True)
    ]
    groups = groups or [{"params": []}]  # of a pipeline stage that is frozen
    options: dict[str, Any] = {
        "lr": train.peak_lr,
        "betas": (train.beta1, train.beta2),
        "eps": train.eps,
    }
    if train.optimizer == "muon":
        decay = train.weight_decay
        return Muon(matrices, groups, momentum=train.momentum, weight_decay=decay, **options)
    if train.optimizer == "adamw":
        return torch.optim.AdamW(groups, **options, fused=True)
    try:
        from longspan.engines.eight_bit import EightBitAdamW
    except ImportError as error:
        raise UserError(
            'train.optimizer = "adamw8bit" needs torchao: pip install "longspan[torchao]"'
        ) from error
    eight_bits: torch.optim.Optimizer = EightBitAdamW(
        groups, is_rounded=train.parameter_precision == "bf16", **options
    )
    return eight_bits


def state_keys(optimizer: torch.optim.Optimizer, name: str, shape: tuple[int, ...]) -> set[str]:
    """The kinds of state that the run's optimizer keeps for a parameter of the decoder."""
    is_momentum = isinstance(optimizer, Muon) and is_matrix(name, shape)
    return {MOMENTUM} if is_momentum else set(ADAMW_KEYS)


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(lr)
        else:
            group["lr"] = lr


def step_unless(skip: Tensor, optimizer: torch.optim.Optimizer) -> None:
    """Step unless `skip` is 1.0: a fused optimizer reads it on the device, without a sync.

    Parameters that are offloaded to CPU are updated there.
    """
    if _is_fused(optimizer):
        parameters = (p for group in optimizer.param_groups for p in group["params"])
        if (first := next(parameters, None)) is not None:
            optimizer.found_inf = skip.to(first.device)  # type: ignore[attr-defined]
            optimizer.step()
    elif not skip:
        optimizer.step()


def optimizer_state(
    optimizer: torch.optim.Optimizer, parameter: nn.Parameter
) -> Iterator[tuple[str, Any]]:
    """The optimizer state of a parameter in 32 bits, with the parameter's placements."""
    for key, value in optimizer.state.get(parameter, {}).items():
        if value is None:  # such as the momentum of an SGD without any
            continue
        if not isinstance(value, Tensor) or value.shape not in (torch.Size(), parameter.shape):
            raise UserError(
                f"{type(optimizer).__name__} keeps {key} of {_kind(value)} for a parameter of "
                f"shape {tuple(parameter.shape)}; a checkpoint takes tensors of that shape, or "
                "scalars"
            )
        shard = value.to_local() if isinstance(value, DTensor) else value
        if type(shard) is Tensor:
            yield key, value
        elif isinstance(value, DTensor):
            shape, stride = value.shape, value.stride()
            mesh, placements = value.device_mesh, value.placements
            values = shard.dequantize()
            yield key, DTensor.from_local(values, mesh, placements, shape=shape, stride=stride)
        else:
            yield key, shard.dequantize()


def load_optimizer_tensor(
    optimizer: torch.optim.Optimizer, parameter: nn.Parameter, key: str, value: Tensor
) -> None:
    """Load one entry of a parameter's optimizer state from this rank's shard of it."""
    if value.dim() == 0 and (parameter.dim() > 0 or key == "step"):
        # A fused optimizer keeps its step counter on the parameter's device.
        device = parameter.device if _is_fused(optimizer) else "cpu"
        optimizer.state[parameter][key] = value.to(device)
        return
    state = from_local_like(value, parameter)
    if hasattr(optimizer, "_new_buffer") and key != EMA:  # torchao's
        values = to_local(state)
        state = optimizer._new_buffer(parameter, signed=key == "exp_avg")
        _quantize_into(to_local(state), values)
    optimizer.state[parameter][key] = state


def _is_fused(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it reads on the device whether to skip a step, and counts steps there."""
    return bool(optimizer.defaults.get("fused"))


def _kind(value: object) -> str:
    return f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"type {type(value)}"


def _quantize_into(state: Any, values: Tensor) -> None:
    """Copy values into an 8-bit (or 32-bit) tensor, such that values which were quantized before
    get the same codes again, and their scales to within rounding.

    torchao would scale a block by its largest magnitude. But the codes reach from −0.993 to 1: a
    block whose largest value is negative would shrink each time.
    """
    state.copy_(values)
    if type(state) is Tensor:
        return
    from torchao.optim.quant_utils import quantize_8bit_with_qmap

    blocks = values.view(-1, state.block_size)
    ends = [blocks.amax(1) / state.qmap[-1]]
    if state.signed:
        ends.append(blocks.amin(1) / state.qmap[0])
    state.scale.copy_(torch.stack(ends).amax(0).clamp(min=1e-12))
    codes = quantize_8bit_with_qmap(blocks / state.scale[:, None], state.qmap)
    state.codes.copy_(codes.view(state.codes.shape))
