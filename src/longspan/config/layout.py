"""The section [layout]."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import BeforeValidator, PrivateAttr

from longspan.checks import layout_problems
from longspan.config.section import Positive, Ranks, Section, as_integer

Backend = Literal["auto", "nccl", "gloo", "mpi"]
AUTO = "auto"
"""What `layout` may be instead of a table."""

AXES = ("replicate", "shard", "sequence", "tensor", "pipeline")


class Layout(Section):
    """Number of ranks on each axis of the device mesh; -1 means the remaining devices."""

    replicate: Ranks = 1
    """Number of model replicas (data parallelism), whose gradients are averaged by all-reduce."""
    shard: Ranks = -1
    """Number of ranks that shard parameters, gradients and optimizer state (ZeRO / FSDP); with
    `replicate` > 1 this is HYBRID_SHARD (HSDP)."""
    sequence: Ranks = 1
    """Number of ranks that split each sequence (sequence, or context, parallelism)."""
    tensor: Ranks = 1
    """Number of ranks that split each weight matrix (tensor parallelism)."""
    pipeline: Ranks = 1
    """Number of ranks that split the layers into stages (pipeline parallelism)."""
    zero: Annotated[Literal[0, 1, 2, 3], BeforeValidator(as_integer)] = 3
    """ZeRO stage of the `shard` axis: 1 shards the optimizer state, 2 also the gradients
    (SHARD_GRAD_OP), 3 also the parameters (FULL_SHARD); 0 shards nothing (NO_SHARD), and its ranks
    are replicas."""
    schedule: Literal["gpipe", "1f1b", "interleaved", "zbv"] = "1f1b"
    """Pipeline schedule, the order in which the stages run micro-batches."""
    virtual_stages: Positive = 2
    """Stages per rank of the "interleaved" schedule; "zbv" always has two, the others one."""
    megatron_sequence_parallel: bool = False
    """Also splits norms and the residual stream along tokens over the tensor axis (Megatron-style
    sequence parallelism)."""
    gradient_compression: Literal["none", "bf16", "powersgd"] = "none"
    """Precision in which ranks reduce gradients: "none" is float32; "bf16" halves the bytes (FSDP's
    reduce_dtype, DeepSpeed's communication_data_type); "powersgd" all-reduces low-rank
    approximations, and needs `replicate` as the only axis."""
    offload: bool = False
    """Offloads parameters, gradients and optimizer state to CPU, where the optimizer runs, also of
    one process; the device holds what the current block computes with."""
    backend: Backend = "auto"
    """Library that communicates between ranks: "auto" is NCCL for GPUs (and gloo for tensors on the
    CPU), gloo on CPUs; "gloo" on GPUs needs `replicate` as the only axis; "mpi" needs a PyTorch
    that was built with MPI."""
    _why_auto: str | None = PrivateAttr(default=None)

    @property
    def why_auto(self) -> str | None:
        """Of a layout that `layout = "auto"` has given: why this one."""
        return self._why_auto

    @property
    def is_unresolved(self) -> bool:
        """Whether this stands for `layout = "auto"`, before the number of processes is known."""
        return self._why_auto == ""

    def taken_for(self, why: str) -> Layout:
        """This layout, as the one that `layout = "auto"` gives; without a reason, unresolved."""
        layout = self.model_copy()
        layout._why_auto = why
        return layout

    @property
    def stages_per_rank(self) -> int:
        """Number of pipeline stages that each rank runs."""
        return {"zbv": 2, "interleaved": self.virtual_stages}.get(self.schedule, 1)

    def ranks(self) -> dict[str, int]:
        return {axis: getattr(self, axis) for axis in AXES}

    @property
    def min_world_size(self) -> int:
        """Smallest number of processes: the product of the axes that are not -1."""
        return math.prod(n for n in self.ranks().values() if n > 0)

    def resolve(self, world: int) -> dict[str, int]:
        """Return the ranks per axis for `world` processes, with -1 resolved."""
        assert not self.is_unresolved, 'load_run(world=…) resolves layout = "auto"'
        ranks = self.ranks()
        if problems := layout_problems(ranks, world):
            raise ValueError("; ".join(problems))
        rest = world // self.min_world_size
        resolved = {axis: rest if n == -1 else n for axis, n in ranks.items()}
        if self.zero == 0:
            resolved |= {"replicate": resolved["replicate"] * resolved["shard"], "shard": 1}
        return resolved
