"""Which rows of keys and values the chunks of a sequence keep for later ones, and which they read.

The pattern says so: nothing of it is computed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from longspan.attention.context_parallel.kv_exchange import CACHED_BYTES, remote_rows
from longspan.attention.context_parallel.shards import Heads, Shards
from longspan.attention.packed import Packed
from longspan.attention.pattern import Dense, Dilated, Pattern, union
from longspan.caching import cached_up_to

MAX_LISTED = 1 << 25
"""Tokens up to which `count_rows` lists the rows of any pattern."""


@dataclass(frozen=True, eq=False)
class ChunkPlan:
    """Which rows of a layer a chunk keeps and reads. Rows are (position, key head) pairs.

    All rows that a layer keeps have a slot, ordered by key head and position. *Open* at a chunk are
    the earlier rows that it or later ones see: those of which there may be gradients.
    """

    keep_index: Tensor  # of the chunk's (tokens · key heads) rows
    keep_slots: Tensor  # their slots
    read_slots: Tensor  # of the rows that it sees, ordered by key head and position
    received: tuple[Tensor, ...]  # per key head: its rows among those read
    places: tuple[Tensor, ...]  # the same on the CPU
    positions: tuple[Tensor, ...]  # per key head: their positions in the document they are in
    num_open: int  # before this chunk
    own: Tensor  # of the rows that are open after this chunk: those that it keeps
    carried: Tensor  # and those of earlier chunks
    carried_to: Tensor  # the index of these among those that are open before this chunk
    read_to: Tensor  # and of those that it reads


@cached_up_to(CACHED_BYTES)
@torch.inference_mode(False)
def open_rows(pattern: Pattern, boundary: int, tokens: int, heads: Heads) -> tuple[Tensor, ...]:
    """Sorted positions before `boundary` that causal queries from there on see, per key head."""
    if boundary in (0, tokens):
        return (torch.zeros(0, dtype=torch.int64),) * heads.keys
    return remote_rows(pattern, Shards((0, boundary, tokens)), 1, heads, True)


@cached_up_to(CACHED_BYTES)
@torch.inference_mode(False)
def kept_rows(pattern: Pattern, shards: Shards, heads: Heads) -> tuple[Tensor, ...]:
    """Sorted positions of the rows of all chunks that a later chunk sees, per key head."""
    kept = [[torch.zeros(0, dtype=torch.int64)] for _ in range(heads.keys)]
    for chunk in range(shards.ranks - 1):
        start, stop = shards.boundaries[chunk : chunk + 2]
        for rows, found in zip(kept, open_rows(pattern, stop, shards.tokens, heads), strict=True):
            rows.append(found[torch.searchsorted(found, start) :])
    return tuple(torch.cat(rows) for rows in kept)


@cached_up_to(CACHED_BYTES)
@torch.inference_mode(False)
def open_slots(pattern: Pattern, shards: Shards, chunk: int, heads: Heads) -> Tensor:
    """The slots of the rows that are open before a chunk, in order."""
    boundary = shards.boundaries[chunk]
    return _slots(pattern, shards, heads, open_rows(pattern, boundary, shards.tokens, heads))


def _slots(pattern: Pattern, shards: Shards, heads: Heads, positions: tuple[Tensor, ...]) -> Tensor:
    """The slots of rows at sorted positions, which each key head has."""
    found, first = [], 0
    for kept, rows in zip(kept_rows(pattern, shards, heads), positions, strict=True):
        found.append(first + torch.searchsorted(kept, rows))
        first += len(kept)
    return torch.cat(found)


@cached_up_to(CACHED_BYTES)
@torch.inference_mode(False)
def plan_chunk(
    pattern: Pattern, shards: Shards, chunk: int, heads: Heads, device: torch.device,
    rows_device: torch.device,
) -> ChunkPlan:  # fmt: skip
    """The plan of one chunk, for keys on `device` and rows that are kept on `rows_device`."""
    tokens, local = shards.tokens, shards.local_range(chunk)
    before = open_rows(pattern, local.start, tokens, heads)
    after = open_rows(pattern, local.stop, tokens, heads)
    own = tuple(x[torch.searchsorted(x, local.start) :] for x in after)
    read = remote_rows(pattern, shards, chunk, heads, True) if chunk else before
    keep_index = [(x - local.start) * heads.keys + head for head, x in enumerate(own)]
    slots_before = open_slots(pattern, shards, chunk, heads)
    slots_after = open_slots(pattern, shards, chunk + 1, heads)
    is_own = torch.cat([x >= local.start for x in after])
    keep_slots, carried = slots_after[is_own], (~is_own).nonzero()[:, 0]
    carried_to = torch.searchsorted(slots_before, slots_after[carried])
    if all(map(torch.equal, read, before)):  # as for most patterns
        read_slots, read_to = slots_before, torch.arange(len(slots_before))
    else:
        read_slots = _slots(pattern, shards, heads, read)
        read_to = torch.searchsorted(slots_before, read_slots)
    begin = 0
    if isinstance(pattern, Packed):
        begin, _, _ = next(pattern.documents(local.start, local.stop))
    places = torch.split(torch.arange(len(read_slots)), [len(x) for x in read])
    return ChunkPlan(
        moved(torch.cat(keep_index), device),
        moved(keep_slots, rows_device),
        moved(read_slots, rows_device),
        tuple(moved(x, device) for x in places),
        places,
        tuple(x - begin for x in read),
        len(slots_before),
        moved(is_own.nonzero()[:, 0], device),
        moved(carried, device),
        moved(carried_to, device),
        moved(read_to, device),
    )


def count_rows(pattern: Pattern, tokens: int, chunk: int, heads: Heads) -> tuple[int, int]:
    """How many rows chunks of so many tokens keep, and at most have open at a time.

    Those of all key heads; of a dilated pattern about so many, without listing them.
    """
    pattern, stops = without_blocks(pattern), range(chunk, tokens, chunk)
    if not stops:
        return 0, 0
    if isinstance(pattern, Dilated):
        found: dict[tuple[tuple[int, int], ...], int] = {}
        kept = 0
        for stop in stops:
            branches = tuple((w, r) for w, r in pattern.branches if stop % w)
            if branches not in found:
                rows = union(
                    range((pattern.first_head + head) % r, chunk, r)
                    for _, r in branches
                    for head in heads.query_heads(0)
                )
                found[branches] = len(rows)
            kept += found[branches]
        ends = {tokens, *(tokens // w * w for w in pattern.segment_lengths if chunk < w <= tokens)}
        last = {(end - 1) // chunk * chunk for end in ends} - {0}
        one = Heads(heads.queries // heads.keys, 1)
        most = max(len(open_rows(pattern, stop, tokens, one)[0]) for stop in last)
        return heads.keys * kept, heads.keys * most
    if isinstance(pattern, Dense) or tokens > MAX_LISTED:  # the latter at most
        return 2 * (heads.keys * stops[-1],)
    shards, one = Shards((0, *stops, tokens)), Heads(1, 1)
    most = max(len(open_rows(pattern, stop, tokens, one)[0]) for stop in stops)
    return heads.keys * len(kept_rows(pattern, shards, one)[0]), heads.keys * most


def without_blocks(pattern: Pattern) -> Pattern:
    """A pattern whose rows are easily listed, and among them all that `pattern` sees."""
    if isinstance(pattern, Packed):
        return replace(pattern, inner=without_blocks(pattern.inner))
    return replace(pattern, blocks=None) if isinstance(pattern, Dilated) else pattern


def moved(x: Tensor, device: torch.device) -> Tensor:
    """`x` on a device; copies between a GPU and the CPU do not wait for each other."""
    if x.device == device:
        return x
    if x.device.type == "cpu":
        return x.pin_memory().to(device, non_blocking=True)
    return x.to(device)
