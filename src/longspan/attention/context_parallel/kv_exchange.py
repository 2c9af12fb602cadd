"""Which key rows a shard of a sequence needs from the other shards, and fetching exactly those.

A sequence lies on the ranks of a group in consecutive shards. What a shard's queries see outside
it follows from the pattern, so every rank knows, without asking, which of its rows go to whom. A
row travels once, whatever the number of branches and of query heads that read it, and its gradient
travels back. A branch whose segments lie inside shards sends nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from longspan.attention.context_parallel.shards import Heads, Shards
from longspan.attention.merge import exact_type
from longspan.attention.pattern import Dense, Dilated, Pattern


@lru_cache(maxsize=2048)
@torch.inference_mode(False)  # what is kept may be used in training later
def outer_rows(
    pattern: Pattern, shards: Shards, rank: int, heads: Heads, is_causal: bool
) -> tuple[Tensor, ...]:
    """Positions outside its shard that a rank's queries see, sorted, for each key head."""
    own = shards.of(rank)
    if not isinstance(pattern, Dilated):  # alike for all heads
        span = own.start, own.stop, shards.tokens
        return (pattern.outer_rows(*span, 0, is_causal=is_causal),) * heads.keys
    found = []
    for key_head in range(heads.keys):
        rows = [
            pattern.outer_rows(own.start, own.stop, shards.tokens, head, is_causal=is_causal)
            for head in heads.readers(key_head)
        ]
        found.append(rows[0] if len(rows) == 1 else torch.unique(torch.cat(rows)))
    return tuple(found)


def rows_seen_elsewhere(
    pattern: Pattern, shards: Shards, rank: int, heads: Heads, is_causal: bool
) -> int:
    """How many rows of all key heads a rank's queries see outside its pieces.

    No exchange can do with fewer, but one that takes the queries elsewhere.
    """
    if shards.is_zigzag:
        last = shards.pieces(rank)[-1]
        assert isinstance(pattern, Dense)
        return heads.keys * ((last.stop if is_causal else shards.tokens) - shards.length(rank))
    return sum(map(len, outer_rows(pattern, shards, rank, heads, is_causal)))


def rows_between(
    pattern: Pattern,
    shards: Shards,
    source: int,
    destination: int,
    heads: Heads,
    is_causal: bool,
) -> tuple[Tensor, ...]:
    """Positions that `source` sends to `destination`, sorted, for each key head."""
    wanted = outer_rows(pattern, shards, destination, heads, is_causal)
    first, last = shards.borders[source], shards.borders[source + 1]
    ends = torch.tensor([first, last])
    cuts = [torch.searchsorted(rows, ends).tolist() for rows in wanted]
    return tuple(rows[a:b] for rows, (a, b) in zip(wanted, cuts, strict=True))


@dataclass(frozen=True, eq=False)
class Plan:
    """What one rank sends and receives. Rows are (position, key head) pairs."""

    send_index: Tensor  # of the own (tokens · key heads) rows, by destination
    sent: Tensor  # the same, each of them once
    sent_index: Tensor  # where the rows of `send_index` stand in `sent`
    send_counts: tuple[int, ...]
    receive_counts: tuple[int, ...]
    received: tuple[Tensor, ...]  # per key head: which of the received rows are its, by position
    positions: tuple[Tensor, ...]  # and where they stand in the sequence


@lru_cache(maxsize=64)
@torch.inference_mode(False)
def plan_of(
    pattern: Pattern,
    shards: Shards,
    rank: int,
    heads: Heads,
    is_causal: bool,
    device: torch.device,
) -> Plan:
    """The exchange of a rank; all ranks' plans fit together."""
    own = shards.of(rank)
    between = [
        (
            rows_between(pattern, shards, rank, other, heads, is_causal),
            rows_between(pattern, shards, other, rank, heads, is_causal),
        )
        for other in range(shards.ranks)
    ]
    sent = [
        (rows - own.start) * heads.keys + key_head
        for to, _ in between
        for key_head, rows in enumerate(to)
    ]
    places: list[list[Tensor]] = [[] for _ in range(heads.keys)]
    count = 0
    for _, back in between:
        for key_head, rows in enumerate(back):
            places[key_head].append(torch.arange(count, count + len(rows)))
            count += len(rows)
    send_index = torch.cat(sent)
    once, index = torch.unique(send_index, return_inverse=True)
    return Plan(
        send_index.to(device),
        once.to(device),
        index.to(device),
        tuple(sum(map(len, to)) for to, _ in between),
        tuple(sum(map(len, back)) for _, back in between),
        tuple(torch.cat(parts).to(device) for parts in places),
        outer_rows(pattern, shards, rank, heads, is_causal),
    )


def start(x: Tensor, given: Sequence[int], taken: Sequence[int], group: str) -> Tensor:
    """Send given[i] rows of `x` to each rank i and begin to receive taken[i] rows from it.

    What it returns is whole once it has `arrived`. `group`: the name of a process group. All that
    ranks of a sequence tell one another goes through here.
    """
    received: Tensor = torch.ops._c10d_functional.all_to_all_single(
        x.contiguous(), list(taken), list(given), group
    )
    return received


def arrived(x: Tensor) -> Tensor:
    """Wait for what `start` gave."""
    whole: Tensor = torch.ops._c10d_functional.wait_tensor(x)
    return whole


def send_rows(k: Tensor, v: Tensor, plan: Plan, group: str) -> Tensor:
    """k, v (batch, own tokens, key heads, head_dim) to the planned (rows, 2, batch, head_dim)."""
    rows = torch.stack([x.flatten(1, 2)[:, plan.send_index] for x in (k, v)])
    return start(rows.permute(2, 0, 1, 3), plan.send_counts, plan.receive_counts, group)


def return_gradients(rows: Tensor, plan: Plan, group: str) -> Tensor:
    """Gradients of what `send_rows` gave, back to the ranks they came from."""
    return start(rows, plan.receive_counts, plan.send_counts, group)


def with_returned(grad: Tensor, returned: Tensor, plan: Plan) -> Tensor:
    """A rank's own share of a gradient (batch, tokens, key heads, head_dim) and what came back.

    `returned`: (rows, batch, head_dim). A row has as many shares as ranks have seen it; they are
    added up in float32.
    """
    exact = exact_type(grad)
    shares = returned.new_zeros(len(plan.sent), *returned.shape[1:], dtype=exact)
    shares.index_add_(0, plan.sent_index, returned.to(exact))
    own = grad.flatten(1, 2)
    rows = own[:, plan.sent].to(exact) + shares.transpose(0, 1)
    return own.index_copy(1, plan.sent, rows.to(grad.dtype)).view(grad.shape)


def fetch(k: Tensor, v: Tensor, plan: Plan, group: str) -> tuple[Tensor, Tensor]:
    """The rows of keys and values that this rank's queries see elsewhere.

    k, v: (batch, own tokens, key heads, head_dim), to (rows, batch, head_dim) each, in the order
    of `plan`.
    """
    out: tuple[Tensor, Tensor] = _Fetch.apply(k, v, plan, group)  # type: ignore[no-untyped-call]
    return out


class _Fetch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, k: Tensor, v: Tensor, plan: Plan, group: str) -> tuple[Tensor, Tensor]:
        ctx.plan, ctx.group, ctx.shape = plan, group, k.shape
        received = arrived(send_rows(k, v, plan, group))
        return received[:, 0], received[:, 1]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_k: Tensor, grad_v: Tensor) -> tuple[Tensor | None, ...]:
        rows = torch.stack([grad_k, grad_v], dim=1)
        returned = arrived(return_gradients(rows, ctx.plan, ctx.group))
        none = rows.new_zeros(ctx.shape)
        k, v = (with_returned(none, returned[:, i], ctx.plan) for i in (0, 1))
        return k, v, None, None
