"""Attention by a sparse KV exchange: each rank receives exactly the remote key rows it sees.

Causal dilated attention runs in kernels if shards and segments are aligned. Every branch then
splits in two. Among local tokens it is a dilated branch of the same rate. Its remote rows lie
before all local queries, in their segment, so each query of that residue sees all of them: dense
attention of the branch's queries over the received rows, without a mask. The partials are merged by
their log-sum-exps, and each backward pass gives its exact share of the gradient (see `merge`). Rows
are communicated while the local partial is computed, forward and backward.

A causal window runs in its kernels on a GPU, over received and local rows together: they are the
sinks and the window of the first document, and whole documents. Any other pattern or mask runs in
the reference backend, also on both together.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from longspan.attention.context_parallel.kv_exchange import (
    CACHED_BYTES,
    RemoteRows,
    RowPlan,
    plan_exchange,
)
from longspan.attention.context_parallel.shards import Heads, Shards
from longspan.attention.custom_op import attend_branches_with_lse, branch_gradients
from longspan.attention.functional import triton_problem
from longspan.attention.kernels.spans import Span, shard_spans
from longspan.attention.mask import Mask
from longspan.attention.merge import (
    attend_partial,
    merge_partial,
    merge_sinks,
    partial_gradients,
    sink_gradient,
)
from longspan.attention.packed import Packed
from longspan.attention.pattern import Dilated
from longspan.attention.reference import Places, reference_attention
from longspan.attention.window import Window
from longspan.caching import cached_up_to
from longspan.dtypes import accumulation_dtype
from longspan.torch_internals import wait


def sparse_kv_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float, shards: Shards, rank: int,
    group: str, has_kernels: bool,
) -> Tensor:  # fmt: skip
    """q (batch, local tokens, heads, head_dim); k, v the same with a divisor of q's heads."""
    heads, local = Heads(q.shape[2], k.shape[2]), shards.local_range(rank)
    exchange = plan_exchange(mask.pattern, shards, rank, heads, mask.is_causal, q.device)
    # Ranks may differ in what follows: all paths send and receive the same rows.
    return attend_over_rows(
        q, k, v, mask, scale, exchange, local, shards.tokens, has_kernels, group
    )


def attend_over_rows(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float, exchange: RemoteRows, local: range,
    tokens: int, has_kernels: bool, group: str = "",
) -> Tensor:  # fmt: skip
    """q at the positions `local` of `tokens`, over its own keys and those that `exchange` has."""
    pattern, heads = mask.pattern, Heads(q.shape[2], k.shape[2])
    if has_kernels and mask.is_causal and isinstance(pattern, Dilated) and pattern.blocks is None:
        split = split_dilated(pattern, local, heads, exchange.plan, q.device)
        if split is not None:
            out: Tensor = _SplitAttention.apply(  # type: ignore[no-untyped-call]
                q, k, v, mask.sink_logits, split, exchange, scale, group
            )
            return out
    k_rows, v_rows = exchange.receive(k, v, group)
    inner = pattern.inner if isinstance(pattern, Packed) else pattern
    if has_kernels and mask.is_causal and isinstance(inner, Window) and q.device.type == "cuda":
        spans = shard_spans(pattern, exchange.plan.positions[0], local)
        if spans is not None and triton_problem(q, k, Mask(inner)) is None:
            rows, sinks = (k_rows, v_rows), mask.sink_logits
            return _attend_window(q, k, v, rows, sinks, inner, scale, exchange.plan, spans)
    return _attend_reference(q, k, v, k_rows, v_rows, mask, scale, exchange.plan, local, tokens)


@dataclass(frozen=True, eq=False)
class RemotePartial:
    """Queries of a branch, equally many of each of its heads, and the received rows they see."""

    queries: Tensor  # (rows, heads): indices into `DilatedSplit.queries`
    keys: Tensor  # (rows, heads): indices into the received rows

    def keys_and_values(self, received: Tensor) -> tuple[Tensor, Tensor]:
        """Received rows (all, 2, batch, head_dim) to keys and values (batch, rows, heads, ...)."""
        keys, values = received[self.keys].permute(2, 3, 0, 1, 4)
        return keys, values


@dataclass(frozen=True, eq=False)
class DilatedSplit:
    """A dilated pattern on one rank: a pattern of local tokens, and partials over remote rows."""

    local: Dilated
    remote: tuple[RemotePartial, ...]
    queries: Tensor  # of the local (tokens · heads): the queries of all remote partials

    def rows(self, x: Tensor) -> Tensor:
        """Copy the rows of those queries: (batch, tokens, heads, ...) to (batch, rows, ...)."""
        return x.flatten(1, 2)[:, self.queries]

    def with_rows(self, x: Tensor, rows: Tensor) -> Tensor:
        """A copy of `x` with the rows of those queries replaced."""
        return x.flatten(1, 2).index_copy(1, self.queries, rows.to(x.dtype)).view(x.shape)


@cached_up_to(CACHED_BYTES)
@torch.inference_mode(False)
def split_dilated(
    pattern: Dilated, local: range, heads: Heads, plan: RowPlan, device: torch.device
) -> DilatedSplit | None:
    """None if a segment from an earlier shard ends inside this one."""
    lengths, pairs = [], []
    # The residues of local positions: a shard need not begin at a multiple of every rate.
    first_head = (pattern.first_head - local.start) % math.lcm(*pattern.dilation_rates)
    for w, r in pattern.branches:
        start = local.start // w * w
        if start == local.start:
            lengths.append(w)
            continue
        if local.stop > start + w:
            return None
        lengths.append(-(-len(local) // r) * r)
        residues = {head: (first_head + head) % r for head in range(heads.queries)}
        seen = {
            head: range(start + (pattern.first_head + head) % r, local.start, r)
            for head in residues
        }
        whole = len(local) // r  # rows of every head; the first residues have one more
        rest = [head for head, residue in residues.items() if residue < len(local) % r]
        for first, last, readers in ((0, whole, list(residues)), (whole, whole + 1, rest)):
            for count in {len(seen[head]) for head in readers} - {0} if first < last else ():
                rows, group = (
                    torch.arange(first, last),
                    [h for h in readers if len(seen[h]) == count],
                )
                queries = [(residues[h] + r * rows) * heads.queries + h for h in group]
                keys = [_received_index(plan, heads, h, seen[h]) for h in group]
                pairs.append((torch.stack(queries, dim=1), torch.stack(keys, dim=1)))
    every = [torch.zeros(0, dtype=torch.int64), *(queries.flatten() for queries, _ in pairs)]
    unique, index = torch.unique(torch.cat(every), return_inverse=True)
    indices = index.split([queries.numel() for queries, _ in pairs])
    remote = tuple(
        RemotePartial(i.view(queries.shape).to(device), keys.to(device))
        for i, (queries, keys) in zip(indices, pairs, strict=True)
    )
    in_shard = replace(pattern, segment_lengths=tuple(lengths), first_head=first_head)
    return DilatedSplit(in_shard, remote, unique.to(device))


def _received_index(plan: RowPlan, heads: Heads, head: int, rows: range) -> Tensor:
    """The indices among the received rows of positions that a query head sees."""
    key_head = head * heads.keys // heads.queries
    seen = torch.arange(rows.start, rows.stop, rows.step)
    places = torch.searchsorted(plan.positions[key_head], seen)
    return plan.places[key_head][places]


class _SplitAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, split: DilatedSplit,
        exchange: RemoteRows, scale: float, group: str,
    ) -> Tensor:  # fmt: skip
        pending = exchange.send_async(k, v, group)
        out, lse = attend_branches_with_lse(q, k, v, split.local, scale)
        queries, merged, merged_lse = split.rows(q), split.rows(out), split.rows(lse)
        merged = merged.to(accumulation_dtype(q))
        received = wait(pending)  # (rows, 2, batch, head_dim)
        for remote in split.remote:
            at, (keys, values) = remote.queries, remote.keys_and_values(received)
            partial = attend_partial(queries[:, at], keys, values, is_causal=False, scale=scale)
            rows, rows_lse = merged[:, at], merged_lse[:, at]
            merge_partial(rows, rows_lse, *partial)
            merged[:, at], merged_lse[:, at] = rows, rows_lse
        out, lse = split.with_rows(out, merged), split.with_rows(lse, merged_lse)
        out, lse = merge_sinks(out, lse, sinks)
        ctx.save_for_backward(q, k, v, out, lse, received, sinks)
        ctx.split, ctx.exchange, ctx.scale, ctx.group = split, exchange, scale, group
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, received, sinks = ctx.saved_tensors
        split, exchange = ctx.split, ctx.exchange
        saved = [split.rows(x) for x in (grad, q, out, lse)]
        remote_grad_q = torch.zeros_like(saved[1], dtype=lse.dtype)
        grad_rows = torch.zeros_like(received, dtype=lse.dtype)
        for remote in split.remote:
            at, (keys, values) = remote.queries, remote.keys_and_values(received)
            at_grad, at_q, at_out, at_lse = (x[:, at] for x in saved)
            partial_q, *partial_kv = partial_gradients(
                at_grad, at_q, keys, values, at_out, at_lse, is_causal=False, scale=ctx.scale
            )
            remote_grad_q[:, at] += partial_q
            rows = torch.stack(partial_kv).permute(2, 3, 0, 1, 4).flatten(0, 1)
            # Several heads and branches contribute to a row.
            grad_rows.index_add_(0, remote.keys.flatten(), rows.to(grad_rows.dtype))
        # As in `KVExchange.receive`, gradients are returned only if keys or values need them.
        needs_kv = any(ctx.needs_input_grad[1:3])
        pending = exchange.return_async(grad_rows, q.dtype, ctx.group) if needs_kv else grad_rows
        local_q, *local_kv = branch_gradients(grad, q, k, v, out, lse, split.local, ctx.scale)
        grad_q = split.with_rows(local_q, split.rows(local_q) + remote_grad_q)
        grad_sinks = sink_gradient(grad, out, lse, sinks)
        if not needs_kv:
            return grad_q, None, None, grad_sinks, *[None] * 4
        returned = wait(pending)
        grad_kv = (exchange.add_returned(x, returned[:, i]) for i, x in enumerate(local_kv))
        return grad_q, *grad_kv, grad_sinks, *[None] * 4


def _attend_window(
    q: Tensor, k: Tensor, v: Tensor, received: tuple[Tensor, Tensor], sinks: Tensor | None,
    pattern: Window, scale: float, plan: RowPlan, spans: tuple[Span, ...],
) -> Tensor:  # fmt: skip
    from longspan.attention.kernels.window import attend_spans

    index = torch.stack(plan.received, dim=1)  # (rows, key heads): all heads see the same rows
    keys, values = (
        torch.cat([rows[index].permute(2, 0, 1, 3), x], dim=1)
        for rows, x in zip(received, (k, v), strict=True)
    )
    return attend_spans(q, keys, values, sinks, pattern, scale, spans)


def _attend_reference(
    q: Tensor, k: Tensor, v: Tensor, k_rows: Tensor, v_rows: Tensor, mask: Mask, scale: float,
    plan: RowPlan, local: range, tokens: int,
) -> Tensor:  # fmt: skip
    """One key head at a time, since each has received other rows."""
    outputs = []
    for key_head in range(k.shape[2]):
        readers = Heads(q.shape[2], k.shape[2]).query_heads(key_head)
        index, positions = plan.received[key_head], plan.positions[key_head]
        before = int(torch.searchsorted(positions, local.start))
        key, value = (
            torch.cat([rows[:, :before], x[:, :, key_head], rows[:, before:]], dim=1)[:, :, None]
            for x, rows in ((k, k_rows[index].transpose(0, 1)), (v, v_rows[index].transpose(0, 1)))
        )
        outputs.append(
            reference_attention(
                q[:, :, readers.start : readers.stop],
                key,
                value,
                mask,
                scale,
                Places(
                    torch.cat([positions[:before], torch.tensor(local), positions[before:]]),
                    local.start,
                    readers.start,
                    tokens,
                ),
            )
        )
    return torch.cat(outputs, dim=2)
