"""What the launches of one attention share: its shapes, its pattern, and what follows from them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from longspan.attention.kernels import block_sparse
from longspan.attention.kernels.block_index import block_index
from longspan.attention.kernels.documents import DocumentGroup, document_groups, work_table
from longspan.attention.kernels.inputs import tiles_of
from longspan.attention.kernels.launch import Tiles
from longspan.attention.kernels.schedule import (
    Branch,
    BranchSchedule,
    schedule_branches,
    schedule_whole_segments,
)
from longspan.attention.kernels.whole_segments import WholeSegments, has_kernels
from longspan.attention.pattern import BlockSparse, Dense, Dilated, Pattern


@dataclass(
    frozen=True, eq=False
)  # `dispatch` makes one object of each kind: its hash is its address
class Call:
    """What the launches of one attention share: its shapes and its pattern."""

    batch: int
    tokens: int
    heads: int
    group: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device
    pattern: Pattern
    is_causal: bool
    has_ids: bool
    has_documents: bool
    scale: float

    @cached_property
    def branches(self) -> tuple[tuple[int, int], ...]:
        """(segment length, rate); a dense or block-sparse pattern is one whole-sequence branch."""
        if isinstance(self.pattern, Dilated):
            return self.pattern.branches
        size = self.pattern.block_size if isinstance(self.pattern, BlockSparse) else 1
        return ((-(-self.tokens // size) * size, 1),)

    @cached_property
    def blocks(self) -> BlockSparse | None:
        blocks = self.pattern.blocks if isinstance(self.pattern, Dilated) else self.pattern
        return blocks if isinstance(blocks, BlockSparse) else None

    @cached_property
    def first_head(self) -> int:
        return self.pattern.first_head if isinstance(self.pattern, Dilated) else 0

    @cached_property
    def schedule(self) -> BranchSchedule:
        return schedule_branches(self.branches, self.blocks is not None)

    @cached_property
    def unit(self) -> int:
        """The number of tokens must be a multiple of it: of every rate."""
        return math.lcm(*(r for _, r in self.branches))

    @cached_property
    def slabs(self) -> list[slice]:
        """Token ranges that no pair leaves, as long as the buffers allow."""
        schedule = self.whole_segments.schedule if self.whole_segments else self.schedule
        step = schedule.slab(4 * self.batch * self.heads * self.head_dim)
        starts = range(0, self.tokens, step)
        return [slice(start, min(start + step, self.tokens)) for start in starts]

    def groups(self, starts: tuple[int, ...]) -> tuple[DocumentGroup, ...]:
        """Documents whose partial buffers are allocated together; all if there are none."""
        row_bytes = 4 * self.heads * self.head_dim
        fit = self.schedule.fit(row_bytes) if self.schedule.has_partial else self.tokens
        return document_groups(starts, self.tokens, self.schedule.partial_rate, fit)

    def padded(self, slab: slice) -> slice:
        """The slab of the inputs, whose length is padded to a multiple of every rate."""
        return slice(slab.start, slab.stop + -slab.stop % self.unit)

    def new_partial(self, tokens: int, group: DocumentGroup | None = None) -> Tensor:
        """Float32 (batch, every partial_rate-th token, heads, head_dim); empty for one branch.

        With a group of documents, every partial_rate-th token of each of them.
        """
        has_partial = self.schedule.has_partial
        rows = -(-tokens // self.schedule.partial_rate) if has_partial else 0
        if group is not None and has_partial:
            rows = int(group.partial_begins[-1])
        new = torch.empty if self.schedule.is_nested else torch.zeros
        shape = (self.batch, rows, self.heads, self.head_dim)
        return new(shape, dtype=torch.float32, device=self.device)

    def new_result(self) -> Tensor:
        new = torch.empty if self.schedule.writes_every_row() else torch.zeros
        shape = (self.batch, self.tokens, self.heads, self.head_dim)
        return new(shape, dtype=self.dtype, device=self.device)

    @cached_property
    def has_block_sparse_backward(self) -> bool:
        """Whether `block_sparse` computes the gradients: 16-bit, blocks of 128, one sequence."""
        return (
            self.blocks is not None
            and self.blocks.block_size == block_sparse.BLOCK
            and self.is_causal
            and not self.has_ids
            and not self.has_documents
            and len(self.branches) == 1
            and self.branches[0][0] >= self.tokens
            and self.branches[0][1] == 1
            and block_sparse.MIN_TOKENS <= self.tokens <= block_sparse.MAX_TOKENS
            and self.tokens % block_sparse.BLOCK == 0
            and self.head_dim in (64, 128)
            and self.dtype.itemsize == 2
            and block_sparse.has_kernels(self.device)
        )

    @cached_property
    def whole_segments(self) -> WholeSegments | None:
        """The kernels for whole segments, where they serve."""
        is_plain = self.is_causal and not (self.has_ids or self.has_documents or self.blocks)
        # A dilated pattern of one branch gives the same bits as each of its documents alone, for
        # which there are Triton's kernels.
        is_plain &= isinstance(self.pattern, Dense) or len(self.branches) > 1
        is_plain &= self.scale > 0  # the largest score is that of the largest product
        if not is_plain or not has_kernels(self.device, self.dtype, self.head_dim):
            return None
        schedule = schedule_whole_segments(self.branches, self.tokens)
        if schedule is None:
            return None
        return WholeSegments(
            self.batch, self.heads, self.group, self.head_dim, self.first_head, schedule, self.scale
        )

    def tiles(self, name: str) -> tuple[Tiles, int, int]:
        """The tiles of a kernel: the rows of a program's own tile, and of those it steps over."""
        block = 0 if self.blocks is None else self.blocks.block_size
        tiles = tiles_of(name, self.head_dim, self.dtype, block, len(self.branches))
        if name == "backward_dkdv":
            return tiles, tiles.keys, tiles.queries
        return tiles, tiles.queries, tiles.keys

    def work(self, name: str, group: DocumentGroup | None, unused: Tensor) -> list[Tensor]:
        """The work table of each branch."""
        if group is None:
            return [unused] * len(self.schedule.branches)
        _, tile, _ = self.tiles(name)
        by_key = name == "backward_dkdv"
        return [
            work_table(group, b.rate, b.segment, b.inner or b.segment, tile, by_key, self.device)
            for b in self.schedule.branches
        ]

    def block_index(self, branch: Branch, unused: Tensor, *, by_key: bool) -> tuple[Tensor, Tensor]:
        if self.blocks is None:
            return unused, unused
        count = -(-branch.segment // self.blocks.block_size)
        return block_index(self.blocks, count, self.is_causal, by_key, self.device)
