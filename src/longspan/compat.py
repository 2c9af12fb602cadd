"""The names that the guides use, each a few lines over the real thing.

`docs/from-the-guides.md` says what to use instead, and what cannot be had. An option of the guides
that the real thing does not honour is refused by name; one that is False or None asks for nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils.checkpoint import checkpoint

from longspan.attention import BlockSparse
from longspan.attention.modules import DilatedAttention, MultiheadDilatedAttention
from longspan.create import create_model
from longspan.errors import UserError
from longspan.parallel.mesh import device_type_of
from longspan.parallel.tensor import FeatureParallel
from longspan.sketching import SKLinear

INSTEAD = {
    "use_deepspeed": "pass the model to deepspeed.initialize, or use engine.name=deepspeed",
    "zero_stage": "pass it in DeepSpeed's configuration, or use layout.zero of a run",
    "cpu_offload": "use layout.offload of a run",
    "use_fp16": "use torch.autocast, or train.precision of a run",
    "use_bf16": "use torch.autocast, or train.precision of a run",
    "compile_model": "use torch.compile, or train.compile of a run",
    "ring_size": "the ring is the process group: one rank per process",
}
"""What to do for options that these classes do not have."""


def _refuse(name: str, options: dict[str, Any]) -> None:
    for option, value in options.items():
        if value is not None and value is not False:
            hint = INSTEAD.get(option, "see docs/from-the-guides.md")
            raise UserError(f"{name} does not support {option}={value!r}: {hint}")


def _world() -> dist.ProcessGroup | None:
    """All processes; None if this is the only one."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    return dist.group.WORLD


class RingDilatedAttention(DilatedAttention):
    """`DilatedAttention` whose inputs are this process's tokens of a sequence split over all."""

    def __init__(
        self,
        segment_lengths: Sequence[int],
        dilation_rates: Sequence[int],
        *,
        dropout: float = 0.0,
        softmax_scale: float | None = None,
        **options: Any,
    ) -> None:
        _refuse(type(self).__name__, options)
        super().__init__(
            segment_lengths,
            dilation_rates,
            dropout=dropout,
            softmax_scale=softmax_scale,
            sequence_parallel=_world(),
        )


class DistributedImprovedMultiheadDilatedAttention(MultiheadDilatedAttention):
    """`MultiheadDilatedAttention` over all processes.

    With `sequence_parallel` they split the tokens: a process passes its own, and all-reduces the
    parameters' gradients. With `model_parallel` they split the heads, and each passes all tokens.
    `use_gradient_checkpointing` recomputes the layer in the backward pass.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        segment_lengths: Sequence[int],
        dilation_rates: Sequence[int],
        *,
        sequence_parallel: bool = False,
        model_parallel: bool = False,
        use_gradient_checkpointing: bool = False,
        blocks: BlockSparse | None = None,
        dropout: float = 0.0,
        bias: bool = True,
        sub_layer_norm: bool = False,
        **options: Any,
    ) -> None:
        _refuse(type(self).__name__, options)
        if sequence_parallel and model_parallel:
            raise UserError(
                "sequence_parallel and model_parallel cannot both be all processes: use "
                "longspan.MultiheadDilatedAttention with a mesh of two dimensions"
            )
        group = _world()
        super().__init__(
            embed_dim,
            num_heads,
            segment_lengths,
            dilation_rates,
            blocks=blocks,
            dropout=dropout,
            bias=bias,
            sub_layer_norm=sub_layer_norm,
            sequence_parallel=group if sequence_parallel else None,
            tensor_parallel=_mesh(group) if model_parallel and group is not None else None,
        )
        self.use_gradient_checkpointing = use_gradient_checkpointing

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
        """Arguments and results are those of `MultiheadDilatedAttention`."""
        forward = super().forward
        if not (self.use_gradient_checkpointing and torch.is_grad_enabled()):
            return forward(*args, **kwargs)
        out: tuple[Tensor, None] = checkpoint(forward, *args, use_reentrant=False, **kwargs)
        return out


class DistributedMultiheadDilatedAttention(DistributedImprovedMultiheadDilatedAttention):
    """The same: `MultiheadDilatedAttention`, to be wrapped in DDP or FSDP with the model."""


class RingDistributedDilatedAttention(DistributedImprovedMultiheadDilatedAttention):
    """`MultiheadDilatedAttention` whose inputs are this process's tokens."""

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        segment_lengths: Sequence[int],
        dilation_rates: Sequence[int],
        **options: Any,
    ) -> None:
        options["sequence_parallel"] = True
        super().__init__(embed_dim, num_heads, segment_lengths, dilation_rates, **options)


class RingMultiheadDilatedAttention(RingDistributedDilatedAttention):
    """The same."""


class BlockSparseRingDistributedDilatedAttention(RingDistributedDilatedAttention):
    """The same, block-sparse within each segment.

    `sparsity_ratio` is the fraction of blocks that is kept at random, beside the diagonal.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        segment_lengths: Sequence[int],
        dilation_rates: Sequence[int],
        sparsity_ratio: float = 0.1,
        *,
        block_size: int = 128,
        **options: Any,
    ) -> None:
        options["blocks"] = BlockSparse(block_size, density=sparsity_ratio)
        super().__init__(embed_dim, num_heads, segment_lengths, dilation_rates, **options)


def create_distributed_model(
    embed_dim: int,
    num_heads: int,
    num_layers: int,
    segment_lengths: Sequence[int],
    dilation_rates: Sequence[int],
    vocab_size: int,
    max_seq_len: int,
    *,
    use_deepspeed: bool = False,
    use_model_parallel: bool | int = False,
    use_sequence_parallel: bool | int = False,
    use_gradient_checkpointing: bool = False,
    cpu_offload: bool = False,
    compile_model: bool = False,
    **options: Any,
) -> nn.Module:
    """`create_model` with the arguments of the guides, laid out over all processes.

    By default they are replicas (DDP). `use_model_parallel` and `use_sequence_parallel` are the
    ranks of the tensor and the sequence axis, True for all that are left, and `cpu_offload` shards
    and offloads parameters. With `use_deepspeed` the model is whole, for `deepspeed.initialize`.
    """
    _refuse("create_distributed_model", options)
    items = [
        f"model.hidden={embed_dim}",
        f"model.heads={num_heads}",
        f"model.kv_heads={num_heads}",
        f"model.layers={num_layers}",
        f"model.vocab={vocab_size}",
        f"attention.segment_lengths={list(segment_lengths)}",
        f"attention.dilation_rates={list(dilation_rates)}",
        f"data.context={max_seq_len}",
        f"train.activation_checkpointing={'full' if use_gradient_checkpointing else 'none'}",
        f"train.compile={str(compile_model).lower()}",
    ]
    if use_deepspeed:
        if use_model_parallel or use_sequence_parallel or cpu_offload:
            raise UserError(
                "DeepSpeed replicates and shards: use_model_parallel, use_sequence_parallel and "
                "cpu_offload need use_deepspeed=False; DeepSpeed's offload is in its configuration"
            )
        return create_model(*items)
    if use_model_parallel is True and use_sequence_parallel is True:
        raise UserError(
            "use_model_parallel and use_sequence_parallel cannot both be all processes: give the "
            "number of ranks of one, such as use_model_parallel=2"
        )
    tensor, sequence = int(use_model_parallel) or 1, int(use_sequence_parallel) or 1
    layout: dict[str, int | bool | str] = {"replicate": 1, "shard": -1, "pipeline": 1}
    layout |= {"tensor": tensor, "sequence": sequence}
    for axis, value in (("tensor", use_model_parallel), ("sequence", use_sequence_parallel)):
        if value is True:
            layout |= {axis: -1, "shard": 1}
    shards = cpu_offload or bool(use_sequence_parallel)
    layout |= {"zero": 3 if shards else 0, "offload": cpu_offload}
    return create_model(*items, layout=layout)


class TensorParallelSKLinear(nn.Module):
    """`SKLinear` over the ranks of a group, of x (..., in) to (..., out), whole on every rank.

    A rank holds the factors of its features, and only the intermediate of the sketch's rank is
    all-reduced; the whole output takes an all-gather, and the whole gradient of x another. Keep
    features split between layers instead with `FeatureParallel`, which takes neither.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        sketch_size: int,
        tensor_parallel_group: dist.ProcessGroup | None = None,
        *,
        bias: bool = True,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.local_sklinear = SKLinear(
            in_features, out_features, bias=bias, sketch_size=sketch_size, seed=seed
        )
        group = tensor_parallel_group or _world()
        self.mesh = None if group is None else _mesh(group)
        if self.mesh is not None:
            parallelize_module(self.local_sklinear, self.mesh, FeatureParallel())

    def forward(self, x: Tensor) -> Tensor:
        """Map x (..., in), the same on every rank, to (..., out), the same on every rank."""
        if self.mesh is None:
            out: Tensor = self.local_sklinear(x)
            return out
        features = [Shard(x.dim() - 1)]
        whole = DTensor.from_local(x, self.mesh, [Replicate()], run_check=False)
        local = self.local_sklinear(whole.redistribute(placements=features).to_local())
        result = DTensor.from_local(local, self.mesh, features, run_check=False)
        return result.redistribute(placements=[Replicate()]).to_local()


def _mesh(group: dist.ProcessGroup) -> DeviceMesh:
    """The one-dimensional mesh of a process group."""
    device = device_type_of(group)
    if group is dist.group.WORLD:
        return init_device_mesh(device, (dist.get_world_size(),))
    return DeviceMesh.from_group(group, device)
