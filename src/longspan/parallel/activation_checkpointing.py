"""Activation checkpointing (recomputation in the backward pass).

It changes no value: recomputation runs the same operators on the same inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    create_selective_checkpoint_contexts,
    noop_context_fn,
)

from longspan.torch_internals import (
    ALL_TO_ALL,
    ATTENTION_FORWARDS,
    FP8_PRODUCT,
    checkpoint_wrapper,
)

Context = AbstractContextManager[object]

PRODUCTS = {
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.bmm.default,
    FP8_PRODUCT,
    torch.ops.longspan.product_onto.default,
    torch.ops.longspan.tiled_mlp.default,  # of its products only the last one's output exists
}
ATTENTION = {
    torch.ops.longspan.branch_attention.default,
    torch.ops.longspan.packed_attention.default,
    *ATTENTION_FORWARDS,
}
"""The operators that cost most to recompute: "selective" saves the outputs of both."""

COMMUNICATION_OPS = {ALL_TO_ALL, torch.ops.longspan.ring_attention.default}
"""Saved under "full" as well, so that nothing is communicated twice."""


def checkpointed(
    block: nn.Module,
    mode: str,
    *,
    saves_attention: bool = True,
    communicates: bool = False,
    is_random: bool = False,
    keeps_buffers: bool = False,
) -> nn.Module:
    """`block`, wrapped for activation checkpointing: mode "none", "selective" or "full".

    `saves_attention`: false if its attention has many partial results, of which "selective" would
    save each;
    `communicates`: whether its forward pass runs collectives, whose results are then saved;
    `is_random`: whether it draws random numbers, as dropout does, which must be drawn again;
    `keeps_buffers`: whether its forward pass may change buffers, as batch normalisation does, which
    recomputation must not do a second time.
    """
    if mode == "none":
        return block
    saved: set[Any] = set()
    if mode == "selective":
        saved = PRODUCTS | ATTENTION if saves_attention else PRODUCTS
    if communicates:
        saved = saved | COMMUNICATION_OPS

    def policy(_context: Any, operator: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
        must_save = operator in saved
        return CheckpointPolicy.MUST_SAVE if must_save else CheckpointPolicy.PREFER_RECOMPUTE

    options: dict[str, Any] = {"preserve_rng_state": is_random}
    if saved:
        options["context_fn"] = partial(create_selective_checkpoint_contexts, policy)
    if keeps_buffers and any(True for _ in block.buffers()):
        contexts = options.get("context_fn", noop_context_fn)
        options["context_fn"] = partial(_contexts_that_keep_buffers, block, contexts)
    return checkpoint_wrapper(block, **options)


def _contexts_that_keep_buffers(
    block: nn.Module, contexts: Callable[[], tuple[Context, Context]]
) -> tuple[Context, Context]:
    forward, recomputation = contexts()
    return forward, _kept_buffers(block, recomputation)


@contextmanager
def _kept_buffers(block: nn.Module, context: Context) -> Iterator[None]:
    """`context`, after which the buffers of `block` are what they were before."""
    saved = [
        (module, name, buffer, buffer.clone())
        for module in block.modules()
        for name, buffer in module.named_buffers(recurse=False)
    ]
    try:
        with context:
            yield
    finally:
        for module, name, buffer, values in saved:
            buffer.data.copy_(values)  # .data: for autograd nothing has changed
            module._buffers[name] = buffer
