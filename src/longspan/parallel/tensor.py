"""Tensor parallel: every matrix split over the ranks of one axis, two sums per block.

Queries, keys, values and the MLP's two inner products are split by columns, so that each rank has
some heads and some of the MLP's width; the products that end in the residual stream by rows, and
their outputs are summed. The embedding and the head are split by rows of the vocabulary, and the
loss is taken from the parts (`nn/loss.py`). Norms are on every rank.
"""

from __future__ import annotations

from dataclasses import replace

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from longspan.attention import Dilated
from longspan.models.decoder import Decoder, SelfAttention


def split_by_tensor(model: Decoder, mesh: DeviceMesh, *, split_norms: bool = False) -> None:
    """Split `model`'s weights over the ranks of the one-dimensional `mesh`, in place.

    With `split_norms` the residual stream is split by tokens, and norms are taken of the parts:
    what was one sum becomes a scatter of sums after a product and a gathering before the next,
    as many bytes in all, and activations between them take 1/ranks of the memory.
    """
    stream: Placement = Shard(1) if split_norms else Replicate()
    plan: dict[str, ParallelStyle] = {}
    # What is not there is on another rank of the pipeline.
    if hasattr(model, "embedding"):
        plan["embedding"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=stream)
    if split_norms and hasattr(model, "norm"):
        plan["norm"] = SequenceParallel()
    if model.head is not None:
        plan["head"] = ColwiseParallel()
    for index, block in enumerate(model.blocks):
        if isinstance(block, nn.Identity):
            continue
        for name in ("attention.query", "attention.key", "attention.value", "mlp.gate", "mlp.up"):
            plan[f"blocks.{index}.{name}"] = ColwiseParallel()
        for name in ("attention.out", "mlp.down"):
            plan[f"blocks.{index}.{name}"] = RowwiseParallel(output_layouts=stream)
        # One input for several products, so that its gradient is summed over ranks once.
        plan[f"blocks.{index}.attention"] = _shared_input(stream, 2)
        plan[f"blocks.{index}.mlp"] = _shared_input(stream, 0)
        if split_norms:
            for name in ("attention_norm", "mlp_norm"):
                plan[f"blocks.{index}.{name}"] = SequenceParallel(use_local_output=True)
        attention = block.attention
        assert isinstance(attention, SelfAttention)
        heads = attention.query.out_features // attention.head_dim // mesh.size()
        if isinstance(attention.pattern, Dilated):
            first = heads * mesh.get_local_rank()
            attention.pattern = replace(attention.pattern, first_head=first)
    parallelize_module(model, mesh, plan)


def _shared_input(stream: Placement, others: int) -> PrepareModuleInput:
    return PrepareModuleInput(
        input_layouts=(stream, *[None] * others),
        desired_input_layouts=(Replicate(), *[None] * others),
        use_local_output=False,
    )
