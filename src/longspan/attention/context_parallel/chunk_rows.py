"""Rows of keys and values that a layer keeps of the chunks of a sequence, and their gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from longspan.attention.context_parallel.chunk_plan import (
    ChunkPlan,
    kept_rows,
    moved,
    plan_chunk,
    without_blocks,
)
from longspan.attention.context_parallel.shards import Heads, Shards
from longspan.attention.pattern import Pattern
from longspan.dtypes import accumulation_dtype


class DenseRows:
    """All rows of a layer, chunk by chunk: (2, batch, tokens, key heads, head_dim)."""

    def __init__(self, shards: Shards, device: torch.device) -> None:
        self._shards, self._device = shards, device
        self._kept, self._grads = dict[int, Tensor](), dict[int, Tensor]()

    def keep(self, chunk: int, k: Tensor, v: Tensor) -> None:
        self._kept[chunk] = moved(torch.stack([k, v]), self._device)

    def pieces(self, chunk: int, begin: int) -> list[tuple[int, slice]]:
        """Earlier chunks, and their rows from position `begin` on."""
        found = []
        for earlier in range(chunk):
            held = self._shards.local_range(earlier)
            if begin < held.stop:
                found.append((earlier, slice(max(0, begin - held.start), len(held))))
        return found

    def read(self, piece: tuple[int, slice], device: torch.device) -> tuple[Tensor, Tensor]:
        chunk, rows = piece
        k, v = moved(self._kept[chunk][:, :, rows], device)
        return k, v

    def add(self, piece: tuple[int, slice], grad_k: Tensor, grad_v: Tensor) -> None:
        chunk, rows = piece
        if chunk not in self._grads:
            kept = self._kept[chunk]
            dtype = accumulation_dtype(kept)
            self._grads[chunk] = torch.zeros(kept.shape, dtype=dtype, device=grad_k.device)
        k, v = self._grads[chunk][:, :, rows]
        k += grad_k
        v += grad_v

    def add_to(self, chunk: int, grad_k: Tensor, grad_v: Tensor) -> tuple[Tensor, Tensor]:
        self._kept.pop(chunk - 1, None)  # seen by no chunk that is still to come
        grads = self._grads.pop(chunk, None)
        if grads is None:
            return grad_k, grad_v
        k, v = grads
        return (k + grad_k).to(grad_k.dtype), (v + grad_v).to(grad_v.dtype)


class SparseRows:
    """Rows of a layer that later chunks see, in slots: (slots, 2, batch, head_dim)."""

    def __init__(
        self, pattern: Pattern, shards: Shards, heads: Heads, device: torch.device
    ) -> None:
        self._pattern, self._shards, self._heads = without_blocks(pattern), shards, heads
        self._device = device
        self._kept: Tensor | None = None
        self._grads: Tensor | None = None
        """Of the rows that are open after the chunk that the walk is at: float32."""
        self._given: Tensor | None = None
        """What this chunk gives to rows that it has read."""

    def plan(self, chunk: int, device: torch.device) -> ChunkPlan:
        options = self._pattern, self._shards, chunk, self._heads
        return plan_chunk(*options, device, self._device)

    def keep(self, chunk: int, k: Tensor, v: Tensor) -> None:
        plan = self.plan(chunk, k.device)
        if self._kept is None:
            count = sum(map(len, kept_rows(self._pattern, self._shards, self._heads)))
            shape = (count, 2, k.shape[0], k.shape[3])
            is_pinned = k.device != self._device
            options: dict[str, Any] = {"dtype": k.dtype, "device": self._device}
            self._kept = torch.empty(shape, pin_memory=is_pinned, **options)
        rows = torch.stack([x.flatten(1, 2)[:, plan.keep_index] for x in (k, v)])
        self._kept[plan.keep_slots] = rows.permute(2, 0, 1, 3).to(self._device)

    def read(self, plan: ChunkPlan, like: Tensor) -> Tensor:
        """The rows (rows, 2, batch, head_dim) that a chunk sees."""
        if self._kept is None:  # no chunk keeps any
            return like.new_empty((0, 2, like.shape[0], like.shape[3]))
        return moved(self._kept[plan.read_slots], like.device)

    def give(self, grad_rows: Tensor) -> None:
        """Take the gradients of the rows that the chunk has read."""
        self._given = grad_rows

    def add_to(self, chunk: int, grad_k: Tensor, grad_v: Tensor) -> tuple[Tensor, Tensor]:
        """Add to a chunk's gradients those of its rows, and leave it for the chunk before."""
        plan, dtype = self.plan(chunk, grad_k.device), accumulation_dtype(grad_k)
        after, given = self._grads, self._given
        shape = (plan.num_open, 2, grad_k.shape[0], grad_k.shape[3])
        self._grads, self._given = grad_k.new_zeros(shape, dtype=dtype), None
        if after is not None:
            own = after[plan.own]
            grad_k, grad_v = (
                _add_rows(x, plan.keep_index, own[:, i]) for i, x in enumerate((grad_k, grad_v))
            )
            self._grads[plan.carried_to] = after[plan.carried]
        if given is not None:
            self._grads[plan.read_to] += given
        return grad_k, grad_v


Rows = DenseRows | SparseRows


@dataclass(frozen=True)
class EarlierRows:
    """The `RemoteRows` of a chunk: those that earlier ones have kept."""

    rows: SparseRows
    plan: ChunkPlan

    def send_async(self, k: Tensor, _v: Tensor, _group: str) -> Tensor:
        return self.rows.read(self.plan, k)

    def return_async(self, grad_rows: Tensor, _dtype: torch.dtype, _group: str) -> Tensor:
        self.rows.give(grad_rows)
        return grad_rows

    def add_returned(self, grad: Tensor, _returned: Tensor) -> Tensor:
        return grad  # `_Keep` adds them

    def receive(self, k: Tensor, v: Tensor, _group: str) -> tuple[Tensor, Tensor]:
        rows: tuple[Tensor, Tensor] = _Read.apply(k, v, self)  # type: ignore[no-untyped-call]
        return rows


class _Read(torch.autograd.Function):
    """The rows (rows, batch, head_dim) of earlier keys and values; k, v are those of the chunk."""

    @staticmethod
    def forward(ctx: Any, k: Tensor, _v: Tensor, earlier: EarlierRows) -> tuple[Tensor, Tensor]:
        ctx.rows = earlier.rows
        received = earlier.rows.read(earlier.plan, k)
        return received[:, 0], received[:, 1]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_k: Tensor, grad_v: Tensor) -> tuple[None, None, None]:
        ctx.rows.give(torch.stack([grad_k, grad_v], dim=1))
        return None, None, None


def _add_rows(x: Tensor, index: Tensor, rows: Tensor) -> Tensor:
    """Add rows (rows, batch, head_dim) to those `index` of x (batch, tokens, heads, head_dim)."""
    flat = x.flatten(1, 2)
    sums = flat[:, index].to(rows.dtype) + rows.transpose(0, 1)
    return flat.index_copy(1, index, sums.to(x.dtype)).view(x.shape)
