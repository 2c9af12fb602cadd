"""Which tile of which document each program of a kernel takes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class DocumentGroup:
    """Consecutive documents that share a buffer of partial results."""

    begins: tuple[int, ...]
    """The first token of each."""
    end: int
    partial_rate: int

    @property
    def lengths(self) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        return np.diff((*self.begins, self.end))

    @property
    def partial_begins(self) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """The first partial row of each document, and in the end the number of rows."""
        rows = -(-self.lengths // self.partial_rate)
        return np.concatenate([[0], np.cumsum(rows)])


@lru_cache(maxsize=64)
def document_groups(
    starts: tuple[int, ...], tokens: int, partial_rate: int, max_tokens: int
) -> tuple[DocumentGroup, ...]:
    """Split documents that begin at `starts` into groups of at most `max_tokens`, or of one."""
    groups, begins = [], list[int]()
    for start, end in zip(starts, (*starts[1:], tokens), strict=True):
        if begins and end - begins[0] > max_tokens:
            groups.append(DocumentGroup(tuple(begins), start, partial_rate))
            begins = []
        begins.append(start)
    return (*groups, DocumentGroup(tuple(begins), tokens, partial_rate))


@lru_cache(maxsize=512)
def work_table(
    group: DocumentGroup, rate: int, segment: int, run: int, tile: int, by_key: bool,
    device: torch.device,
) -> Tensor:  # fmt: skip
    """Tile number, first token, length and first partial row of each item: int32 (items, 4).

    The items with the most pairs come first. `segment` and `run`: rows of a branch; see
    `branch._tile_bounds`, which takes the tile numbers.
    """
    rows = -(-group.lengths // rate)
    per_run = -(-run // tile)
    counts = rows // run * per_run + -(-(rows % run) // tile)
    document = np.repeat(np.arange(len(rows)), counts)
    number = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    start = number // per_run * run
    first, outer = start + number % per_run * tile, start // segment * segment
    pairs = np.minimum(outer + segment, rows[document]) - first if by_key else first - outer
    columns = number, np.array(group.begins)[document], group.lengths[document]
    items = np.stack([*columns, group.partial_begins[document]], axis=1)
    items = items[np.argsort(-pairs, kind="stable")].astype(np.int32)
    return torch.from_numpy(items).to(device, non_blocking=True)
