"""Block indices: the pairs of blocks of a block-sparse pattern, in the order of the kernels."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import pad

from longspan.attention.pattern import BlockSparse
from longspan.caching import cached_up_to

CACHED_BYTES = 256 << 20
"""Of the indices that are kept, of either kind; one of a million tokens takes some tens of MiB."""


@cached_up_to(CACHED_BYTES)
def block_index(
    blocks: BlockSparse, count: int, is_causal: bool, by_key: bool, device: torch.device
) -> tuple[Tensor, Tensor]:
    """The key blocks of each query block, or with `by_key` the query blocks of each key block.

    CSR: int64 `offsets` (count + 1,) and int32 `indices`; under causality without the diagonal.
    """
    index = torch.arange(count, device=device)
    found, lengths = [], []
    for rows in torch.split(index, max(1, (1 << 22) // count)):
        seen = blocks.blocks(index, rows).T if by_key else blocks.blocks(rows, index)
        if is_causal:
            earlier = index[None, :] < rows[:, None]
            seen = seen & (~earlier & (index[None, :] != rows[:, None]) if by_key else earlier)
        found.append(seen.nonzero()[:, 1].int())
        lengths.append(seen.sum(1))
    offsets = pad(torch.cat(lengths).cumsum(0), (1, 0))
    return offsets, torch.cat(found)


@dataclass(frozen=True)
class Chunk:
    """The pairs whose queries are in the blocks [begin, end), by key block.

    CSR: int32 `offsets` (count + 1,) and `queries`; the diagonal block comes first. The index of a
    pair in `queries` is that of its tile in the scratch buffer.
    """

    begin: int
    end: int
    offsets: Tensor
    queries: Tensor


@dataclass(frozen=True)
class ChunkedBlockIndex:
    """All pairs in chunks, and again by query block: int64 `offsets`, int32 `keys` and `tiles`."""

    chunks: tuple[Chunk, ...]
    max_tiles: int  # of a chunk
    offsets: Tensor
    keys: Tensor
    tiles: Tensor


@cached_up_to(CACHED_BYTES)
def chunked_block_index(
    blocks: BlockSparse, count: int, max_pairs: int, device: torch.device
) -> ChunkedBlockIndex:
    """A causal index of `count` blocks, in chunks of about equally many pairs.

    A chunk has at most `max_pairs` pairs, or twice those of the largest query block if more.
    """
    index = torch.arange(count, device=device)
    offsets, keys = block_index(blocks, count, True, False, device)
    pairs = index.repeat_interleave(offsets.diff()) * count + keys
    pairs = torch.cat([pairs, index * count + index]).sort().values
    query, key = pairs // count, pairs % count
    lengths = query.bincount()
    offsets = pad(lengths.cumsum(0), (1, 0))

    longest = int(lengths.max())
    chunk_count = -(-len(pairs) // max(max_pairs - longest, longest))
    chunk_pairs = -(-len(pairs) // chunk_count)
    _, chunk_of = torch.unique_consecutive((offsets[1:] - 1) // chunk_pairs, return_inverse=True)
    bounds = [0, *chunk_of.bincount().cumsum(0).tolist()]
    starts, chunk = offsets[bounds], chunk_of[query]

    order = (chunk * count**2 + key * count + query).argsort()
    tiles = torch.empty_like(order)
    tiles[order] = torch.arange(len(pairs), device=device)
    tiles -= starts[chunk]
    per_key = (chunk * count + key).bincount(minlength=(len(bounds) - 1) * count)
    key_offsets = pad(per_key.view(-1, count).cumsum(1), (1, 0)).int()
    queries = torch.split(query[order].int(), starts.diff().tolist())
    chunks = tuple(
        Chunk(begin, end, of_key.clone(), found.clone())  # copies are aligned, as `Launch` needs
        for (begin, end), of_key, found in zip(pairwise(bounds), key_offsets, queries, strict=True)
    )
    return ChunkedBlockIndex(chunks, max(map(len, queries)), offsets, key.int(), tiles.int())
