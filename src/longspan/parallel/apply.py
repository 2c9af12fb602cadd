"""Parallelism applied to a decoder from outside; the model itself knows nothing of it.

The model comes on the meta device. `parallelize` takes it through these steps, in this order:

1. pipeline: drop the layers that other ranks hold (`pipeline.py`)
2. sequence: split every sample's tokens over ranks (`sequence.py`)
3. tensor: split heads, MLP width and vocabulary over ranks (`tensor.py`)
4. put fp8 linear layers into each block and tile its MLP if asked to, wrap it for activation
   checkpointing (`activation_checkpointing.py`), then compile it
5. pipeline: put what is left into stages
6. shard: FSDP2 shards parameters, gradients and optimizer state; with `replicate` beside it, each
   group of ranks shards a copy (HYBRID_SHARD)

`materialize` then allocates this rank's shards and initialises them, so no rank ever holds more
than its share. Where every rank holds the whole model, DDP wraps it last.

ZeRO-1 keeps gradients whole until a step's last micro-batch; ZeRO-2 reduce-scatters those of each
micro-batch at once; ZeRO-3 also frees a block's parameters after its forward pass and gathers them
again for its backward pass. All three shard the optimizer state.

The loss of a step is one sum over all its tokens, so gradients are summed over ranks. DDP and FSDP
average them; the loss is multiplied by the number of ranks beforehand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import partial

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.nn.parallel import DistributedDataParallel

from longspan.config import Layout, Train
from longspan.device import DTYPES
from longspan.flops import stage_flops
from longspan.models import Decoder
from longspan.models.initial import allocate, initialize
from longspan.nn import GatedMLP
from longspan.nn.fp8 import convert_to_fp8
from longspan.parallel.activation_checkpointing import checkpointed
from longspan.parallel.choices import reduce_dtype
from longspan.parallel.dtensor import distribute_like
from longspan.parallel.mesh import ParallelMesh
from longspan.parallel.parameters import named_parameters
from longspan.parallel.pipeline import ForwardContext, PipelinedDecoder, drop_remote_layers
from longspan.parallel.pipeline_schedule import plan_stages
from longspan.parallel.sequence import apply_sequence_parallel
from longspan.parallel.tensor import apply_tensor_parallel
from longspan.sketching import SKLinear
from longspan.torch_internals import (
    LEAVE_BUFFERS,
    default_process_group,
    raise_recompile_limit,
)

GRAPHS_PER_MODULE = 8
"""How often torch.compile may compile each module anew, as by default for a single one."""


def parallelize(
    model: Decoder,
    mesh: ParallelMesh,
    layout: Layout,
    train: Train,
    forward_context: ForwardContext = nullcontext,
) -> nn.Module:
    """Split `model`, on the meta device, over the ranks of `mesh`, in place.

    Returns the module that a training step calls: `model`, or its pipeline stages, which enter
    `forward_context` themselves.
    """
    stages = None
    if mesh.ranks["pipeline"] > 1:
        flops = stage_flops(model.config, model.patterns, model.context)
        stages = plan_stages(layout, model.config.layers, flops, mesh.ranks["pipeline"])
        drop_remote_layers(model, stages, mesh["pipeline"].get_local_rank())
    if mesh.sequence_group is not None and not train.chunk_tokens:  # chunks are split as they come
        apply_sequence_parallel(model, mesh.sequence_group, mesh.ranks["tensor"])
    if mesh.ranks["tensor"] > 1:
        apply_tensor_parallel(model, mesh["tensor"], layout.megatron_sequence_parallel)
    model.freeze_parameters(named_parameters(model))  # tensor parallelism has made new ones
    apply_to_blocks(model, train, communicates=mesh.sequence_group is not None)
    module: nn.Module = model
    if stages is not None:
        module = PipelinedDecoder(model, stages, mesh["pipeline"], forward_context)
    if mesh.is_fsdp:
        for part in _roots(module):
            apply_fsdp(part, mesh, layout, train.precision)
    return module


def materialize(
    module: nn.Module,
    model: Decoder,
    mesh: ParallelMesh,
    layout: Layout,
    train: Train,
    device: torch.device,
) -> nn.Module:
    """Allocate and initialise what `parallelize` has left of `model` on this rank.

    Returns the module to train, wrapped in DDP where all ranks hold the whole model.
    """
    for part in _roots(module):
        allocate(part, torch.device("cpu") if layout.offload else device)
        for layer in part.modules():
            if isinstance(layer, SKLinear):  # FSDP2 brings parameters to the GPU, but no buffers
                layer.reset_signs(device)
    initialize(model, train.seed, named_parameters(model), distribute_like)
    if isinstance(module, PipelinedDecoder):
        micro_batches = train.global_batch // (train.micro_batch * mesh.data_ranks)
        module.build_schedule(
            micro_batches,
            (train.micro_batch, model.context // mesh.ranks["sequence"]),
            tensor_ranks=mesh.ranks["tensor"],
            megatron_sequence_parallel=layout.megatron_sequence_parallel,
            device=device,
        )
    return apply_ddp(model, mesh, layout, device) if mesh.is_ddp else module


def apply_to_blocks(model: Decoder, train: Train, *, communicates: bool = False) -> None:
    """Convert blocks to fp8, tile their MLPs, wrap them for activation checkpointing and compile
    them, by `train`.

    `communicates`: whether a block's forward pass runs collectives.
    """
    if train.fp8:
        convert_to_fp8(model.blocks)
    for module in model.modules():
        if isinstance(module, GatedMLP):
            module.tile_tokens = train.mlp_tile_tokens
    modes = {f"blocks.{index}": train.checkpointing_of(index) for index in range(len(model.blocks))}

    def wrap(name: str, block: nn.Module) -> nn.Module:
        return checkpointed(
            block,
            modes[name],
            saves_attention=not train.chunk_tokens,
            communicates=communicates,
        )

    fullgraph = not communicates and not train.chunk_tokens
    wrap_modules(model, modes, wrap, compiles=train.compile is True, fullgraph=fullgraph)


def wrap_modules(
    model: nn.Module,
    names: Iterable[str],
    wrap: Callable[[str, nn.Module], nn.Module],
    *,
    compiles: bool,
    fullgraph: bool = False,
) -> None:
    """Put `wrap` around the named modules of `model`, and then compile them.

    In this order the compiler sees which activations to save. A block compiled inside the wrapper
    is opaque to it: "selective" would recompute the matrix products too.
    """
    names = list(names)
    if compiles:
        # Graphs count per function: those of earlier models in this process (an attempt that ran
        # out of memory, a notebook's last run) would soon leave none for this one.
        torch.compiler.reset()
        raise_recompile_limit(GRAPHS_PER_MODULE * len(names))
    for name in names:
        parent, _, child = name.rpartition(".")
        wrapped = wrap(name, model.get_submodule(name))
        if compiles:
            wrapped.compile(fullgraph=fullgraph)
        model.get_submodule(parent).register_module(child, wrapped)


def apply_fsdp(module: nn.Module, mesh: ParallelMesh, layout: Layout, precision: str) -> None:
    """Shard each block of a decoder, and then the rest, over the shard and sequence ranks.

    Blocks are gathered in the run's precision, which is what they compute in: autocast would keep
    a 16-bit copy of each weight for the backward pass, of blocks that are resharded by then.
    """
    assert isinstance(module.blocks, nn.ModuleList)
    # The embedding stays gathered: the head may use it again.
    fully_shard_blocks(module, module.blocks, mesh, layout, DTYPES.get(precision))
    if isinstance(module, Decoder):
        register_fsdp_forward_method(module, "next_logits")
        register_fsdp_forward_method(module, "run_blocks")


def fully_shard_blocks(
    module: nn.Module,
    blocks: Iterable[nn.Module],
    mesh: ParallelMesh,
    layout: Layout,
    block_dtype: torch.dtype | None = None,
) -> None:
    """Shard `blocks` one by one, and then the rest of `module`.

    `block_dtype`: the dtype that blocks are gathered in; None is that of their parameters.
    """
    assert mesh.device_mesh is not None
    is_hybrid = mesh.ranks["replicate"] > 1
    shard_mesh = mesh.device_mesh["replicate", "shard"] if is_hybrid else mesh["shard"]
    on_gpu = mesh.device_mesh.device_type == "cuda"
    shard = partial(
        fully_shard,
        mesh=shard_mesh,
        offload_policy=CPUOffloadPolicy(on_gpu) if layout.offload else OffloadPolicy(),
    )
    policy = partial(
        MixedPrecisionPolicy,
        reduce_dtype=reduce_dtype(layout),
        cast_forward_inputs=False,  # the residual stream is float32
    )
    block_policy = policy(param_dtype=block_dtype)
    for block in blocks:
        reshards = mesh.reshards_after_forward
        shard(block, reshard_after_forward=reshards, mp_policy=block_policy)
    shard(module, mp_policy=policy())


def apply_ddp(
    model: nn.Module,
    mesh: ParallelMesh,
    layout: Layout,
    device: torch.device,
    *,
    find_unused_parameters: bool = False,
) -> DistributedDataParallel:
    """Replicate the model, with the gradient compression that the layout asks for."""
    replica = DistributedDataParallel(
        model,
        device_ids=[mesh.world.local_rank] if device.type == "cuda" else None,
        gradient_as_bucket_view=True,
        init_sync=False,
        find_unused_parameters=find_unused_parameters,
        **LEAVE_BUFFERS,  # signs of sketched layers, which are the same everywhere
    )
    compress_gradients(replica, layout)
    return replica


def compress_gradients(replica: DistributedDataParallel, layout: Layout) -> None:
    """Have DDP all-reduce gradients as `layout.gradient_compression` says.

    PowerSGD adds the error of one step to the next; that of the last step before a checkpoint is
    lost.
    """
    if layout.gradient_compression == "bf16":
        # torch restricts its registered bf16 hook to NCCL; called directly it works with gloo too.
        group = default_process_group()
        replica.register_comm_hook(None, lambda _, bucket: bf16_compress_hook(group, bucket))
    if layout.gradient_compression == "powersgd":
        replica.register_comm_hook(PowerSGDState(None, start_powerSGD_iter=10), powerSGD_hook)


def _roots(module: nn.Module) -> list[nn.Module]:
    """The modules that FSDP2 shards: the model, or each of this rank's pipeline stages."""
    return list(module.stages) if isinstance(module, PipelinedDecoder) else [module]
