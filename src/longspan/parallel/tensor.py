"""Tensor parallel: every matrix split over the ranks of one axis, two sums per block.

Queries, keys, values and the MLP's two inner products are split by columns, so that each rank has
some heads and some of the MLP's width; the products that end in the residual stream by rows, and
their outputs are summed. The embedding and the head are split by rows of the vocabulary, and the
loss is taken from the parts (`nn/loss.py`). Norms are on every rank.
"""

from __future__ import annotations

from dataclasses import replace

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)

from longspan.attention import Dilated
from longspan.models.decoder import Decoder, SelfAttention


def _shared_input(*layouts: Replicate | None) -> PrepareModuleInput:
    return PrepareModuleInput(
        input_layouts=layouts, desired_input_layouts=layouts, use_local_output=False
    )


def split_by_tensor(model: Decoder, mesh: DeviceMesh) -> None:
    """Split `model`'s weights over the ranks of the one-dimensional `mesh`, in place."""
    plan: dict[str, ParallelStyle] = {"embedding": RowwiseParallel(input_layouts=Replicate())}
    if model.head is not None:
        plan["head"] = ColwiseParallel()
    for index, block in enumerate(model.blocks):
        for name in ("attention.query", "attention.key", "attention.value", "mlp.gate", "mlp.up"):
            plan[f"blocks.{index}.{name}"] = ColwiseParallel()
        for name in ("attention.out", "mlp.down"):
            plan[f"blocks.{index}.{name}"] = RowwiseParallel()
        # One input for several products, so that its gradient is summed over ranks once.
        plan[f"blocks.{index}.attention"] = _shared_input(Replicate(), None, None)
        plan[f"blocks.{index}.mlp"] = _shared_input(Replicate())
        attention = block.attention
        assert isinstance(attention, SelfAttention)
        heads = attention.query.out_features // attention.head_dim // mesh.size()
        if isinstance(attention.pattern, Dilated):
            first = heads * mesh.get_local_rank()
            attention.pattern = replace(attention.pattern, first_head=first)
    parallelize_module(model, mesh, plan)
