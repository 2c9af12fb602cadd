"""AdamW, with its moments in 32 bits or in 8, and their way to and from a checkpoint.

A checkpoint holds 32-bit moments whatever the optimizer, so that a run can go on with either. Eight
bits (torchao) are a code per value and a scale per 256 of them; tensors of fewer than 4,096 values
on a rank stay in 32 bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from longspan.config import Train
from longspan.errors import UserError
from longspan.models import Decoder
from longspan.parallel.placement import laid_out, local


def build_optimizer(model: Decoder, train: Train) -> torch.optim.Optimizer:
    """The run's optimizer; matrices decay, norms do not."""
    # DeepSpeed's ZeRO-3 keeps a parameter's shape beside it, and of its values a flat part.
    dims = [(len(getattr(p, "ds_shape", p.shape)), p) for p in model.parameters()]
    groups = [
        {"params": [p for dim, p in dims if dim > 1], "weight_decay": train.weight_decay},
        {"params": [p for dim, p in dims if dim == 1], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    options: dict[str, Any] = {
        "lr": train.peak_lr,
        "betas": (train.beta1, train.beta2),
        "eps": train.eps,
    }
    if train.optimizer == "adamw":
        return torch.optim.AdamW(groups, **options, fused=True)
    try:
        from torchao.optim import AdamW8bit
    except ImportError as error:
        raise UserError(
            'train.optimizer = "adamw8bit" needs torchao: pip install "longspan[torchao]"'
        ) from error
    eight_bits: torch.optim.Optimizer = AdamW8bit(groups, **options)
    return eight_bits


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(lr)
        else:
            group["lr"] = lr


def take_step(optimizer: torch.optim.Optimizer, is_bad: Tensor) -> None:
    """Step unless `is_bad` is 1.0: a fused optimizer finds that out on the device."""
    if isinstance(optimizer, torch.optim.AdamW):
        optimizer.found_inf = is_bad  # type: ignore[attr-defined]
        optimizer.step()
    elif not is_bad:
        optimizer.step()


def moments(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> Iterator[tuple[str, Any]]:
    """What the optimizer keeps of a parameter, in 32 bits, laid out as the parameter is."""
    for key, value in optimizer.state[parameter].items():
        own = value.to_local() if isinstance(value, DTensor) else value
        if type(own) is Tensor:
            yield key, value
        elif isinstance(value, DTensor):
            shape, stride = value.shape, value.stride()
            mesh, placements = value.device_mesh, value.placements
            exact = own.dequantize()
            yield key, DTensor.from_local(exact, mesh, placements, shape=shape, stride=stride)
        else:
            yield key, own.dequantize()


def load_moment(
    optimizer: torch.optim.Optimizer, parameter: nn.Parameter, key: str, value: Tensor
) -> None:
    """The reverse of `moments`, for one of them: this rank's part of it."""
    if value.dim() == 0:  # a fused optimizer keeps its step counter beside the parameter
        is_fused = isinstance(optimizer, torch.optim.AdamW)
        optimizer.state[parameter][key] = value.to(parameter.device if is_fused else "cpu")
        return
    placed = laid_out(value, parameter)
    if not isinstance(optimizer, torch.optim.AdamW):
        exact = local(placed)
        placed = optimizer._new_buffer(parameter, signed=key == "exp_avg")  # type: ignore[attr-defined]
        _fill(local(placed), exact)
    optimizer.state[parameter][key] = placed


def _fill(own: Any, exact: Tensor) -> None:
    """Put values into a tensor of eight bits, or of 32, so that values which were eight bits before
    get the same codes again, and their scales to within rounding.

    torchao would scale a block by its largest magnitude. But the codes reach from −0.993 to 1: a
    block whose largest is negative would shrink each time.
    """
    own.copy_(exact)
    if type(own) is Tensor:
        return
    from torchao.optim.quant_utils import quantize_8bit_with_qmap

    blocks = exact.view(-1, own.block_size)
    ends = [blocks.amax(1) / own.qmap[-1]]
    if own.signed:
        ends.append(blocks.amin(1) / own.qmap[0])
    own.scale.copy_(torch.stack(ends).amax(0).clamp(min=1e-12))
    codes = quantize_8bit_with_qmap(blocks / own.scale[:, None], own.qmap)
    own.codes.copy_(codes.view(own.codes.shape))
