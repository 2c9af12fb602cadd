"""Ring attention: dense attention over shards, with keys from one other rank at a time.

In round s a rank receives keys of the rank s before it and sends its own to the rank s after it.
Each partial is merged by its log-sum-exp, in float32 (see `merge`). No rank holds the keys of more
than two others at a time. Keys that causality hides from all queries of a rank are not sent to it.
The backward pass receives the keys again and returns their gradients.

The chunks of a rank are in the order of the sequence. So the keys of another rank that it sees are
the first ones, and the queries that see them are its last ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from longspan.attention.context_parallel.shards import Shards
from longspan.attention.merge import (
    attend_partial,
    merge_partial,
    merge_sinks,
    partial_gradients,
    sink_gradient,
)
from longspan.dtypes import accumulation_dtype
from longspan.torch_internals import all_to_all_async, wait


@dataclass(frozen=True)
class Round:
    """Receive keys from `source` while the first `send_count` local ones go to `destination`."""

    source: int
    destination: int
    send_count: int
    receive_count: int
    calls: tuple[tuple[int, slice], ...]  # (first query, keys): attention over some of those keys


@lru_cache(maxsize=64)
def ring_schedule(shards: Shards, rank: int, is_causal: bool) -> tuple[Round, ...]:
    rounds = []
    for s in range(1, shards.ranks):
        source, destination = (rank - s) % shards.ranks, (rank + s) % shards.ranks
        send_count = shards.visible_keys(destination, rank, is_causal)
        receive_count = shards.visible_keys(rank, source, is_causal)
        calls = _calls(shards, rank, source, receive_count, is_causal)
        rounds.append(Round(source, destination, send_count, receive_count, calls))
    return tuple(rounds)


def _calls(
    shards: Shards, rank: int, source: int, count: int, is_causal: bool
) -> tuple[tuple[int, slice], ...]:
    calls: list[tuple[int, slice]] = []
    key = 0
    for chunk in shards.chunks(source):
        if key == count:
            break
        before = [c for c in shards.chunks(rank) if is_causal and c.start < chunk.start]
        first, keys = sum(map(len, before)), slice(key, key + len(chunk))
        if calls and calls[-1][0] == first:  # the same queries see the previous chunk as well
            keys = slice(calls.pop()[1].start, keys.stop)
        calls.append((first, keys))
        key += len(chunk)
    return tuple(calls)


def ring_attention(
    q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float, shards: Shards, rank: int,
    group: str, sinks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """q (batch, local tokens, heads, head_dim); k, v the same with a divisor of q's heads.

    `sinks`: a logit per head (heads,) in the denominator of the softmax.
    """
    out: Tensor = _RingAttention.apply(  # type: ignore[no-untyped-call]
        q, k, v, sinks, is_causal, scale, shards.boundaries, shards.is_zigzag, rank, group
    )
    return out


def _pack(k: Tensor, v: Tensor) -> Tensor:
    """(batch, tokens, heads, head_dim) each to (tokens, 2, batch, heads, head_dim)."""
    return torch.stack([k, v]).permute(2, 0, 1, 3, 4).contiguous()


def _unpack(kv: Tensor) -> tuple[Tensor, Tensor]:
    k, v = kv.permute(1, 2, 0, 3, 4)
    return k, v


def _send_receive_async(
    x: Tensor, destination: int, count: int, source: int, ranks: int, group: str
) -> Tensor:
    """Start to send `x` to one rank and to receive `count` rows from another."""
    send_counts, receive_counts = [0] * ranks, [0] * ranks
    send_counts[destination], receive_counts[source] = len(x), count
    return all_to_all_async(x, send_counts, receive_counts, group)


def _exchange_keys(kv: Tensor, a: Round, ranks: int, group: str) -> Tensor:
    sent = kv[: a.send_count]
    return _send_receive_async(sent, a.destination, a.receive_count, a.source, ranks, group)


def forward_rounds(
    q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float, boundaries: Sequence[int],
    is_zigzag: bool, rank: int, group: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The output, and its log-sum-exp (batch, tokens, heads)."""
    shards = Shards(tuple(boundaries), is_zigzag)
    rounds, kv = ring_schedule(shards, rank, is_causal), _pack(k, v)
    pending = [_exchange_keys(kv, rounds[0], shards.ranks, group)]
    local, local_lse = attend_partial(q, k, v, is_causal=is_causal, scale=scale)
    out, lse = local.to(accumulation_dtype(q)), local_lse.contiguous()
    for number, a in enumerate(rounds):
        keys, values = _unpack(wait(pending.pop()))
        if number + 1 < len(rounds):
            pending.append(_exchange_keys(kv, rounds[number + 1], shards.ranks, group))
        for first, part in a.calls:
            partial = attend_partial(
                q[:, first:], keys[:, part], values[:, part], is_causal=False, scale=scale
            )
            merge_partial(out[:, first:], lse[:, first:], *partial)
    return out.to(q.dtype, copy=True), lse


ring_forward = torch.library.custom_op("longspan::ring_attention", forward_rounds, mutates_args=())
"""A custom operator, so that selective activation checkpointing can save its output: recomputing it
would communicate the keys again (see `parallel/activation_checkpointing.py`).
"""


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, *settings: Any
    ) -> Tensor:
        out: Tensor
        out, lse = ring_forward(q, k, v, *settings)
        out, lse = merge_sinks(out, lse, sinks)
        ctx.save_for_backward(q, k, v, out, lse, sinks)
        ctx.settings = settings
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, sinks = ctx.saved_tensors
        is_causal, scale, boundaries, is_zigzag, rank, group = ctx.settings
        shards = Shards(boundaries, is_zigzag)
        rounds, kv = ring_schedule(shards, rank, is_causal), _pack(k, v)
        pending = [_exchange_keys(kv, rounds[0], shards.ranks, group)]
        local = partial_gradients(grad, q, k, v, out, lse, is_causal=is_causal, scale=scale)
        grad_q, grad_k, grad_v = (x.to(lse.dtype) for x in local)
        grad_kv, returning = _pack(grad_k, grad_v), list[Tensor]()
        for number, a in enumerate(rounds):
            rows = wait(pending.pop())
            if number + 1 < len(rounds):
                pending.append(_exchange_keys(kv, rounds[number + 1], shards.ranks, group))
            keys, values = _unpack(rows)
            grad_rows = torch.zeros_like(rows, dtype=lse.dtype)
            for first, part in a.calls:
                partial_q, *partial_kv = partial_gradients(
                    grad[:, first:], q[:, first:], keys[:, part], values[:, part], out[:, first:],
                    lse[:, first:], is_causal=False, scale=scale,
                )  # fmt: skip
                grad_q[:, first:] += partial_q
                grad_rows[part] += _pack(*partial_kv)
            grad_rows = grad_rows.to(q.dtype)
            returning.append(
                _send_receive_async(
                    grad_rows, a.source, a.send_count, a.destination, shards.ranks, group
                )
            )
            if number > 0:  # wait a round later, so that the transfer overlaps a round's compute
                _add_returned(grad_kv, returning.pop(0))
        for x in returning:
            _add_returned(grad_kv, x)
        grads = (grad_q, *_unpack(grad_kv))
        grad_sinks = sink_gradient(grad, out, lse, sinks)
        return (*(x.to(q.dtype) for x in grads), grad_sinks, *[None] * 6)


def _add_returned(grad_kv: Tensor, returned: Tensor) -> None:
    grad_kv[: len(returned)] += wait(returned)
