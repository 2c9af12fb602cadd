"""Lists of the pairs of blocks that a block-sparse pattern keeps, as the kernels walk them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import pad

from longspan.attention.pattern import BlockSparse


@lru_cache(maxsize=32)
def block_lists(
    blocks: BlockSparse, count: int, is_causal: bool, of_keys: bool, device: torch.device
) -> tuple[Tensor, Tensor]:
    """CSR lists of the key blocks of each query block, or of the query blocks of each key block.

    Int64 `offsets` (count + 1,) and int32 indices; under causality without the block itself.
    """
    index = torch.arange(count, device=device)
    found, lengths = [], []
    for rows in torch.split(index, max(1, (1 << 22) // count)):
        kept = blocks.blocks(index, rows).T if of_keys else blocks.blocks(rows, index)
        if is_causal:
            earlier = index[None, :] < rows[:, None]
            kept = kept & (~earlier & (index[None, :] != rows[:, None]) if of_keys else earlier)
        found.append(kept.nonzero()[:, 1].int())
        lengths.append(kept.sum(1))
    offsets = pad(torch.cat(lengths).cumsum(0), (1, 0))
    return offsets, torch.cat(found)


@dataclass(frozen=True)
class Chunk:
    """The pairs whose queries are of the blocks [begin, end), by key block.

    CSR: int32 `offsets` (count + 1,) and `queries`; a block comes first in its own list. A pair's
    place in `queries` is its tile in the scratch.
    """

    begin: int
    end: int
    offsets: Tensor
    queries: Tensor


@dataclass(frozen=True)
class Lists:
    """All pairs in chunks, and again by query block: int64 `offsets`, int32 `keys` and `tiles`."""

    chunks: tuple[Chunk, ...]
    most_tiles: int  # of a chunk
    offsets: Tensor
    keys: Tensor
    tiles: Tensor


@lru_cache(maxsize=32)
def chunked_lists(blocks: BlockSparse, count: int, most: int, device: torch.device) -> Lists:
    """Causal lists of `count` blocks in chunks of at most `most` pairs, about as many in each."""
    index = torch.arange(count, device=device)
    offsets, keys = block_lists(blocks, count, True, False, device)
    pairs = index.repeat_interleave(offsets.diff()) * count + keys
    pairs = torch.cat([pairs, index * count + index]).sort().values
    query, key = pairs // count, pairs % count
    lengths = query.bincount()
    offsets = pad(lengths.cumsum(0), (1, 0))

    longest = int(lengths.max())
    parts = -(-len(pairs) // max(most - longest, longest))
    share = -(-len(pairs) // parts)
    _, part_of = torch.unique_consecutive((offsets[1:] - 1) // share, return_inverse=True)
    bounds = [0, *part_of.bincount().cumsum(0).tolist()]
    starts, part = offsets[bounds], part_of[query]

    order = (part * count**2 + key * count + query).argsort()
    tiles = torch.empty_like(order)
    tiles[order] = torch.arange(len(pairs), device=device)
    tiles -= starts[part]
    of_keys = (part * count + key).bincount(minlength=(len(bounds) - 1) * count)
    key_offsets = pad(of_keys.view(-1, count).cumsum(1), (1, 0)).int()
    queries = torch.split(query[order].int(), starts.diff().tolist())
    chunks = tuple(
        Chunk(begin, end, own.clone(), found.clone())  # aligned, as `Launch` wants it
        for (begin, end), own, found in zip(pairwise(bounds), key_offsets, queries, strict=True)
    )
    return Lists(chunks, max(map(len, queries)), offsets, key.int(), tiles.int())
