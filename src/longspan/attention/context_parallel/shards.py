"""How a sequence lies on the ranks of a group."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor


@dataclass(frozen=True)
class Shards:
    """A sequence cut into consecutive pieces [borders[i], borders[i + 1]).

    Rank i holds piece i or, where `is_zigzag`, piece i and the i-th from the end: under causality a
    query sees the more the later it stands, and of such pairs all ranks see as much.
    """

    borders: tuple[int, ...]
    is_zigzag: bool = False

    def __post_init__(self) -> None:
        rising = all(a < b for a, b in pairwise(self.borders))
        if len(self.borders) < 2 or self.borders[0] != 0 or not rising:
            raise ValueError(f"borders must rise from 0, one more than pieces, got {self.borders}")
        if self.is_zigzag and len(self.borders) % 2 == 0:
            raise ValueError(f"pairs need an even number of pieces, got {len(self.borders) - 1}")

    @staticmethod
    def even(tokens: int, ranks: int, *, is_zigzag: bool = False) -> Shards:
        """Pieces of one length, but that the last ones may be a token shorter."""
        pieces = 2 * ranks if is_zigzag else ranks
        if tokens < pieces:
            raise ValueError(f"{tokens} tokens do not reach for {pieces} pieces")
        whole, rest = divmod(tokens, pieces)
        return Shards(tuple(i * whole + min(i, rest) for i in range(pieces + 1)), is_zigzag)

    @property
    def ranks(self) -> int:
        return (len(self.borders) - 1) // (2 if self.is_zigzag else 1)

    @property
    def tokens(self) -> int:
        return self.borders[-1]

    def pieces(self, rank: int) -> tuple[range, ...]:
        """What a rank holds, in the order of the sequence."""
        own = (rank, 2 * self.ranks - 1 - rank) if self.is_zigzag else (rank,)
        return tuple(range(self.borders[i], self.borders[i + 1]) for i in own)

    def of(self, rank: int) -> range:
        """The one piece of a rank."""
        (piece,) = self.pieces(rank)
        return piece

    def length(self, rank: int) -> int:
        return sum(map(len, self.pieces(rank)))

    def positions(self, rank: int) -> Tensor:
        """Where a rank's tokens stand in the sequence: int64 (own tokens,)."""
        return torch.cat([torch.arange(p.start, p.stop) for p in self.pieces(rank)])


@dataclass(frozen=True)
class Heads:
    """Query heads, and the key heads they share in equal groups."""

    queries: int
    keys: int

    def readers(self, key_head: int) -> range:
        group = self.queries // self.keys
        return range(key_head * group, (key_head + 1) * group)
