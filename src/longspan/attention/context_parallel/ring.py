"""Dense attention over shards in rounds: keys come from one other rank at a time.

In round s a rank takes the keys of the rank s before it while its own go to the rank s after it;
each part is joined to the others by its log-sum-exp, in float32 (see `parts.py`). No rank ever
holds the keys of more than two others. What causality hides from all queries of a rank is not sent
to it, so every rank receives what its queries see and nothing else. The backward pass fetches the
keys again and sends their gradients to whom they belong.

Pieces of a rank rise with the sequence. So the keys that a rank sees of another's are the first
ones, and those that see them are its last queries.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from longspan.attention.context_parallel.kv_exchange import arrived, start
from longspan.attention.context_parallel.shards import Shards
from longspan.attention.merge import attend_part, exact_type, join_part, part_gradients


@dataclass(frozen=True)
class Round:
    """Keys that come from `source`, while the first `given` own ones go to `destination`."""

    source: int
    destination: int
    given: int
    taken: int
    calls: tuple[tuple[int, slice], ...]  # queries from the first on, over some of those keys


def seen_keys(shards: Shards, reader: int, owner: int, is_causal: bool) -> int:
    """How many of its first keys `owner` gives to `reader`."""
    last = shards.pieces(reader)[-1].start
    return sum(len(p) for p in shards.pieces(owner) if not is_causal or p.start < last)


@lru_cache(maxsize=64)
def rounds_of(shards: Shards, rank: int, is_causal: bool) -> tuple[Round, ...]:
    found = []
    for s in range(1, shards.ranks):
        source, destination = (rank - s) % shards.ranks, (rank + s) % shards.ranks
        given = seen_keys(shards, destination, rank, is_causal)
        taken = seen_keys(shards, rank, source, is_causal)
        calls = _calls(shards, rank, source, taken, is_causal)
        found.append(Round(source, destination, given, taken, calls))
    return tuple(found)


def _calls(
    shards: Shards, rank: int, source: int, taken: int, is_causal: bool
) -> tuple[tuple[int, slice], ...]:
    calls: list[tuple[int, slice]] = []
    key = 0
    for piece in shards.pieces(source):
        if key == taken:
            break
        before = [p for p in shards.pieces(rank) if is_causal and p.start < piece.start]
        first, keys = sum(map(len, before)), slice(key, key + len(piece))
        if calls and calls[-1][0] == first:  # the same queries see the piece before as well
            keys = slice(calls.pop()[1].start, keys.stop)
        calls.append((first, keys))
        key += len(piece)
    return tuple(calls)


def attend_in_rounds(
    q: Tensor, k: Tensor, v: Tensor, shards: Shards, rank: int, *, is_causal: bool, scale: float,
    group: str,
) -> Tensor:  # fmt: skip
    """q (batch, own tokens, heads, head_dim); k, v the same with heads that divide q's."""
    out: Tensor = _InRounds.apply(  # type: ignore[no-untyped-call]
        q, k, v, shards.borders, shards.is_zigzag, rank, is_causal, scale, group
    )
    return out


def _pack(k: Tensor, v: Tensor) -> Tensor:
    """(batch, tokens, heads, head_dim) each to (tokens, 2, batch, heads, head_dim)."""
    return torch.stack([k, v]).permute(2, 0, 1, 3, 4).contiguous()


def _unpack(kv: Tensor) -> tuple[Tensor, Tensor]:
    k, v = kv.permute(1, 2, 0, 3, 4)
    return k, v


def _send(x: Tensor, to: int, count: int, source: int, ranks: int, group: str) -> Tensor:
    """All of `x` to one rank, and begin to receive `count` rows from another."""
    given, taken = [0] * ranks, [0] * ranks
    given[to], taken[source] = len(x), count
    return start(x, given, taken, group)


def _keys(kv: Tensor, a: Round, ranks: int, group: str) -> Tensor:
    return _send(kv[: a.given], a.destination, a.taken, a.source, ranks, group)


def _forward(
    q: Tensor, k: Tensor, v: Tensor, borders: Sequence[int], is_zigzag: bool, rank: int,
    is_causal: bool, scale: float, group: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The output, and its log-sum-exp (batch, tokens, heads)."""
    shards = Shards(tuple(borders), is_zigzag)
    rounds, kv = rounds_of(shards, rank, is_causal), _pack(k, v)
    coming = [_keys(kv, rounds[0], shards.ranks, group)]
    own, own_lse = attend_part(q, k, v, is_causal=is_causal, scale=scale)
    out, lse = own.to(exact_type(q)), own_lse.contiguous()
    for number, a in enumerate(rounds):
        keys, values = _unpack(arrived(coming.pop()))
        if number + 1 < len(rounds):
            coming.append(_keys(kv, rounds[number + 1], shards.ranks, group))
        for first, part in a.calls:
            found = attend_part(
                q[:, first:], keys[:, part], values[:, part], is_causal=False, scale=scale
            )
            join_part(out[:, first:], lse[:, first:], *found)
    return out.to(q.dtype, copy=True), lse


ring_attention = torch.library.custom_op("longspan::ring_attention", _forward, mutates_args=())
"""An operator, so that it can be kept where activations are computed again (`parallel/remat.py`):
its keys would have to travel again.
"""


class _InRounds(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, *settings: Any) -> Tensor:
        out: Tensor
        out, lse = ring_attention(q, k, v, *settings)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.settings = settings
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        borders, is_zigzag, rank, is_causal, scale, group = ctx.settings
        shards = Shards(borders, is_zigzag)
        rounds, kv = rounds_of(shards, rank, is_causal), _pack(k, v)
        coming = [_keys(kv, rounds[0], shards.ranks, group)]
        own = part_gradients(grad, q, k, v, out, lse, is_causal=is_causal, scale=scale)
        grad_q, grad_k, grad_v = (x.to(lse.dtype) for x in own)
        grad_kv, returning = _pack(grad_k, grad_v), list[Tensor]()
        for number, a in enumerate(rounds):
            rows = arrived(coming.pop())
            if number + 1 < len(rounds):
                coming.append(_keys(kv, rounds[number + 1], shards.ranks, group))
            keys, values = _unpack(rows)
            shares = torch.zeros_like(rows, dtype=lse.dtype)
            for first, part in a.calls:
                share_q, *share = part_gradients(
                    grad[:, first:], q[:, first:], keys[:, part], values[:, part], out[:, first:],
                    lse[:, first:], is_causal=False, scale=scale,
                )  # fmt: skip
                grad_q[:, first:] += share_q
                shares[part] += _pack(*share)
            # Awaited a round later, when it has had the time of a round to come.
            returning.append(
                _send(shares.to(q.dtype), a.source, a.given, a.destination, shards.ranks, group)
            )
            if number > 0:
                _add(grad_kv, returning.pop(0))
        for x in returning:
            _add(grad_kv, x)
        grads = (grad_q, *_unpack(grad_kv))
        return (*(x.to(q.dtype) for x in grads), *[None] * 6)


def _add(grad_kv: Tensor, returned: Tensor) -> None:
    grad_kv[: len(returned)] += arrived(returned)
