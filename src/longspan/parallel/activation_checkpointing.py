"""Activations that are not kept: computed again in the backward pass, or kept in the CPU's memory.

Neither changes a number: what is computed again is computed by the same operators from the same
inputs.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from longspan.config import Train

KEPT = {
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.bmm.default,
    torch.ops.longspan.branch_attention.default,
    torch.ops.aten._flash_attention_forward.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
}
"""What costs most to compute and is kept under "selective"."""


TRAVELLED = {
    torch.ops._c10d_functional.all_to_all_single.default,
    torch.ops.longspan.ring_attention.default,
}
"""What came from other ranks, and is kept under "full" as well: it need not travel twice."""


def rematerialised(block: nn.Module, train: Train, *, travels: bool = False) -> nn.Module:
    """`block`, forgetting its activations as `train.activation_checkpointing` says.

    `travels`: whether it tells other ranks something on the way forward.
    """
    if train.activation_checkpointing == "none":
        return block
    kept = (KEPT if train.activation_checkpointing == "selective" else set()) | (
        TRAVELLED if travels else set()
    )

    def policy(_context: Any, operator: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
        is_kept = operator in kept
        return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE

    options: dict[str, Any] = {"preserve_rng_state": False}
    if kept:
        options["context_fn"] = partial(create_selective_checkpoint_contexts, policy)
    return checkpoint_wrapper(block, **options)


def offloaded(train: Train) -> AbstractContextManager[object]:
    """Around a forward pass: keep its activations where `train.offload_activations` says."""
    if not train.offload_activations:
        return nullcontext()
    return torch.autograd.graph.saved_tensors_hooks(_to_cpu, _from_cpu)


class _Waiting(NamedTuple):
    """A tensor in the CPU's memory, where it was, and how it was split over ranks if it was."""

    values: Tensor
    device: torch.device
    split: dict[str, Any] | None


def _to_cpu(x: Tensor) -> Tensor | _Waiting:
    if x.is_leaf and x.requires_grad:
        return x  # a weight, which stays
    own, split = x, None
    if isinstance(x, DTensor):
        own = x.to_local()
        split = {
            "device_mesh": x.device_mesh,
            "placements": x.placements,
            "shape": x.shape,
            "stride": x.stride(),
        }
    values = torch.empty(own.shape, dtype=own.dtype, pin_memory=own.is_cuda).copy_(own)
    return _Waiting(values, own.device, split)


def _from_cpu(kept: Tensor | _Waiting) -> Tensor:
    if isinstance(kept, Tensor):
        return kept
    own = kept.values.to(kept.device, non_blocking=True)
    return own if kept.split is None else DTensor.from_local(own, **kept.split)
