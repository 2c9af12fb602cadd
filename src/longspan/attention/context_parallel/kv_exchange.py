"""The sparse KV exchange: which key rows a sequence shard needs from other ranks, and the transfer.

Every rank holds consecutive positions. The pattern determines which remote rows a rank's queries
see, so each rank knows without communication what to send. A row is sent once per rank, whatever
the number of branches and query heads that read it, and its gradient is returned once. A branch
whose segments lie inside the shards sends nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from longspan.attention.context_parallel.shards import Heads, Shards
from longspan.attention.pattern import Dense, Pattern
from longspan.caching import cached_up_to
from longspan.dtypes import accumulation_dtype
from longspan.torch_internals import all_to_all_async, wait

CACHED_BYTES = 256 << 20
"""Of the positions, of the exchanges, and of the splits that are kept."""


@cached_up_to(CACHED_BYTES)
@torch.inference_mode(False)  # cached tensors may be used in training later
def remote_rows(
    pattern: Pattern, shards: Shards, rank: int, heads: Heads, is_causal: bool
) -> tuple[Tensor, ...]:
    """Sorted positions on other ranks that a rank's queries see, for each key head."""
    local = shards.local_range(rank)
    if not pattern.differs_by_head:
        span = local.start, local.stop, shards.tokens
        return (pattern.remote_key_rows(*span, 0, is_causal=is_causal),) * heads.keys
    found = []
    for key_head in range(heads.keys):
        rows = [
            pattern.remote_key_rows(
                local.start, local.stop, shards.tokens, head, is_causal=is_causal
            )
            for head in heads.query_heads(key_head)
        ]
        found.append(rows[0] if len(rows) == 1 else torch.unique(torch.cat(rows)))
    return tuple(found)


def remote_row_counts(pattern: Pattern, shards: Shards, heads: Heads, is_causal: bool) -> Tensor:
    """Rows of all key heads that each rank sees of each other rank: int64 (readers, owners)."""
    ranks = range(shards.ranks)
    if isinstance(pattern, Dense):
        return heads.keys * shards.all_visible_keys(is_causal).fill_diagonal_(0)
    boundaries = torch.tensor(shards.boundaries)
    remote = (remote_rows(pattern, shards, rank, heads, is_causal) for rank in ranks)
    found = (
        torch.stack([torch.searchsorted(x, boundaries).diff() for x in rows]) for rows in remote
    )
    return torch.stack([counts.sum(0) for counts in found])


def rows_to_send(
    pattern: Pattern,
    shards: Shards,
    source: int,
    destination: int,
    heads: Heads,
    is_causal: bool,
) -> tuple[Tensor, ...]:
    """Sorted positions that `source` sends to `destination`, for each key head."""
    needed = remote_rows(pattern, shards, destination, heads, is_causal)
    ends = torch.tensor(shards.boundaries[source : source + 2])
    cuts = [torch.searchsorted(rows, ends).tolist() for rows in needed]
    return tuple(rows[a:b] for rows, (a, b) in zip(needed, cuts, strict=True))


@dataclass(frozen=True, eq=False)
class KVExchange:
    """What one rank sends and receives. Rows are (position, key head) pairs."""

    send_index: Tensor  # of the local (tokens · key heads) rows, ordered by destination
    unique_rows: Tensor  # the same rows without repetition
    unique_index: Tensor  # the place of each row of `send_index` in `unique_rows`
    send_counts: tuple[int, ...]
    receive_counts: tuple[int, ...]
    received: tuple[Tensor, ...]  # per key head: its rows among the received ones, by position
    places: tuple[Tensor, ...]  # the same on the CPU
    positions: tuple[Tensor, ...]  # per key head: the positions of those rows

    @property
    def plan(self) -> KVExchange:
        return self

    def send_async(self, k: Tensor, v: Tensor, group: str) -> Tensor:
        """Start the exchange of k, v (batch, local tokens, key heads, head_dim).

        Returns the received rows (rows, 2, batch, head_dim), complete after `wait`.
        """
        rows = torch.stack([x.flatten(1, 2)[:, self.send_index] for x in (k, v)])
        rows = rows.permute(2, 0, 1, 3)
        return all_to_all_async(rows, self.send_counts, self.receive_counts, group)

    def return_async(self, grad_rows: Tensor, dtype: torch.dtype, group: str) -> Tensor:
        """Start to return the gradients of received rows, as `dtype`, to the ranks that sent them.

        grad_rows: (rows, 2, batch, head_dim).
        """
        rows = grad_rows.to(dtype)
        return all_to_all_async(rows, self.receive_counts, self.send_counts, group)

    def receive(self, k: Tensor, v: Tensor, group: str) -> tuple[Tensor, Tensor]:
        """The remote rows (rows, batch, head_dim) of k, v (batch, local tokens, key heads, ...).

        The backward pass returns their gradients.
        """
        rows: tuple[Tensor, Tensor] = _Receive.apply(  # type: ignore[no-untyped-call]
            k, v, self, group
        )
        return rows

    def add_returned(self, grad: Tensor, returned: Tensor) -> Tensor:
        """Add returned gradients (rows, batch, head_dim) to the local gradient `grad`.

        grad: (batch, tokens, key heads, head_dim). Several ranks may have seen a row: their
        gradients are summed in float32.
        """
        dtype = accumulation_dtype(grad)
        sums = returned.new_zeros(len(self.unique_rows), *returned.shape[1:], dtype=dtype)
        sums.index_add_(0, self.unique_index, returned.to(dtype))
        flat = grad.flatten(1, 2)
        rows = flat[:, self.unique_rows].to(dtype) + sums.transpose(0, 1)
        return flat.index_copy(1, self.unique_rows, rows.to(grad.dtype)).view(grad.shape)


class RowPlan(Protocol):
    """Which rows are received; one object for all layers with the same pattern."""

    @property
    def received(self) -> tuple[Tensor, ...]: ...

    @property
    def places(self) -> tuple[Tensor, ...]: ...

    @property
    def positions(self) -> tuple[Tensor, ...]: ...


class RemoteRows(Protocol):
    """Where the rows come from that queries see and do not have at hand.

    From other ranks (`KVExchange`), or from earlier chunks (`chunk_rows.EarlierRows`).
    """

    @property
    def plan(self) -> RowPlan: ...

    def send_async(self, k: Tensor, v: Tensor, group: str, /) -> Tensor: ...

    def return_async(self, grad_rows: Tensor, dtype: torch.dtype, group: str, /) -> Tensor: ...

    def add_returned(self, grad: Tensor, returned: Tensor, /) -> Tensor: ...

    def receive(self, k: Tensor, v: Tensor, group: str, /) -> tuple[Tensor, Tensor]: ...


class _Receive(torch.autograd.Function):
    """k, v (batch, local tokens, key heads, head_dim) to received rows (rows, batch, head_dim)."""

    @staticmethod
    def forward(
        ctx: Any, k: Tensor, v: Tensor, exchange: KVExchange, group: str
    ) -> tuple[Tensor, Tensor]:
        ctx.exchange, ctx.group, ctx.shape = exchange, group, k.shape
        received = wait(exchange.send_async(k, v, group))
        return received[:, 0], received[:, 1]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_k: Tensor, grad_v: Tensor) -> tuple[Tensor | None, ...]:
        rows = torch.stack([grad_k, grad_v], dim=1)
        returned = wait(ctx.exchange.return_async(rows, rows.dtype, ctx.group))
        zeros = rows.new_zeros(ctx.shape)
        k, v = (ctx.exchange.add_returned(zeros, returned[:, i]) for i in (0, 1))
        return k, v, None, None


@cached_up_to(CACHED_BYTES)
@torch.inference_mode(False)
def plan_exchange(
    pattern: Pattern,
    shards: Shards,
    rank: int,
    heads: Heads,
    is_causal: bool,
    device: torch.device,
) -> KVExchange:
    """The exchange of one rank; those of all ranks match."""
    local = shards.local_range(rank)
    peers = [
        (
            rows_to_send(pattern, shards, rank, peer, heads, is_causal),
            rows_to_send(pattern, shards, peer, rank, heads, is_causal),
        )
        for peer in range(shards.ranks)
    ]
    send_index = torch.cat(
        [
            (rows - local.start) * heads.keys + key_head
            for sent, _ in peers
            for key_head, rows in enumerate(sent)
        ]
    )
    places: list[list[Tensor]] = [[] for _ in range(heads.keys)]
    count = 0
    for _, received in peers:
        for key_head, rows in enumerate(received):
            places[key_head].append(torch.arange(count, count + len(rows)))
            count += len(rows)
    unique_rows, unique_index = torch.unique(send_index, return_inverse=True)
    by_head = tuple(map(torch.cat, places))
    return KVExchange(
        send_index.to(device),
        unique_rows.to(device),
        unique_index.to(device),
        tuple(sum(map(len, sent)) for sent, _ in peers),
        tuple(sum(map(len, received)) for _, received in peers),
        tuple(indices.to(device) for indices in by_head),
        by_head,
        remote_rows(pattern, shards, rank, heads, is_causal),
    )
