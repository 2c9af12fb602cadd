"""Cross-entropy over a large vocabulary without ever holding tokens × vocabulary.

The gradient of a softmax cross-entropy needs nothing from later layers but one scalar, so each
chunk of tokens makes its logits, its loss and its gradients at once and lets the logits go. The
backward pass only multiplies by that scalar. Peak memory beyond inputs and gradients is
chunk × vocabulary, whatever the sequence length.

Where the weight is sharded over ranks by rows of the vocabulary, each rank makes its own columns of
the logits; the softmax needs three numbers per token from the others, the gradient of `hidden` a
sum.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor, Shard
from torch.nn.functional import linear

IGNORED = -100
CHUNK_ELEMENTS = 1 << 26
"""Logits held at once: 256 MiB in float32, enough rows for the products to run at full rate."""


def cross_entropy_sum(
    hidden: Tensor, weight: Tensor, targets: Tensor, *, chunk_elements: int = CHUNK_ELEMENTS
) -> Tensor:
    """Sum over valid tokens of −log softmax(hidden · weightᵀ)[target], a float32 scalar.

    hidden: (..., width); weight: (vocab, width); targets: integers (...), −100 where there is no
    loss. The product is taken in the autocast type where autocast is on, the softmax in float32
    (float64 for float64 inputs). A `weight` that is sharded by rows gives the same sum on every
    rank of its mesh; `hidden` that is sharded by tokens is gathered first.
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
    own, first, group = _own_rows(weight)
    rows = max(1, chunk_elements // own.shape[0])
    with torch.autocast(device, enabled=False):
        out: Tensor = _ChunkedCrossEntropy.apply(  # type: ignore[no-untyped-call]
            hidden.flatten(0, -2), own, targets.flatten(), rows, first, group
        )
    return out


def logits_of(hidden: Tensor, weight: Tensor) -> Tensor:
    """hidden (..., width) · weightᵀ: (..., vocab), whole on every rank of a sharded weight."""
    if isinstance(hidden, DTensor):
        hidden = hidden.full_tensor()
    own, _, group = _own_rows(weight)
    logits = linear(hidden, own)
    if group is None:
        return logits
    parts = [torch.empty_like(logits) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, logits.contiguous(), group=group)
    return torch.cat(parts, dim=-1)


def _own_rows(weight: Tensor) -> tuple[Tensor, int, dist.ProcessGroup | None]:
    """This rank's rows, the number of its first one, and the ranks that hold the others."""
    if not isinstance(weight, DTensor):
        return weight, 0, None
    assert weight.placements == (Shard(0),), f"the rows of the vocabulary, got {weight.placements}"
    mesh, own = weight.device_mesh, weight.to_local()
    assert own.shape[0] * mesh.size() == weight.shape[0]
    return own, own.shape[0] * mesh.get_local_rank(), mesh.get_group()


def _sharded_losses_and_delta(
    logits: Tensor, target: Tensor, first: int, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor]:
    """`_losses_and_delta` of logits (rows, own columns), of which `first` is the first column."""
    exact = torch.float64 if logits.dtype == torch.float64 else torch.float32
    x = logits.to(exact)
    top = x.amax(-1, keepdim=True)
    dist.all_reduce(top, op=dist.ReduceOp.MAX, group=group)
    picked = target[:, None] - first
    is_own = (picked >= 0) & (picked < x.shape[1])
    picked = picked.clamp(0, x.shape[1] - 1)
    sums = torch.cat([(x - top).exp().sum(-1, keepdim=True), x.gather(1, picked) * is_own], dim=1)
    dist.all_reduce(sums, group=group)
    log_total = top + sums[:, :1].log()
    at_target = sums[:, 1:] - log_total
    delta = (x - log_total).exp()
    delta.scatter_(1, picked, torch.where(is_own, at_target.expm1(), delta.gather(1, picked)))
    return -at_target, delta.to(logits.dtype)


def _losses_and_delta(logits: Tensor, target: Tensor, wants_delta: bool) -> tuple[Tensor, Tensor]:
    """−log p of each target (rows, 1), and d loss / d logits = p − one-hot in the logits' type.

    At the target p − 1 is taken by expm1: rounding p first would lose it where p is near 1.
    """
    exact = torch.float64 if logits.dtype == torch.float64 else torch.float32
    picked = target.clamp(min=0)[:, None]
    log_p = logits.log_softmax(-1, dtype=exact)  # (rows, vocab)
    at_target = log_p.gather(1, picked)
    if wants_delta:
        torch.exp(log_p, out=logits)
        logits.scatter_(1, picked, at_target.expm1().to(logits.dtype))
    return -at_target, logits


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        rows: int,
        first: int,
        group: dist.ProcessGroup | None,
    ) -> Tensor:
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        exact = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        grad_hidden = torch.empty_like(hidden) if wants_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=exact) if wants_weight else None
        total = hidden.new_zeros((), dtype=exact)
        for start in range(0, len(hidden), rows):
            h, target = hidden[start : start + rows], targets[start : start + rows]
            valid = (target != IGNORED)[:, None]  # (rows, 1)
            if group is None:
                wants_delta = wants_hidden or wants_weight
                losses, delta = _losses_and_delta(h @ weight.T, target, wants_delta)
            else:
                losses, delta = _sharded_losses_and_delta(h @ weight.T, target, first, group)
            total += (losses * valid).sum()
            if grad_hidden is not None:
                grad_hidden[start : start + rows] = (delta @ weight).mul_(valid)
            if grad_weight is not None:
                grad_weight += delta.T @ (h * valid)
            del delta  # before the next chunk makes its own
        if grad_hidden is not None and group is not None:
            dist.all_reduce(grad_hidden, group=group)
        ctx.save_for_backward(grad_hidden, grad_weight)
        ctx.weight_dtype = weight.dtype
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden, grad_weight = ctx.saved_tensors
        # In place, for memory, unless the graph is kept for another pass. (A second pass over a
        # graph that was not kept is refused by autograd's version check.)
        is_kept = torch._C._autograd._get_current_graph_task_keep_graph()
        times = Tensor.mul if is_kept else Tensor.mul_
        return (
            None if grad_hidden is None else times(grad_hidden, grad),
            None if grad_weight is None else times(grad_weight, grad).to(ctx.weight_dtype),
            *[None] * 4,
        )
