"""Causal dilated attention over shards, by kernels for what a rank holds and for what it fetches.

Where shards and segments fit each other, every branch falls into two parts. Among a rank's own
tokens it is a dilated branch of the same rate. And the rows it fetches lie before all of the rank's
queries, in their segment: each query of that residue sees all of them. That part is plain dense
attention of the branch's queries over the fetched rows, without a mask. The parts are joined by
their log-sum-exps, and a part's share of the gradient follows from the joined result (see
`parts.py`).

Rows are on their way while the own part is computed, forward and backward.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from longspan.attention.context_parallel.kv_exchange import (
    Plan,
    arrived,
    plan_of,
    return_gradients,
    send_rows,
    with_returned,
)
from longspan.attention.context_parallel.shards import Heads, Shards
from longspan.attention.custom_op import branch_forward, branch_gradients
from longspan.attention.merge import attend_part, exact_type, join_part, part_gradients
from longspan.attention.pattern import Dilated


@dataclass(frozen=True, eq=False)
class Crossing:
    """Queries of a branch, as many of each of its heads, and the fetched rows that they see."""

    queries: Tensor  # (rows, heads) of `Parts.touched`
    keys: Tensor  # (rows, heads) of the fetched rows

    def of_fetched(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Fetched rows (all, 2, batch, head_dim) to keys and values (batch, rows, heads, ...)."""
        keys, values = rows[self.keys].permute(2, 3, 0, 1, 4)
        return keys, values


@dataclass(frozen=True, eq=False)
class Parts:
    """A pattern as one rank sees it: branches among its own tokens, and crossings."""

    segment_lengths: tuple[int, ...]
    crossings: tuple[Crossing, ...]
    touched: Tensor  # of the own (tokens · heads): the queries of all crossings

    def rows(self, x: Tensor) -> Tensor:
        """(batch, tokens, heads, ...) to what is touched of it (batch, rows, ...), a copy."""
        return x.flatten(1, 2)[:, self.touched]

    def replaced(self, x: Tensor, rows: Tensor) -> Tensor:
        """`x` with other rows where it is touched, a copy."""
        return x.flatten(1, 2).index_copy(1, self.touched, rows.to(x.dtype)).view(x.shape)


@lru_cache(maxsize=64)
@torch.inference_mode(False)
def parts_of(
    pattern: Dilated, shards: Shards, rank: int, heads: Heads, device: torch.device
) -> Parts | None:
    """None where a segment that began before the shard ends within it, or residues do not fit."""
    own, plan = shards.of(rank), plan_of(pattern, shards, rank, heads, True, device)
    lengths, pairs = [], []
    for w, r in pattern.branches:
        start = own.start // w * w
        if start == own.start:
            lengths.append(w)
            continue
        if own.stop > start + w or own.start % r:
            return None
        lengths.append(-(-len(own) // r) * r)
        residues = {head: (pattern.first_head + head) % r for head in range(heads.queries)}
        whole = len(own) // r  # rows of every head; of the first residues there is one more
        rest = [head for head, residue in residues.items() if residue < len(own) % r]
        for first, last, readers in ((0, whole, list(residues)), (whole, whole + 1, rest)):
            if first < last and readers:
                rows = torch.arange(first, last)
                queries = [(residues[h] + r * rows) * heads.queries + h for h in readers]
                firsts = [start + residues[h] for h in readers]
                keys = [
                    _fetched(plan, heads, h, first_row, own.start, r)
                    for h, first_row in zip(readers, firsts, strict=True)
                ]
                pairs.append((torch.stack(queries, dim=1), torch.stack(keys, dim=1)))
    every = [torch.zeros(0, dtype=torch.int64), *(queries.flatten() for queries, _ in pairs)]
    touched, index = torch.unique(torch.cat(every), return_inverse=True)
    parts = index.split([queries.numel() for queries, _ in pairs])
    crossings = tuple(
        Crossing(part.view(queries.shape).to(device), keys.to(device))
        for part, (queries, keys) in zip(parts, pairs, strict=True)
    )
    return Parts(tuple(lengths), crossings, touched.to(device))


def _fetched(plan: Plan, heads: Heads, head: int, first: int, stop: int, step: int) -> Tensor:
    """Which of the fetched rows are those of a query head at first, first + step, …"""
    key_head = head * heads.keys // heads.queries
    positions = torch.arange(first, stop, step)
    return plan.received[key_head].cpu()[torch.searchsorted(plan.positions[key_head], positions)]


def attend_in_parts(
    q: Tensor, k: Tensor, v: Tensor, pattern: Dilated, parts: Parts, plan: Plan, scale: float,
    group: str,
) -> Tensor:  # fmt: skip
    """q (batch, own tokens, heads, head_dim); k, v the same with heads that divide q's."""
    out: Tensor = _AttendInParts.apply(  # type: ignore[no-untyped-call]
        q, k, v, pattern, parts, plan, scale, group
    )
    return out


class _AttendInParts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, pattern: Dilated, parts: Parts, plan: Plan,
        scale: float, group: str,
    ) -> Tensor:  # fmt: skip
        under_way = send_rows(k, v, plan, group)
        branches = (parts.segment_lengths, pattern.dilation_rates, pattern.first_head, scale)
        out, lse = branch_forward(q, k, v, *branches)
        queries, exact, exact_lse = parts.rows(q), parts.rows(out), parts.rows(lse)
        exact = exact.to(exact_type(q))
        fetched = arrived(under_way)  # (rows, 2, batch, head_dim)
        for crossing in parts.crossings:
            at, (keys, values) = crossing.queries, crossing.of_fetched(fetched)
            part = attend_part(queries[:, at], keys, values, is_causal=False, scale=scale)
            joined, joined_lse = exact[:, at], exact_lse[:, at]
            join_part(joined, joined_lse, *part)
            exact[:, at], exact_lse[:, at] = joined, joined_lse
        out, lse = parts.replaced(out, exact), parts.replaced(lse, exact_lse)
        ctx.save_for_backward(q, k, v, out, lse, fetched)
        ctx.branches, ctx.parts, ctx.plan, ctx.group = branches, parts, plan, group
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, fetched = ctx.saved_tensors
        parts, plan = ctx.parts, ctx.plan
        own = [parts.rows(x) for x in (grad, q, out, lse)]
        grad_q = torch.zeros_like(own[1], dtype=lse.dtype)
        grad_rows = torch.zeros_like(fetched, dtype=lse.dtype)
        for crossing in parts.crossings:
            at, (keys, values) = crossing.queries, crossing.of_fetched(fetched)
            own_grad, own_q, own_out, own_lse = (x[:, at] for x in own)
            share_q, *shares = part_gradients(
                own_grad, own_q, keys, values, own_out, own_lse, is_causal=False,
                scale=ctx.branches[-1],
            )  # fmt: skip
            grad_q[:, at] += share_q
            of_rows = torch.stack(shares).permute(2, 3, 0, 1, 4).flatten(0, 1)
            # A row gets a share from each head and branch.
            grad_rows.index_add_(0, crossing.keys.flatten(), of_rows.to(grad_rows.dtype))
        is_wanted = any(ctx.needs_input_grad[1:3])  # as in `exchange.fetch`: else none travels
        under_way = grad_rows.to(q.dtype)
        if is_wanted:
            under_way = return_gradients(under_way, plan, ctx.group)
        local_q, *local = branch_gradients(grad, q, k, v, out, lse, *ctx.branches)
        whole_q = parts.replaced(local_q, parts.rows(local_q) + grad_q)
        if not is_wanted:
            return whole_q, *[None] * 7
        returned = arrived(under_way)
        of_keys = (with_returned(x, returned[:, i], plan) for i, x in enumerate(local))
        return whole_q, *of_keys, *[None] * 5
