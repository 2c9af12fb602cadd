"""Tensor parallel: every matrix split over the ranks of one axis, two sums per block.

Queries, keys, values and the MLP's two inner products are split by columns, so that each rank has
some heads and some of the MLP's width; the products that end in the residual stream by rows, and
their outputs are summed. The embedding and the head are split by rows of the vocabulary, and the
loss is taken from the parts (`nn/loss.py`). Norms are on every rank.

Where linear layers are sketched or of low rank, the residual stream and its norms are split by
features: such a layer takes a rank's own features and gives it its own, and sums only what lies
between its factors (`nn/sketched.py`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from longspan.attention import Dilated
from longspan.config import Run
from longspan.models.decoder import Block, Decoder
from longspan.nn import RMSNorm
from longspan.sketching.layers import FactoredLinear

Stream = Literal["whole", "tokens", "features"]
"""How the residual stream (batch, tokens, hidden) is split."""
PLACEMENTS: dict[Stream, Placement] = {
    "whole": Replicate(),
    "tokens": Shard(1),
    "features": Shard(2),
}


def stream_of(run: Run) -> Stream:
    """How the ranks of the tensor axis hold the residual stream."""
    if run.model.linear != "dense":
        return "features"
    return "tokens" if run.layout.megatron_sequence_parallel else "whole"


class ByFeatures(ParallelStyle):
    """Split a sketched or low-rank layer, or an RMSNorm, by features.

    Its input and output are plain tensors of a rank's own features (..., features / ranks); with
    `wraps` the output says so as a DTensor.
    """

    def __init__(self, *, wraps: bool = False) -> None:
        super().__init__()
        self._wraps = wraps

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if isinstance(module, FactoredLinear):
            dims = {"s1": 0, "s2": 1, "bias": 0}
            module.split(device_mesh.get_local_rank(), device_mesh.size())
        elif isinstance(module, RMSNorm):
            dims = {"weight": 0}
        else:
            kind = type(module).__name__
            raise ValueError(f"expected SKLinear, LowRankLinear or RMSNorm, got {kind}")
        for name, parameter in list(module.named_parameters(recurse=False)):
            placed = distribute_tensor(
                parameter.detach(),
                device_mesh,
                [Shard(dims[name])],
                src_data_rank=self.src_data_rank,
            )
            wants = parameter.requires_grad
            module.register_parameter(name, nn.Parameter(placed, requires_grad=wants))
        if self._wraps:

            def wrap(_module: nn.Module, _args: Any, own: Tensor) -> DTensor:
                return DTensor.from_local(own, device_mesh, [Shard(own.dim() - 1)])

            module.register_forward_hook(wrap)
        return module


def split_by_tensor(model: Decoder, mesh: DeviceMesh, stream: Stream = "whole") -> None:
    """Split `model`'s weights over the ranks of the one-dimensional `mesh`, in place.

    With the stream "whole" on each rank, outputs of a block are summed. Split by "tokens", norms
    are taken of the parts, and what was one sum becomes a scatter of sums after a product and a
    gathering before the next: as many bytes in all, and activations between them take 1/ranks of
    the memory. Split by "features" dense layers do the same, others sum what is between factors.
    """
    placement = PLACEMENTS[stream]
    plan: dict[str, ParallelStyle] = {}
    # What is not there is on another rank of the pipeline.
    if hasattr(model, "embedding"):
        plan["embedding"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=placement)
    if hasattr(model, "norm") and stream != "whole":
        plan["norm"] = SequenceParallel() if stream == "tokens" else ByFeatures(wraps=True)
    if model.head is not None:
        plan["head"] = ColwiseParallel()
    for index, block in enumerate(model.blocks):
        if isinstance(block, nn.Identity):
            continue
        assert isinstance(block, Block)
        own = _inner("attention", block.attention, ("query", "key", "value"), "out", placement)
        own |= _inner("mlp", block.mlp, ("gate", "up"), "down", placement)
        if stream != "whole":
            for name in ("attention_norm", "mlp_norm"):
                is_tokens = stream == "tokens"
                own[name] = SequenceParallel(use_local_output=True) if is_tokens else ByFeatures()
        plan |= {f"blocks.{index}.{name}": style for name, style in own.items()}
        attention = block.attention
        if isinstance(attention.pattern, Dilated):
            assert isinstance(attention.query.out_features, int)
            heads = attention.query.out_features // attention.head_dim // mesh.size()
            first = heads * mesh.get_local_rank()
            attention.pattern = replace(attention.pattern, first_head=first)
    parallelize_module(model, mesh, plan)
    if hasattr(model, "embedding"):
        # Its output may be on its way still, in a form that compiled blocks have no gradient for.
        model.embedding.register_forward_hook(lambda _module, _args, out: out.clone())


def _inner(
    name: str, module: nn.Module, inputs: tuple[str, ...], output: str, stream: Placement
) -> dict[str, ParallelStyle]:
    """Of attention or the MLP: layers that read the stream, one that ends in it, a norm between."""
    plan: dict[str, ParallelStyle] = {}
    if all(isinstance(getattr(module, each), nn.Linear) for each in inputs):
        # One input for several products, so that its gradient is summed over ranks once.
        others = 2 if name == "attention" else 0
        plan[name] = _shared_input(stream, others)
        reads = ColwiseParallel()
    else:
        reads = ColwiseParallel(input_layouts=stream)
    for each in inputs:
        plan[f"{name}.{each}"] = _of(module, each, reads)
    plan[f"{name}.{output}"] = _of(module, output, RowwiseParallel(output_layouts=stream))
    if isinstance(module.norm, RMSNorm):
        plan[f"{name}.norm"] = ByFeatures()
    return plan


def _of(module: nn.Module, name: str, if_dense: ParallelStyle) -> ParallelStyle:
    return if_dense if isinstance(getattr(module, name), nn.Linear) else ByFeatures()


def _shared_input(stream: Placement, others: int) -> PrepareModuleInput:
    return PrepareModuleInput(
        input_layouts=(stream, *[None] * others),
        desired_input_layouts=(Replicate(), *[None] * others),
        use_local_output=False,
    )
