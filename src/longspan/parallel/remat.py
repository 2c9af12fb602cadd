"""Activations that are not kept: computed again in the backward pass, or kept in the CPU's memory.

Neither changes a number: what is computed again is computed by the same operators from the same
inputs.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from longspan.config import Train

KEPT = {
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.bmm.default,
    torch.ops.longspan.branch_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
}
"""What costs most to compute and is kept under "selective"."""


def rematerialised(block: nn.Module, train: Train) -> nn.Module:
    """`block`, forgetting its activations as `train.remat` says."""
    if train.remat == "none":
        return block
    options: dict[str, Any] = {"preserve_rng_state": False}
    if train.remat == "selective":
        options["context_fn"] = partial(create_selective_checkpoint_contexts, _policy)
    return checkpoint_wrapper(block, **options)


def _policy(_context: Any, operator: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    is_kept = operator in KEPT
    return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE


def offloaded(train: Train) -> AbstractContextManager[object]:
    """Around a forward pass: keep its activations where `train.offload_activations` says."""
    if not train.offload_activations:
        return nullcontext()
    return torch.autograd.graph.save_on_cpu(pin_memory=train.device == "cuda")
