"""Attention of one rank that walks a sequence in chunks: "context in time".

A chunk is to the walk what a shard is to sequence parallelism: its queries see its own rows of keys
and values, and some rows of earlier chunks, which the pattern names. There they come from other
ranks; here from memory, where earlier chunks have left them. So a walk takes

1. all chunks forward, without a graph. Each layer keeps the rows that later chunks will see, and
   nothing else is kept;
2. all chunks backward, from the last to the first. Each is recomputed, now with a graph, over
   the rows that it needs. Its loss is backpropagated, and so are the gradients that later chunks
   have given to its own rows; the gradients that it gives to rows of earlier chunks are added up in
   float32 until the walk comes to them. Of a row there is a gradient only from the last chunk
   that sees it to its own chunk: for a dilated pattern, while its segment is open.

A dense pattern keeps whole chunks, which are attended one after another like the shards of a ring.

Ranks may split the tokens of every chunk (sequence parallelism). An all-to-all then gives each of
them all tokens of the chunk and a share of the heads (Ulysses), of which it keeps the rows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from longspan.attention.context_parallel.chunk_rows import (
    DenseRows,
    EarlierRows,
    Rows,
    SparseRows,
)
from longspan.attention.context_parallel.shards import Heads, Shards
from longspan.attention.context_parallel.sparse_kv import attend_over_rows
from longspan.attention.context_parallel.ulysses import mask_of_heads, ulysses_attention
from longspan.attention.functional import attend, attend_checked
from longspan.attention.mask import Mask, check_mask, check_tensors
from longspan.attention.merge import (
    attend_partial,
    has_flash_kernel,
    merge_partial,
    merge_sinks,
    partial_gradients,
    sink_gradient,
)
from longspan.attention.packed import Packed
from longspan.attention.pattern import Dense, Dilated, Pattern
from longspan.dtypes import accumulation_dtype
from longspan.torch_internals import never_compiled


class Walk:
    """Where a rank is in the sequence that it walks, and what each layer has kept of it.

    Outside of `begin` and `end` it is nowhere, and attention is that of whole sequences.
    """

    def __init__(self, *, offload: bool = False, group: dist.ProcessGroup | None = None) -> None:
        """`offload`: keep rows in the memory of the CPU; `group`: the ranks that split chunks."""
        self.offload, self.group = offload, group
        self.rank = 0 if group is None else dist.get_rank(group)
        self.ranks = 1 if group is None else dist.get_world_size(group)
        self.shards: Shards | None = None
        self.documents: tuple[int, ...] = ()
        self.chunk, self.keeps = 0, False
        self.layers = dict[int, Rows]()

    def begin(self, shards: Shards, documents: tuple[int, ...] = ()) -> None:
        """Begin a sequence of chunks; `documents`: where documents start, if there are any."""
        self.shards, self.documents = shards, documents

    def enter(self, chunk: int, *, keeps: bool) -> None:
        """Come to a chunk; `keeps`: to keep the rows of it that later ones see."""
        self.chunk, self.keeps = chunk, keeps

    @property
    def chunk_shards(self) -> Shards:
        """How ranks split the tokens of the chunk."""
        assert self.shards is not None
        return Shards.even(self.shards.length(self.chunk), self.ranks)

    @property
    def local_range(self) -> range:
        """The positions of this rank's tokens of the chunk."""
        assert self.shards is not None
        local, first = self.chunk_shards.local_range(self.rank), self.shards.boundaries[self.chunk]
        return range(first + local.start, first + local.stop)

    def end(self) -> None:
        self.shards = None
        self.layers.clear()

    def rows(self, layer: int, pattern: Pattern, q: Tensor, k: Tensor, scale: float) -> Rows:
        """What a layer has kept."""
        assert self.shards is not None
        if layer not in self.layers:
            inner = pattern.inner if isinstance(pattern, Packed) else pattern
            heads, device = Heads(q.shape[2], k.shape[2]), self._device(k)
            has_pieces = isinstance(inner, Dense) and has_flash_kernel(q, scale)
            self.layers[layer] = (
                DenseRows(self.shards, device)
                if has_pieces
                else SparseRows(pattern, self.shards, heads, device)
            )
        return self.layers[layer]

    def _device(self, like: Tensor) -> torch.device:
        return torch.device("cpu") if self.offload else like.device


@dataclass(frozen=True, eq=False)
class ChunkAttention:
    """The attention function of one layer of a walk.

    An object, of which torch.compile sees the class alone: it would compile a block anew for the
    number of each layer.
    """

    walk: Walk
    layer: int

    @never_compiled
    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        pattern: Pattern,
        *,
        documents: Tensor | None = None,
        sink_logits: Tensor | None = None,
    ) -> Tensor:
        """`attend`, causal, for the chunk that the walk is at.

        q: (batch, this rank's tokens of the chunk, heads, head_dim); k, v: the same with a divisor
        of q's heads. `documents`: those of a whole sequence outside of a walk, which knows its own.
        """
        walk = self.walk
        if walk.shards is None:
            return attend(q, k, v, pattern, documents=documents, sink_logits=sink_logits)
        assert documents is None
        if walk.documents:
            pattern = Packed(pattern, walk.documents)
        mask = Mask(pattern, sink_logits=sink_logits)
        check_tensors(q, k, v)
        check_mask(q, mask, k.shape[1])
        if walk.group is None:
            return _attend_in_chunk(q, k, v, mask, walk, self.layer)
        of_heads = mask_of_heads(mask, q.shape[2], walk.ranks, walk.rank)
        attend_heads = partial(_attend_in_chunk, mask=of_heads, walk=walk, layer=self.layer)
        shards, name = walk.chunk_shards, walk.group.group_name
        return ulysses_attention(q, k, v, attend_heads, shards, walk.rank, name)


def _attend_in_chunk(q: Tensor, k: Tensor, v: Tensor, mask: Mask, walk: Walk, layer: int) -> Tensor:
    """The attention of all tokens of a chunk, of this rank's heads."""
    assert walk.shards is not None
    scale, pattern = q.shape[-1] ** -0.5, mask.pattern
    shards, chunk = walk.shards, walk.chunk
    rows = walk.rows(layer, pattern, q, k, scale)
    k, v = _Keep.apply(k, v, rows, chunk, walk.keeps)  # type: ignore[no-untyped-call]
    local = shards.local_range(chunk)
    if not isinstance(pattern, Packed):
        return _attend(q, k, v, mask, scale, rows, chunk, local, 0)
    # A document that began in an earlier chunk, and whole ones after it.
    begin, first, last = next(pattern.documents(local.start, local.stop))
    count, outputs = last - first if first else 0, list[Tensor]()
    if count:
        inputs = q[:, :count], k[:, :count], v[:, :count]
        inner = replace(mask, pattern=pattern.inner)
        outputs.append(_attend(*inputs, inner, scale, rows, chunk, range(first, last), begin))
    if count < len(local):
        first_start = local.start + count
        found = pattern.documents(first_start, local.stop)
        starts = tuple(start - first_start for start, _, _ in found)
        whole = replace(mask, pattern=Packed(pattern.inner, starts))
        outputs.append(attend_checked(q[:, count:], k[:, count:], v[:, count:], whole, scale))
    return torch.cat(outputs, dim=1)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float, rows: Rows, chunk: int,
    local: range, begin: int,
) -> Tensor:  # fmt: skip
    """The attention of positions `local` in a document that begins at position `begin`."""
    if _is_whole(mask.pattern, local.start):
        return attend_checked(q, k, v, mask, scale)
    if isinstance(rows, DenseRows):
        out: Tensor = _PrefixAttention.apply(  # type: ignore[no-untyped-call]
            q, k, v, mask.sink_logits, scale, rows, rows.pieces(chunk, begin)
        )
        return out
    earlier = EarlierRows(rows, rows.plan(chunk, q.device))
    has_kernels = has_flash_kernel(q, scale)
    return attend_over_rows(q, k, v, mask, scale, earlier, local, local.stop, has_kernels)


def _is_whole(pattern: Pattern, start: int) -> bool:
    """Whether queries from `start` on see no earlier key, and have the pattern of a sequence."""
    if isinstance(pattern, Dilated):
        return all(start % w == 0 for w in pattern.segment_lengths)
    return start == 0


class _Keep(torch.autograd.Function):
    """k and v themselves. A walk keeps rows of them, and adds what later chunks say of those."""

    @staticmethod
    def forward(
        ctx: Any, k: Tensor, v: Tensor, rows: Rows, chunk: int, keeps: bool
    ) -> tuple[Tensor, Tensor]:
        ctx.rows, ctx.chunk = rows, chunk
        if keeps:
            rows.keep(chunk, k, v)
        return k.view_as(k), v.view_as(v)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_k: Tensor, grad_v: Tensor) -> tuple[Tensor | None, ...]:
        grad_k, grad_v = ctx.rows.add_to(ctx.chunk, grad_k, grad_v)
        return grad_k, grad_v, None, None, None


class _PrefixAttention(torch.autograd.Function):
    """Dense causal attention over a chunk's own keys and all of earlier chunks."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, scale: float,
        rows: DenseRows, pieces: list[tuple[int, slice]],
    ) -> Tensor:  # fmt: skip
        local, local_lse = attend_partial(q, k, v, is_causal=True, scale=scale)
        merged, lse = local.to(accumulation_dtype(q), copy=True), local_lse.clone()
        for piece in pieces:
            partial = attend_partial(q, *rows.read(piece, q.device), is_causal=False, scale=scale)
            merge_partial(merged, lse, *partial)
        out, lse = merge_sinks(merged.to(q.dtype), lse, sinks)
        ctx.save_for_backward(q, k, v, out, lse, sinks)
        ctx.scale, ctx.rows, ctx.pieces = scale, rows, pieces
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, sinks = ctx.saved_tensors
        found = partial_gradients(grad, q, k, v, out, lse, is_causal=True, scale=ctx.scale)
        grad_q, grad_k, grad_v = found[0].to(lse.dtype), *found[1:]
        for piece in ctx.pieces:
            keys, values = ctx.rows.read(piece, q.device)
            partial_q, *grad_kv = partial_gradients(
                grad, q, keys, values, out, lse, is_causal=False, scale=ctx.scale
            )
            grad_q += partial_q
            if any(ctx.needs_input_grad[1:3]):  # else nothing is added to any key
                ctx.rows.add(piece, *grad_kv)
        grad_sinks = sink_gradient(grad, out, lse, sinks)
        return grad_q.to(q.dtype), grad_k, grad_v, grad_sinks, None, None, None
