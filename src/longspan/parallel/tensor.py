"""Tensor parallelism: every matrix is split over the ranks of one axis (Megatron-LM).

Query, key, value and the MLP's two input projections are split by columns, so that each rank has
some heads and some of the MLP's width; the projections into the residual stream are split by rows,
and their outputs are all-reduced: two all-reduces per block and direction. The embedding and the
head are split by rows of the vocabulary, and the loss is computed from sharded logits
(`nn/loss.py`). Norms are replicated.

With sketched or low-rank linear layers the residual stream and its norms are split by features:
such a layer maps a rank's features to a rank's features and all-reduces only the low-rank
intermediate between its factors (`sketching/layers.py`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

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
from longspan.models.decoder import Block, Decoder
from longspan.nn import RMSNorm
from longspan.parallel.choices import Split, residual_split
from longspan.sketching import FactoredLinear

PLACEMENTS: dict[Split, Placement] = {
    "none": Replicate(),
    "tokens": Shard(1),
    "features": Shard(2),
}


class FeatureParallel(ParallelStyle):
    """Split a sketched or low-rank layer, or an RMSNorm, by features.

    Inputs and outputs are plain tensors of a rank's features (..., features / ranks); with
    `dtensor_output` the output is a DTensor.
    """

    def __init__(self, *, dtensor_output: bool = False) -> None:
        super().__init__()
        self._dtensor_output = dtensor_output

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if isinstance(module, FactoredLinear):
            dims = {"s1": 0, "s2": 1, "bias": 0}
            module.shard(device_mesh.get_local_rank(), device_mesh.size())
        elif isinstance(module, RMSNorm):
            dims = {"weight": 0}
        else:
            kind = type(module).__name__
            raise ValueError(f"expected SKLinear, LowRankLinear or RMSNorm, got {kind}")
        for name, parameter in list(module.named_parameters(recurse=False)):
            shard = distribute_tensor(
                parameter.detach(),
                device_mesh,
                [Shard(dims[name])],
                src_data_rank=self.src_data_rank,
            )
            new = nn.Parameter(shard, requires_grad=parameter.requires_grad)
            module.register_parameter(name, new)
        if self._dtensor_output:

            def to_dtensor(_module: nn.Module, _args: Any, x: Tensor) -> DTensor:
                return DTensor.from_local(x, device_mesh, [Shard(x.dim() - 1)])

            module.register_forward_hook(to_dtensor)
        return module


def apply_tensor_parallel(
    model: Decoder, mesh: DeviceMesh, megatron_sequence_parallel: bool = False
) -> None:
    """Split `model`'s weights over the ranks of the one-dimensional `mesh`, in place.

    The residual stream is replicated, and the outputs of attention and MLP are all-reduced. With
    `megatron_sequence_parallel` it is split by tokens: norms run on the shards, and each all-reduce
    becomes a reduce-scatter after a product and an all-gather before the next. As many bytes are
    communicated, and activations between products take 1/ranks of the memory.
    """
    split = residual_split(model.config, megatron_sequence_parallel)
    residual = PLACEMENTS[split]
    if split == "tokens":
        model.dropout.split_tokens(mesh.get_local_rank(), mesh.size())
    elif split == "features":
        model.dropout.split_features(mesh.get_local_rank(), model.config.hidden // mesh.size())
    plan: dict[str, ParallelStyle] = {}
    # Modules that are missing are on other pipeline ranks.
    if hasattr(model, "embedding"):
        plan["embedding"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=residual)
    if hasattr(model, "norm") and split != "none":
        is_tokens = split == "tokens"
        plan["norm"] = SequenceParallel() if is_tokens else FeatureParallel(dtensor_output=True)
    if model.head is not None:
        plan["head"] = ColwiseParallel()
    for index, block in enumerate(model.blocks):
        if isinstance(block, nn.Identity):
            continue
        assert isinstance(block, Block)
        styles = _styles("attention", block.attention, ("query", "key", "value"), "out", residual)
        styles |= _styles("mlp", block.mlp, ("gate", "up"), "down", residual)
        if split != "none":
            for name in ("attention_norm", "mlp_norm"):
                is_tokens = split == "tokens"
                style = SequenceParallel(use_local_output=True) if is_tokens else FeatureParallel()
                styles[name] = style
        plan |= {f"blocks.{index}.{name}": style for name, style in styles.items()}
        attention = block.attention
        if isinstance(attention.pattern, Dilated):
            assert isinstance(attention.query.out_features, int)
            heads = attention.query.out_features // attention.head_dim // mesh.size()
            first = heads * mesh.get_local_rank()
            attention.pattern = replace(attention.pattern, first_head=first)
        for norm in (attention.query_norm, attention.key_norm):
            if isinstance(norm, RMSNorm):  # replicated, but each rank applies it to its own heads
                norm.weight_group = mesh.get_group()
    parallelize_module(model, mesh, plan)
    for block in model.blocks:
        if isinstance(block, Block) and (sinks := block.attention.sinks) is not None:
            shard = distribute_tensor(sinks.detach(), mesh, [Shard(0)])
            block.attention.sinks = nn.Parameter(shard)
    if hasattr(model, "embedding"):
        # Its output may be an AsyncCollectiveTensor, for which compiled blocks have no gradient.
        model.embedding.register_forward_hook(lambda _module, _args, out: out.clone())


def _styles(
    name: str, module: nn.Module, inputs: tuple[str, ...], output: str, residual: Placement
) -> dict[str, ParallelStyle]:
    """Styles for attention or the MLP: its input projections, its output projection, its norm."""
    styles: dict[str, ParallelStyle] = {}
    if all(isinstance(getattr(module, layer), nn.Linear) for layer in inputs):
        # Gather the input once for all projections, so that its gradient is all-reduced once.
        others = 3 if name == "attention" else 0  # rope, KV cache and documents
        styles[name] = PrepareModuleInput(
            input_layouts=(residual, *[None] * others),
            desired_input_layouts=(Replicate(), *[None] * others),
            use_local_output=False,
        )
        column = ColwiseParallel()
    else:
        column = ColwiseParallel(input_layouts=residual)
    dense = dict.fromkeys(inputs, column) | {output: RowwiseParallel(output_layouts=residual)}
    for layer, style in dense.items():
        is_dense = isinstance(getattr(module, layer), nn.Linear)
        styles[f"{name}.{layer}"] = style if is_dense else FeatureParallel()
    if isinstance(module.norm, RMSNorm):
        styles[f"{name}.norm"] = FeatureParallel()
    return styles
