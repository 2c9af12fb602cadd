"""How the ranks of a group split a sequence."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor


@dataclass(frozen=True)
class Shards:
    """A sequence split into consecutive chunks [boundaries[i], boundaries[i + 1]).

    Rank i holds chunk i or, with `is_zigzag`, chunk i and the i-th from the end. Under causality
    later queries see more keys; the zigzag split gives every rank the same amount of work.
    """

    boundaries: tuple[int, ...]
    is_zigzag: bool = False

    def __post_init__(self) -> None:
        increase = all(a < b for a, b in pairwise(self.boundaries))
        if len(self.boundaries) < 2 or self.boundaries[0] != 0 or not increase:
            raise ValueError(
                "boundaries must increase from 0, one more than there are chunks, got "
                f"{self.boundaries}"
            )
        if self.is_zigzag and len(self.boundaries) % 2 == 0:
            raise ValueError(
                f"zigzag shards need an even number of chunks, got {len(self.boundaries) - 1}"
            )

    @staticmethod
    def even(tokens: int, ranks: int, *, is_zigzag: bool = False) -> Shards:
        """Chunks of equal length; the last ones may be one token shorter."""
        chunks = 2 * ranks if is_zigzag else ranks
        if tokens < chunks:
            raise ValueError(f"{chunks} chunks need at least {chunks} tokens, got {tokens}")
        whole, rest = divmod(tokens, chunks)
        return Shards(tuple(i * whole + min(i, rest) for i in range(chunks + 1)), is_zigzag)

    @property
    def ranks(self) -> int:
        return (len(self.boundaries) - 1) // (2 if self.is_zigzag else 1)

    @property
    def tokens(self) -> int:
        return self.boundaries[-1]

    def chunks(self, rank: int) -> tuple[range, ...]:
        """The positions that a rank holds, in the order of the sequence."""
        indices = (rank, 2 * self.ranks - 1 - rank) if self.is_zigzag else (rank,)
        return tuple(range(self.boundaries[i], self.boundaries[i + 1]) for i in indices)

    def local_range(self, rank: int) -> range:
        """The positions of a rank that holds one chunk."""
        (chunk,) = self.chunks(rank)
        return chunk

    def length(self, rank: int) -> int:
        return sum(map(len, self.chunks(rank)))

    def positions(self, rank: int) -> Tensor:
        """The positions of a rank's tokens in the sequence: int64 (local tokens,)."""
        return torch.cat([torch.arange(c.start, c.stop) for c in self.chunks(rank)])

    def visible_keys(self, reader: int, owner: int, is_causal: bool) -> int:
        """How many keys of `owner`, its first ones, some query of `reader` sees if it is dense."""
        last = self.chunks(reader)[-1].start
        return sum(len(c) for c in self.chunks(owner) if not is_causal or c.start < last)

    def all_visible_keys(self, is_causal: bool) -> Tensor:
        """`visible_keys` of all pairs of ranks, which may be millions: int64 (readers, owners)."""
        chunks = [self.chunks(rank) for rank in range(self.ranks)]
        starts = torch.tensor([[c.start for c in chunk] for chunk in chunks])
        lengths = torch.tensor([[len(c) for c in chunk] for chunk in chunks])
        if not is_causal:
            return lengths.sum(1).expand(self.ranks, -1).clone()
        last = starts[:, -1, None]
        visible = ((starts[:, i] < last) * lengths[:, i] for i in range(starts.shape[1]))
        return torch.stack(list(visible)).sum(0)


@dataclass(frozen=True)
class Heads:
    """Numbers of query heads and of key heads; each key head serves a group of query heads."""

    queries: int
    keys: int

    def query_heads(self, key_head: int) -> range:
        group = self.queries // self.keys
        return range(key_head * group, (key_head + 1) * group)
