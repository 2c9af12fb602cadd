"""Causal dilated attention over shards, by kernels for what a rank holds and for what it fetches.

Where shards and segments fit each other, every branch falls into two parts. Among a rank's own
tokens it is a dilated branch of the same rate. And the rows it fetches lie before all of the rank's
queries, in their segment: each query of that residue sees all of them. That part is plain dense
attention of strided queries over the fetched rows, without a mask. The parts are joined by their
log-sum-exps, and a part's share of the gradient follows from the joined result (see `views.py`).

Rows are on their way while the own part is computed, forward and backward.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from longspan.attention import views
from longspan.attention.exchange import (
    Heads,
    Plan,
    Shards,
    gathered,
    plan_of,
    return_gradients,
    send_rows,
)
from longspan.attention.pattern import Dilated


@dataclass(frozen=True, eq=False)
class Crossing:
    """The queries of one residue of a branch, and the fetched rows that each head of them sees."""

    tokens: slice
    heads: slice
    index: Tensor  # (rows, heads) of the fetched rows

    def queries(self, x: Tensor) -> Tensor:
        """(batch, tokens, heads, ...) to (batch, own heads, own tokens, ...), a view."""
        return x[:, self.tokens, self.heads].transpose(1, 2)

    def rows(self, fetched: Tensor) -> Tensor:
        """Fetched rows (all, batch, head_dim) to (batch, heads, rows, head_dim)."""
        return fetched[self.index].permute(2, 1, 0, 3)


@dataclass(frozen=True, eq=False)
class Parts:
    """A pattern as one rank sees it: branches among its own tokens, and crossings."""

    segment_lengths: tuple[int, ...]
    crossings: tuple[Crossing, ...]


@lru_cache(maxsize=64)
def parts_of(
    pattern: Dilated, shards: Shards, rank: int, heads: Heads, device: torch.device
) -> Parts | None:
    """None where a segment that began before the shard ends within it, or residues do not fit."""
    own, plan = shards.of(rank), plan_of(pattern, shards, rank, heads, True, device)
    group, lengths, crossings = heads.queries // heads.keys, [], []
    for w, r in pattern.branches:
        start = own.start // w * w
        if start == own.start:
            lengths.append(w)
            continue
        if own.stop > start + w or own.start % r:
            return None
        lengths.append(-(-len(own) // r) * r)
        for residue in range(min(r, len(own))):
            first = (residue - pattern.first_head) % r
            readers = range(first, heads.queries, r)
            positions = torch.arange(start + residue, own.start, r)
            if not readers or not len(positions):
                continue
            index = [
                plan.received[h // group][torch.searchsorted(plan.positions[h // group], positions)]
                for h in readers
            ]
            tokens = slice(residue, len(own), r)
            crossings.append(Crossing(tokens, slice(first, None, r), torch.stack(index, dim=1)))
    return Parts(tuple(lengths), tuple(crossings))


def attend_in_parts(
    q: Tensor, k: Tensor, v: Tensor, pattern: Dilated, parts: Parts, plan: Plan, scale: float,
    group: dist.ProcessGroup,
) -> Tensor:  # fmt: skip
    """q (batch, own tokens, heads, head_dim); k, v the same with heads that divide q's; on CPUs."""
    out: Tensor = _AttendInParts.apply(  # type: ignore[no-untyped-call]
        q, k, v, pattern, parts, plan, scale, group
    )
    return out


class _AttendInParts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, pattern: Dilated, parts: Parts, plan: Plan,
        scale: float, group: dist.ProcessGroup,
    ) -> Tensor:  # fmt: skip
        under_way = send_rows(k, v, plan, group)
        branches = (parts.segment_lengths, pattern.dilation_rates, pattern.first_head, True, scale)
        out, stored_lse = views.forward(q, k, v, *branches)
        exact, lse = out.to(stored_lse.dtype), stored_lse.transpose(1, 2)
        fetched = under_way.wait()  # (rows, 2, batch, head_dim)
        for crossing in parts.crossings:
            keys, values = (crossing.rows(fetched[:, i]) for i in (0, 1))
            queries = crossing.queries(q).contiguous()
            part, part_lse = views.flash(queries, keys, values, 0.0, False, scale=scale)
            views.join_part(crossing.queries(exact), crossing.queries(lse), part, part_lse)
        out = exact.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, stored_lse, fetched)
        ctx.branches, ctx.parts, ctx.plan, ctx.group = branches, parts, plan, group
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, stored_lse, fetched = ctx.saved_tensors
        scale, lse = ctx.branches[-1], stored_lse.transpose(1, 2)
        grad_rows = torch.zeros_like(fetched, dtype=lse.dtype)
        grad_q = torch.zeros_like(q, dtype=lse.dtype)
        for crossing in ctx.parts.crossings:
            keys, values = (crossing.rows(fetched[:, i]) for i in (0, 1))
            own = (crossing.queries(x).contiguous() for x in (grad, q))
            joined = (crossing.queries(x).contiguous() for x in (out, lse))
            share_q, *shares = views.flash_backward(
                *own, keys, values, *joined, 0.0, False, scale=scale
            )
            crossing.queries(grad_q).add_(share_q)
            for i, share in enumerate(shares):  # a row gets a share from each head and branch
                of_row = share.permute(2, 1, 0, 3).flatten(0, 1).to(grad_rows.dtype)
                grad_rows[:, i].index_add_(0, crossing.index.flatten(), of_row)
        under_way = return_gradients(grad_rows.to(q.dtype), ctx.plan, ctx.group)
        local_q, *local = views.backward(grad, q, k, v, out, stored_lse, *ctx.branches)
        elsewhere = gathered(under_way.wait(), ctx.plan, k.shape)
        grad_k, grad_v = (a + b for a, b in zip(local, elsewhere, strict=True))
        grads = (local_q + grad_q, grad_k, grad_v)
        return (*(x.to(q.dtype) for x in grads), *[None] * 5)
