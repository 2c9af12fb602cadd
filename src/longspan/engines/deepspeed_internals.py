"""Every private DeepSpeed API that Longspan uses, in one file. Read from DeepSpeed 0.19.8.

A DeepSpeed release that changes one fails in tests/engines/test_deepspeed_internals.py, and only
this file needs to follow.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Fragment(NamedTuple):
    """This rank's `size` elements of a flattened parameter, from element `start` on."""

    start: int
    size: int
    group: int | None
    """The index of the flat fp32 partition that holds them, None of a frozen parameter…"""
    offset: int
    """…and where in it they begin."""


def silence(deepspeed: Any) -> None:
    """Keep DeepSpeed from compiling its shared-memory op, which only inference uses."""
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def full_dims(parameter: Any) -> int:
    """Dimensions of a parameter, which ZeRO-3 flattens."""
    return len(getattr(parameter, "ds_shape", parameter.shape))


class ZeroPartitions:
    """The partitions that a DeepSpeed engine of ZeRO stage 0 to 3 holds on one rank."""

    def __init__(self, engine: Any, stage: int, rank: int) -> None:
        self._engine, self._zero = engine, engine.optimizer
        self._stage, self._rank = stage, rank

    @property
    def grad_norm(self) -> Any:
        """The global gradient norm, known when the optimizer is called."""
        return self._zero._global_grad_norm

    def disable_grad_scaler(self) -> None:
        """Drop DeepSpeed's fp16 gradient scalers, which do not unscale what they clip."""
        self._engine.torch_autocast_z0_gradscaler = None
        self._zero.torch_autocast_gradscaler = None

    def set_loss_scale(self, scale: float) -> None:
        """Have ZeRO-1 to 3 scale the loss and unscale the gradients by `scale`."""
        self._zero.override_loss_scale(scale)

    def flat(self) -> list[Tensor]:
        """The flat fp32 partitions that the optimizer updates (ZeRO-1 to 3)."""
        if self._stage == 3:
            return list(self._zero.fp32_partitioned_groups_flat)
        return list(self._zero.single_partition_of_fp32_groups)

    def fragment(self, parameter: Any, shape: tuple[int, ...]) -> Fragment | None:
        """This rank's elements of a parameter of full `shape`; None if it has none."""
        count = math.prod(shape)
        if self._stage == 0:
            return Fragment(0, count, 0, 0)
        if self._stage == 3:
            share = parameter.ds_tensor.ds_numel  # the last rank's is padded
            start, group, offset = self._rank * share, None, 0
            if parameter.requires_grad:
                group, offset, _ = self._zero.grad_position[self._zero.get_param_id(parameter)]
            fragment = Fragment(start, max(0, min(share, count - start)), group, offset)
            return fragment if fragment.size else None
        if not parameter.requires_grad:
            return Fragment(0, count, None, 0)
        mapping = parameter._hp_mapping
        if mapping is None:
            return None
        address = mapping.lp_fragment_address
        offset = mapping.hp_fragment_address.start
        return Fragment(address.start, address.numel, mapping.param_group_index, offset)

    def frozen(self, parameter: Any) -> Tensor:
        """This rank's elements of a parameter that the optimizer does not update."""
        found: Tensor = parameter.ds_tensor if self._stage == 3 else parameter
        return found

    def is_swapped(self, group: int | None) -> bool:
        """Whether ZeRO-3 keeps a group of parameters and their moments on NVMe."""
        if self._stage < 3 or group is None:
            return False
        return bool(self._zero._swappable_optimizer_subgroup(group))

    @contextmanager
    def swapped_in(self, group: int | None, *, writes: bool) -> Iterator[None]:
        """A context in which a group is in memory, to be read or, with `writes`, changed.

        DeepSpeed's own setters refuse groups on NVMe.
        """
        if self.is_swapped(group):
            self._zero._optimizer_states_and_gradient_swap_in(group)
        try:
            yield
        finally:
            if self.is_swapped(group) and writes:
                self._zero._optimizer_states_and_gradient_swap_out(group)
            elif self.is_swapped(group):
                self._zero._release_swap_buffers(group)

    @torch.no_grad()
    def update_parameters(self) -> None:
        """Bring the model's parameters up to date with the flat fp32 partitions."""
        if self._stage in (1, 2):
            self._zero.update_lp_params()
        if self._stage == 3:
            for group in range(len(self.flat())):
                with self.swapped_in(group, writes=False):
                    self._zero._reassign_or_swap_out_partitioned_parameters(group)
            if persistent := self._zero.persistent_parameters:
                persistent[0].partition(persistent)
                persistent[0].all_gather(persistent)
