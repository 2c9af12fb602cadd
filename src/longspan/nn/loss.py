"""Chunked (fused) linear cross-entropy: the full tokens × vocabulary logits never exist.

The gradient of a softmax cross-entropy needs only one scalar from later layers, so each chunk of
tokens computes its logits, its loss and its gradients at once and frees the logits. The backward
pass only multiplies by that scalar. Peak memory beyond inputs and gradients is chunk × vocabulary,
whatever the sequence length.

If the weight is sharded over ranks by rows of the vocabulary, each rank computes its columns of the
logits. The softmax then all-reduces three elements per token, and the gradient of `hidden` is
all-reduced once.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn.functional import linear

from longspan.constants import IGNORE_INDEX, KERNEL_LOSS_CHUNK, LOSS_CHUNK
from longspan.dtypes import accumulation_dtype
from longspan.torch_internals import keeps_graph

HAS_TRITON = find_spec("triton") is not None


def cross_entropy_sum(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    z_loss: float = 0.0,
    chunk_elements: int | None = None,
) -> Tensor:
    """Sum over valid tokens of −log softmax(hidden · weightᵀ)[target], a float32 scalar.

    hidden: (..., width); weight: (vocab, width); targets: integers (...), −100 for tokens to
    ignore. The product is computed in the autocast dtype if autocast is enabled, the softmax in
    float32 (float64 for float64 inputs). A `weight` sharded by rows gives the same sum on every
    rank of its mesh; a `hidden` sharded by tokens is gathered first.

    The gradient is that of Σ −log p[target] + z_loss · log²Z, where Z is the denominator of a
    token's softmax; the value is the cross-entropy alone.
    """
    if hidden.shape[:-1] != targets.shape or hidden.shape[-1] != weight.shape[-1]:
        raise ValueError(
            "expected hidden (..., width), weight (vocab, width) and targets (...), got "
            f"{tuple(hidden.shape)}, {tuple(weight.shape)} and {tuple(targets.shape)}"
        )
    if isinstance(hidden, DTensor):
        hidden = hidden.full_tensor()
    device = hidden.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        hidden, weight = hidden.to(dtype), weight.to(dtype)
    local, first_row, group = _local_rows(weight)
    if chunk_elements is None:
        chunk_elements = LOSS_CHUNK if group or not has_kernel(hidden) else KERNEL_LOSS_CHUNK
    chunk = max(1, chunk_elements // local.shape[0])
    with torch.autocast(device, enabled=False):
        out: Tensor = _ChunkedCrossEntropy.apply(  # type: ignore[no-untyped-call]
            hidden.flatten(0, -2), local, targets.flatten(), chunk, first_row, group, z_loss
        )
    return out


def logits_of(hidden: Tensor, weight: Tensor) -> Tensor:
    """hidden (..., width) · weightᵀ: (..., vocab), gathered if `weight` is sharded by rows."""
    if isinstance(hidden, DTensor):
        hidden = hidden.full_tensor()
    if isinstance(weight, DTensor):
        # As a DTensor, so that the gradients of all ranks' columns are all-reduced into `hidden`.
        hidden = DTensor.from_local(hidden, weight.device_mesh, [Replicate()])
    logits = linear(hidden, weight)
    return logits.full_tensor() if isinstance(logits, DTensor) else logits


def _local_rows(weight: Tensor) -> tuple[Tensor, int, dist.ProcessGroup | None]:
    """The local rows, the index of the first one, and the group over which rows are sharded."""
    if not isinstance(weight, DTensor):
        return weight, 0, None
    assert weight.placements == (Shard(0),), f"expected Shard(0), got {weight.placements}"
    mesh, local = weight.device_mesh, weight.to_local()
    assert local.shape[0] * mesh.size() == weight.shape[0]
    return local, local.shape[0] * mesh.get_local_rank(), mesh.get_group()


def _sharded_losses_and_dlogits(
    logits: Tensor, target: Tensor, z_loss: float, first_column: int, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor]:
    """`_losses_and_dlogits` for logits (tokens, local columns) that start at `first_column`."""
    is_ignored = (target == IGNORE_INDEX)[:, None]
    exact = accumulation_dtype(logits)
    x = logits.to(exact)
    # Fails for a target outside of the vocabulary, which no rank would find; takes no memory.
    vocabulary = x.new_zeros(()).expand(len(x), x.shape[1] * group.size())
    vocabulary.gather(1, target[:, None].masked_fill(is_ignored, 0))
    row_max = x.amax(-1, keepdim=True)
    dist.all_reduce(row_max, op=dist.ReduceOp.MAX, group=group)
    index = target[:, None] - first_column
    is_local = (index >= 0) & (index < x.shape[1])
    index = index.clamp(0, x.shape[1] - 1)
    sum_exp = (x - row_max).exp().sum(-1, keepdim=True)
    sums = torch.cat([sum_exp, x.gather(1, index) * is_local], dim=1)
    dist.all_reduce(sums, group=group)
    lse = row_max + sums[:, :1].log()
    target_log_p = sums[:, 1:] - lse
    dlogits = (x - lse.masked_fill(is_ignored, torch.inf)).exp()
    at_target = target_log_p.expm1()
    if z_loss:
        slope = 2 * z_loss * lse
        at_target = at_target + slope * target_log_p.exp()
        dlogits *= 1 + slope
    dlogits.scatter_(1, index, torch.where(is_local, at_target, dlogits.gather(1, index)))
    return -target_log_p.masked_fill(is_ignored, 0), dlogits.to(logits.dtype)


def _losses_and_dlogits(
    logits: Tensor, target: Tensor, z_loss: float, needs_grad: bool
) -> tuple[Tensor, Tensor]:
    """−log p of each target (tokens, 1), and d loss / d logits in the logits' dtype.

    That is p − one-hot, plus 2 · z_loss · log Z · p; both are 0 where there is no target. At the
    target, p − 1 is computed by expm1: rounding p first would lose it for p near 1.
    """
    if has_kernel(logits):
        from longspan.nn.loss_kernel import losses_and_dlogits

        return losses_and_dlogits(logits, target, z_loss, needs_grad)
    # Other negative targets must fail, not be taken for token 0.
    is_ignored = (target == IGNORE_INDEX)[:, None]
    index = target[:, None].masked_fill(is_ignored, 0)
    exact = accumulation_dtype(logits)
    log_p = logits.log_softmax(-1, dtype=exact)  # (tokens, vocab)
    target_log_p = log_p.gather(1, index)
    if needs_grad:
        at_target = target_log_p.expm1()
        if z_loss:
            slope = 2 * z_loss * (logits.gather(1, index) - target_log_p)
            at_target += slope * target_log_p.exp()
            logits.copy_(log_p.exp_().mul_(1 + slope))
        else:
            torch.exp(log_p, out=logits)
        logits.scatter_(1, index, at_target.to(logits.dtype))
        logits.masked_fill_(is_ignored, 0)
    return -target_log_p.masked_fill(is_ignored, 0), logits


def has_kernel(x: Tensor) -> bool:
    """Whether the softmax of logits like `x` is a Triton kernel."""
    return HAS_TRITON and x.is_cuda and x.dtype != torch.float64


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a · b, accumulated in the dtype of `total`."""
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    elif a.is_cuda:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total += a @ b


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        chunk: int,
        first_row: int,
        group: dist.ProcessGroup | None,
        z_loss: float,
    ) -> Tensor:
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        exact = accumulation_dtype(hidden)
        grad_hidden = torch.empty_like(hidden) if needs_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=exact) if needs_weight else None
        total = hidden.new_zeros((), dtype=exact)
        for start in range(0, len(hidden), chunk):
            h, target = hidden[start : start + chunk], targets[start : start + chunk]
            if group is None:
                needs_grad = needs_hidden or needs_weight
                losses, dlogits = _losses_and_dlogits(h @ weight.T, target, z_loss, needs_grad)
            else:
                losses, dlogits = _sharded_losses_and_dlogits(
                    h @ weight.T, target, z_loss, first_row, group
                )
            total += losses.sum()
            if grad_hidden is not None:
                torch.mm(dlogits, weight, out=grad_hidden[start : start + chunk])
            if grad_weight is not None:
                add_product(grad_weight, dlogits.T, h)
            del dlogits  # before the next chunk allocates its logits
        if grad_hidden is not None and group is not None:
            dist.all_reduce(grad_hidden, group=group)
        ctx.save_for_backward(grad_hidden, grad_weight)
        ctx.weight_dtype = weight.dtype
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden, grad_weight = ctx.saved_tensors
        # In place to save memory, unless retain_graph=True. (Autograd's version check refuses a
        # second backward pass without it.)
        retains_graph = keeps_graph()
        scale = Tensor.mul if retains_graph else Tensor.mul_
        return (
            None if grad_hidden is None else scale(grad_hidden, grad),
            None if grad_weight is None else scale(grad_weight, grad).to(ctx.weight_dtype),
            *[None] * 5,
        )
