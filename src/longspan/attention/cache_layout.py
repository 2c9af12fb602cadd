"""Where a KV cache holds the rows of a pattern, in buffers whose size never changes.

A layer's keys lie in one buffer (batch · kv_heads · width + 1, head_dim), its values in another: of
each row of a batch and kv head `width` rows, and last a scratch row, to which goes what is not
stored. The rows of a kv head are divided into slots:

- Dense, window, block-sparse: one slot. It holds the first `sink` positions and a ring of the
  newest other ones.
- Dilated: of each branch, a slot for each residue (mod rate) that the heads of this kv head read;
  it holds the positions of that residue in the current segment.

What depends on the position of a token is computed from a tensor of positions with fixed shapes, so
that a decoding step can be captured as a CUDA graph.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from longspan.attention.pattern import BlockSparse, Dense, Dilated, Pattern
from longspan.attention.window import Window

UNLIMITED = 1 << 62


@dataclass(frozen=True)
class Slot:
    """Rows of a kv head: `rows` of them, from `start` on."""

    start: int
    rows: int
    segment: int = UNLIMITED
    rate: int = 1
    residue: int = 0
    """Positions in the current segment that are `residue` modulo `rate`, one after another."""

    def held(self, position: int) -> Tensor:
        """The position in each row if `position` is the newest: (rows,), −1 for none."""
        first = position // self.segment * self.segment + self.residue
        found = first + self.rate * torch.arange(self.rows)
        return found.where(found <= position, -1)


class CacheLayout:
    """The layout of a pattern's rows for up to `capacity` tokens; see the module's text."""

    def __init__(
        self, pattern: Pattern, capacity: int, heads: int, kv_heads: int, device: torch.device
    ) -> None:
        self.pattern, self.heads, self.kv_heads = pattern, heads, kv_heads
        self._device = device
        self.sink, self.size = _ring(pattern, capacity)
        self._chunks = dict[int, Tensor]()
        self.slots: list[list[Slot]] = []
        """The slots of each kv head."""
        self.read: list[list[Slot]] = [[] for _ in range(heads)]
        """The slots that each head reads."""
        for kv_head in range(kv_heads):
            self.slots.append(self._slots_of(kv_head, capacity))
        self.width = self.slots[0][-1].start + self.slots[0][-1].rows
        all_slots = [(kv_head, x) for kv_head, slots in enumerate(self.slots) for x in slots]
        self._write = torch.tensor(
            [
                [kv_head * self.width + x.start, x.rate, x.segment, x.residue]
                for kv_head, x in all_slots
            ],
            device=device,
        ).unbind(1)
        self.kv_head_of_slot = torch.tensor([kv_head for kv_head, _ in all_slots], device=device)
        self.read_starts = torch.tensor(
            [
                [head * kv_heads // heads * self.width + x.start for x in slots]
                for head, slots in enumerate(self.read)
            ],
            device=device,
        )
        """The first row of each slot that a head reads: int64 (heads, slots of a head)."""
        self._read = torch.tensor(
            [[[x.rate, x.segment, x.residue, x.rows] for x in slots] for slots in self.read],
            device=device,
        ).unbind(2)
        self.has_mask = (
            isinstance(pattern, BlockSparse)
            or (isinstance(pattern, Dilated) and pattern.blocks is not None)
            or (isinstance(pattern, Window) and pattern.dilation > 1)
        )
        """Whether a head sees only some of the rows up to the newest."""
        self.covers_all = not isinstance(pattern, Dilated) or 1 in pattern.dilation_rates
        """Whether every query sees a key in every head."""

    @property
    def rows(self) -> int:
        """Rows of all kv heads."""
        return self.kv_heads * self.width

    def _slots_of(self, kv_head: int, capacity: int) -> list[Slot]:
        """The slots of a kv head; its heads are told which of them they read."""
        group = self.heads // self.kv_heads
        heads = range(kv_head * group, (kv_head + 1) * group)
        if not isinstance(self.pattern, Dilated):
            slot = Slot(0, min(capacity, self.sink + self.size))
            for head in heads:
                self.read[head].append(slot)
            return [slot]
        slots, start = list[Slot](), 0
        for w, r in self.pattern.branches:
            by_residue: dict[int, Slot] = {}
            rows = -(-min(w, capacity) // r)
            for head in heads:
                residue = (self.pattern.first_head + head) % r
                if residue not in by_residue:
                    by_residue[residue] = Slot(start, rows, w, r, residue)
                    start += rows
                self.read[head].append(by_residue[residue])
            slots += by_residue.values()
        return slots

    def stored(self, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
        """What a cache holds of a prompt: int64 rows, and the position and kv head of each."""
        rows, positions, kv_heads = [], [], []
        for kv_head, slots in enumerate(self.slots):
            for slot in slots:
                held = self._held(slot, tokens - 1)
                found = (held >= 0).nonzero()[:, 0]
                rows.append(kv_head * self.width + slot.start + found)
                positions.append(held[found])
                kv_heads.append(torch.full_like(found, kv_head))
        row, position, kv_head_of = (torch.cat(x) for x in (rows, positions, kv_heads))
        return row.to(self._device), position.to(self._device), kv_head_of.to(self._device)

    def _held(self, slot: Slot, position: int) -> Tensor:
        """The position in each row of a slot if `position` is the newest; −1 for none."""
        if isinstance(self.pattern, Dilated):
            return slot.held(position)
        return self._in_ring(torch.tensor([[position]]), torch.arange(slot.rows))[0]

    def _in_ring(self, newest: Tensor, row: Tensor) -> Tensor:
        """The positions that rows (rows,) of a ring hold at `newest` (batch, 1); −1 for none."""
        found = newest - (newest - row) % self.size
        found = found.where(found >= self.sink, -1)
        return found.where(row >= self.sink, row.where(row <= newest, -1))

    def step(self, position: Tensor) -> Step:
        """The step of the tokens at `position`, int64 (batch,)."""
        p_B1 = position[:, None]
        start, rate, segment, residue = self._write
        if isinstance(self.pattern, Dilated):
            row = p_B1 % segment // rate
        else:
            row = self.sink + (p_B1 - self.sink) % self.size
            row = row.where(p_B1 >= self.sink, p_B1)
        batch = len(position)
        found = start + row
        if batch > 1:
            found += self.rows * torch.arange(batch, device=position.device)[:, None]
        if isinstance(self.pattern, Dilated):
            found = found.where(p_B1 % rate == residue, batch * self.rows)
        return Step(self, position, found.flatten())

    def counts(self, position: Tensor) -> Tensor:
        """The rows of each slot up to the newest, if a head reads it now: int64 (batch, heads,
        slots of a head).
        """  # fmt: skip
        p_B11 = position[:, None, None]
        rate, segment, residue, rows = self._read
        found = (p_B11 % segment // rate + 1).minimum(rows)
        return found * (p_B11 % rate == residue)

    def chunks(self, size: int) -> Tensor:
        """The chunks of a head's slots: the slot's index and a first row, int64 (chunks, 2)."""
        if size not in self._chunks:
            slots = enumerate(self.read[0])
            found = [(i, row) for i, slot in slots for row in range(0, slot.rows, size)]
            self._chunks[size] = torch.tensor(found, device=self._device)
        return self._chunks[size]

    @cached_property
    def _columns(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Of each row of a kv head its row in the slot, rate and segment (width,), and the residue
        that each head reads there (heads, width), −1 where it reads another slot.
        """  # fmt: skip
        first = self.slots[0]  # the slots of the others have other residues
        row = torch.cat([torch.arange(x.rows) for x in first])
        rate = torch.cat([torch.full((x.rows,), x.rate) for x in first])
        segment = torch.cat([torch.full((x.rows,), x.segment) for x in first])
        residue = torch.full((self.heads, self.width), -1)
        for head, slots in enumerate(self.read):
            for x in slots:
                residue[head, x.start : x.start + x.rows] = x.residue
        to = self._device
        return row.to(to), rate.to(to), segment.to(to), residue.to(to)

    def visible(self, position: Tensor) -> Tensor:
        """Which of its kv head's rows each head sees: bool (batch, heads, width)."""
        p_B1, (row, rate, segment, residue) = position[:, None], self._columns
        newest = p_B1 % segment // rate  # the newest row of the segment
        seen = row <= newest
        match self.pattern:
            case Dilated(blocks=BlockSparse() as blocks):
                seen &= blocks.sees(newest, row)
            case Window(dilation=1):
                pass  # it sees all that the ring holds
            case Window() | BlockSparse() as pattern:
                held = self._in_ring(p_B1, row)
                seen &= (held >= 0) & pattern.sees(p_B1, held)
        return seen[:, None] & ((p_B1 % rate)[:, None] == residue)


@dataclass(frozen=True)
class Step:
    """Where a token's keys go and which rows its query reads; it depends on positions only."""

    layout: CacheLayout
    position: Tensor
    """int64 (batch,)."""
    write: Tensor
    """The row of the buffers for each slot of all kv heads: int64 (batch · slots,)."""

    @cached_property
    def visible(self) -> Tensor:
        """Which rows of its kv head a head sees: bool (batch, heads, width)."""
        return self.layout.visible(self.position)

    @cached_property
    def is_hidden(self) -> Tensor:
        """Which it does not see."""
        return ~self.visible

    @cached_property
    def counts(self) -> Tensor:
        """How many rows of each slot a head reads at most: int64 (batch, heads, slots)."""
        return self.layout.counts(self.position)


@lru_cache(maxsize=64)
def cache_layout(
    pattern: Pattern, capacity: int, heads: int, kv_heads: int, device: torch.device
) -> CacheLayout:
    """The layout of a pattern; layers with equal patterns share it."""
    return CacheLayout(pattern, capacity, heads, kv_heads, device)


def _ring(pattern: Pattern, capacity: int) -> tuple[int, int]:
    """How many of the first and of the newest positions a query may see."""
    match pattern:
        case Dense() | Dilated():
            return 0, capacity
        case Window():
            return pattern.sinks, pattern.span + 1
        case BlockSparse():
            if pattern.stride or pattern.density > 0:
                return 0, capacity
            return pattern.global_tokens, max(pattern.block_size, pattern.local_window)
    raise TypeError(
        "a KV cache supports Dense, Dilated, BlockSparse and Window patterns, got "
        f"{type(pattern).__name__}"
    )
