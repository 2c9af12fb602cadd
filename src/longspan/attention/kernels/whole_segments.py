"""Launches `hopper_forward` and `hopper_backward`, kernels in Gluon for compute capability 9.0.

They serve causal attention over whole segments of a nested pattern, in 16 bits; `dispatch` launches
Triton's kernels for everything else.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor

from longspan.attention.kernels.block_sparse import LOG2_E
from longspan.attention.kernels.launch import Launch, Tiles, has_gluon, launch_all
from longspan.attention.kernels.schedule import TILE, BranchSchedule


def has_kernels(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Whether there are such kernels for this device, dtype and head_dim."""
    return has_gluon(device) and dtype.itemsize == 2 and head_dim in (64, 128)


@dataclass(frozen=True, eq=False)
class WholeSegments:
    """The launches for one kind of attention."""

    batch: int
    heads: int
    group: int
    head_dim: int
    first_head: int
    schedule: BranchSchedule
    scale: float

    def forward(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> None:
        """Compute `out` and `lse` (batch, heads, tokens), which is −inf.

        q, k, v, out (batch, tokens, heads, head_dim).
        """
        partial = self._new_partial(q)
        q, k, v = (_as_matrix(x, self._largest_rate) for x in (q, k, v))
        strides = tuple(x.stride()[:3] for x in (q, k, v, out, partial))
        launches = self._launches("forward", q.shape[1], strides, lse.stride(1))
        pointers = [
            (*(launch.descriptor(i, x) for i, x in enumerate((q, k, v))), out, partial, lse)
            for launch in launches
        ]
        launch_all(launches, pointers)

    def backward(
        self, do: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, delta: Tensor, dk: Tensor,
        dv: Tensor,
    ) -> Tensor:  # fmt: skip
        """Compute dk and dv, for each head of q, and return dq / scale; shapes as in `forward`.

        dk and dv have the same strides. `lse` and `delta` are those of `rows.backward_preprocess`.
        Tiles of keys add to dq in float32, in any order: the last bits differ from one call to the
        next.
        """
        partial_k, partial_v = self._new_partial(q), self._new_partial(q)
        q, k, v, do = (_as_matrix(x, self._largest_rate) for x in (q, k, v, do))
        dq_sum = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
        strides = tuple(x.stride()[:3] for x in (q, k, v, do, dk, partial_k))
        launches = self._launches("backward", q.shape[1], strides, lse.stride(1))
        pointers = [
            (
                *(launch.descriptor(i, x) for i, x in enumerate((q, k, v, do, dq_sum))),
                lse, delta, dk, dv, partial_k, partial_v,
            )
            for launch in launches
        ]  # fmt: skip
        launch_all(launches, pointers)
        return dq_sum

    def _new_partial(self, q: Tensor) -> Tensor:
        """Float32 (batch, every partial_rate-th token, heads, head_dim); empty for one branch."""
        rows = q.shape[1] // self.schedule.partial_rate if self.schedule.has_partial else 0
        shape = self.batch, rows, self.heads, self.head_dim
        return torch.empty(shape, dtype=torch.float32, device=q.device)

    @cached_property
    def _largest_rate(self) -> int:
        return self.schedule.branches[0].rate

    @cached_property
    def _launches(self) -> Callable[..., list[Launch]]:
        return lru_cache(maxsize=64)(self._new_launches)

    def _new_launches(
        self, name: str, tokens: int, strides: tuple[tuple[int, ...], ...], row_stride: int
    ) -> list[Launch]:
        from longspan.attention.kernels.hopper_backward import backward
        from longspan.attention.kernels.hopper_forward import forward

        is_forward = name == "forward"
        scales = (self.scale * LOG2_E,) if is_forward else (self.scale * LOG2_E, self.scale)
        launches = []
        for branch in self.schedule.branches:
            scalars = (
                *strides, row_stride, tokens, self.heads, self.first_head, self.group, branch.rate,
                branch.segment, branch.inner, self.schedule.partial_rate, *scales,
            )  # fmt: skip
            constants: dict[str, Any] = {
                "RATIOS": branch.ratios,
                "SKIP_INNER": branch.inner > 0,
                "FIRST": branch.is_first,
                "LAST": branch.is_last,
                "HEAD_DIM": self.head_dim,
                "TILE": TILE,
            }
            # The fastest of those tried on an H200. A program of the forward kernel is one group
            # of four warps with one tile; of the backward kernel two groups, beside the loader.
            registers = 128 if is_forward and self.head_dim == 64 else None
            rows = TILE if is_forward else 2 * TILE
            if not is_forward:
                constants["STAGES"] = 3 if self.head_dim == 64 else 2
                constants["PARTIAL_RATIO"] = branch.partial_ratio
            grid = tokens // branch.rate // rows, self.batch * self.heads
            tiles = Tiles(TILE, TILE, 4, 1, registers)
            kernel = forward if is_forward else backward
            matrix = _describer(branch.rate, self.head_dim)
            launches.append(Launch(kernel, grid, scalars, constants, tiles, matrix))
        return launches


def _as_matrix(x: Tensor, rate: int) -> Tensor:
    """`x`, copied if its samples are not whole rows of `rate` tokens apart."""
    is_regular = len(x) == 1 or x.stride(0) % (rate * x.stride(1)) == 0
    return x if is_regular else x.contiguous()


def _describer(rate: int, head_dim: int) -> Callable[[Tensor], Any]:
    """Describes x (batch, tokens, heads, head_dim) as a matrix (rows, rate · token stride).

    A tile is TILE rows of it, at the column of a residue and a head.
    """

    def describe(x: Tensor) -> Any:
        from longspan.attention.kernels import gluon_parts

        batch, tokens, _, _ = x.shape
        row = rate * x.stride(1)
        rows = (batch - 1) * (x.stride(0) // row) + tokens // rate
        return gluon_parts.describe(x, [rows, row], [row, 1], [TILE, head_dim])

    return describe
