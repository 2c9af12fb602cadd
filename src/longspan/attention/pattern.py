"""Patterns: which keys a query sees, and what that costs.

The pattern is the only definition of the mask. The oracle, the backends, the FLOP counts and the
rows a sequence shard receives from other ranks are all derived from it. Positions and heads are
counted from 0; `tokens` is the sequence length. What a query sees never depends on the sequence
length, so a prefix of a sequence has the prefix of its mask.
"""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import cycle, islice

import torch
from torch import Tensor

from longspan.checks import block_problem, branch_problems
from longspan.config import Attention, LayerAttention
from longspan.hashing import uniform

EXACT_BLOCKS = 1 << 12
"""Up to so many blocks of a sequence the random ones are counted one by one."""


class Pattern(ABC):
    """Defines which keys a query sees, per head."""

    differs_by_head = False
    """Whether heads see different keys."""

    @abstractmethod
    def counts(self, queries: Tensor, keys: Tensor, head: int) -> Tensor:
        """How often each query sees each key before causality: int64 (queries, keys).

        `queries` and `keys` are 1-D int64 tensors of absolute positions. A key that two branches
        contain counts twice: the attention is one softmax over that multiset.
        """

    @abstractmethod
    def pairs(self, tokens: int, heads: int, *, is_causal: bool) -> int:
        """Query-key pairs of one sequence over all heads, each counted as often as it is seen."""

    @abstractmethod
    def covers(self, queries: Tensor, head: int) -> Tensor:
        """Whether each query position sees any key at all, itself included: bool (queries,)."""

    @abstractmethod
    def key_rows(self, start: int, stop: int, tokens: int, head: int, *, is_causal: bool) -> Tensor:
        """Positions of the keys that queries in [start, stop) see, sorted: int64 (rows,)."""

    def remote_key_rows(
        self, start: int, stop: int, tokens: int, head: int, *, is_causal: bool
    ) -> Tensor:
        """The `key_rows` outside [start, stop): those that other ranks hold."""
        rows = self.key_rows(start, stop, tokens, head, is_causal=is_causal)
        return rows[(rows < start) | (rows >= stop)]

    @abstractmethod
    def retained(self, position: int) -> tuple[int, int]:
        """`sink` and `start`: causal queries at `position` or later see only keys before `sink`
        and keys from `start` on.

        A KV cache may drop the keys between them.
        """  # fmt: skip

    @abstractmethod
    def visible_keys(self, position: int, heads: int) -> list[tuple[range, range | Tensor]]:
        """What the causal query at `position` sees, branch by branch: (heads, key positions).

        Every one of those heads, out of `heads`, sees those keys: a range or int64 (keys,). A key
        that two branches contain counts twice; a head in no branch sees nothing.
        """

    @abstractmethod
    def first_key(self, start: int, stop: int, heads: int) -> int:
        """Position of the earliest key that causal queries in [start, stop) see in any head."""

    def flops(self, tokens: int, heads: int, head_dim: int, *, is_causal: bool) -> int:
        """Forward FLOPs of one sequence; forward and backward together are 3.5 times this.

        Per pair: 2·head_dim for q·k and 2·head_dim for p·v.
        """
        return 4 * head_dim * self.pairs(tokens, heads, is_causal=is_causal)

    def uncovered(self, tokens: int, heads: int) -> Tensor:
        """Queries that see no key and give zeros: bool (tokens, heads)."""
        position = torch.arange(tokens)
        return torch.stack([~self.covers(position, head) for head in range(heads)], dim=1)


def reach(patterns: Iterable[Pattern], tokens: int, heads: int) -> int:
    """How many tokens back, itself included, the last token of a sequence can depend on.

    `patterns` has one pattern per causal layer, the first layer first. Each layer extends the
    interval of positions that the last token depends on to the earliest key that any of them sees.
    This is an upper bound: a pattern need not connect all positions of the interval.
    """
    first = tokens - 1
    for pattern in reversed(list(patterns)):
        first = pattern.first_key(first, tokens, heads)
    return tokens - first


@dataclass(frozen=True)
class Dense(Pattern):
    """Every query sees every key once."""

    def counts(self, queries: Tensor, keys: Tensor, head: int) -> Tensor:
        return torch.ones(len(queries), len(keys), dtype=torch.int64)

    def pairs(self, tokens: int, heads: int, *, is_causal: bool) -> int:
        return heads * (tokens * (tokens + 1) // 2 if is_causal else tokens * tokens)

    def covers(self, queries: Tensor, head: int) -> Tensor:
        return torch.ones(len(queries), dtype=torch.bool)

    def key_rows(self, start: int, stop: int, tokens: int, head: int, *, is_causal: bool) -> Tensor:
        return torch.arange(stop if is_causal else tokens)

    def remote_key_rows(
        self, start: int, stop: int, tokens: int, head: int, *, is_causal: bool
    ) -> Tensor:
        return union(outside([range(stop if is_causal else tokens)], start, stop))

    def retained(self, position: int) -> tuple[int, int]:
        return 0, 0

    def visible_keys(self, position: int, heads: int) -> list[tuple[range, range | Tensor]]:
        return [(range(heads), range(position + 1))]

    def first_key(self, start: int, stop: int, heads: int) -> int:
        return 0


@dataclass(frozen=True)
class BlockSparse(Pattern):
    """Each block of queries sees some blocks of keys, the same for every head.

    With b = `block_size`, query block i = p // b sees key block j = k // b if i = j or any of these
    holds.

    - `local_window` tokens: |i − j| < local_window / b
    - `global_tokens`: j < global_tokens / b (all see them), or i < global_tokens / b (they see all)
    - `stride`: i ≡ j (mod stride), in blocks
    - `density`: a random fraction of all blocks, drawn by a hash of (seed, i, j)
    """

    block_size: int
    local_window: int = 0
    global_tokens: int = 0
    stride: int = 0
    density: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("block_size", "local_window", "global_tokens", "stride", "seed"):
            object.__setattr__(self, name, as_integer(name, getattr(self, name)))
        if not isinstance(self.density, float | int):
            raise TypeError(f"density must be a number from 0 to 1, got {self.density!r}")
        b = self.block_size
        if b < 1:
            raise ValueError(f"block_size must be at least 1, got {b}")
        for name in ("local_window", "global_tokens"):
            value = getattr(self, name)
            if value < 0:
                raise ValueError(f"{name} must be at least 0, got {value}")
            if problem := block_problem(value, b):
                raise ValueError(f"{name} {problem}")
        if self.stride < 0:
            raise ValueError(f"stride must be at least 0, in blocks, got {self.stride}")
        if not 0 <= self.density <= 1:
            raise ValueError(f"density is the fraction of blocks seen, 0 to 1, got {self.density}")

    def sees(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Whether queries see keys, before causality: positions that broadcast together."""
        return self._sees_block(queries // self.block_size, keys // self.block_size)

    def blocks(self, query_blocks: Tensor, key_blocks: Tensor) -> Tensor:
        """Which key blocks each query block sees, by block index: bool (queries, keys)."""
        return self._sees_block(query_blocks[:, None], key_blocks[None, :])

    def _sees_block(self, i: Tensor, j: Tensor) -> Tensor:
        seen = (i == j) | ((i - j).abs() < self.local_window // self.block_size)
        global_blocks = self.global_tokens // self.block_size
        seen |= (i < global_blocks) | (j < global_blocks)
        if self.stride:
            seen |= (i - j) % self.stride == 0
        return seen | (uniform(self.seed, i, j) < self.density) if self.density > 0 else seen

    def counts(self, queries: Tensor, keys: Tensor, head: int) -> Tensor:
        # Once per pair of blocks: with a density, a pair costs a hash.
        i, row = torch.unique_consecutive(queries // self.block_size, return_inverse=True)
        j, column = torch.unique_consecutive(keys // self.block_size, return_inverse=True)
        return self.blocks(i, j).long()[row][:, column]

    def pairs(self, tokens: int, heads: int, *, is_causal: bool) -> int:
        """As the base class says; beyond EXACT_BLOCKS random blocks are counted by their share."""
        b, blocks = self.block_size, -(-tokens // self.block_size)
        if not blocks or not is_causal or (self.density and blocks <= EXACT_BLOCKS):
            return heads * self._counted_pairs(tokens, is_causal)
        # A block sees the triangle of its own, and blocks before it, which are all of full size.
        last, before = tokens - (blocks - 1) * b, 0.0
        for index in torch.split(torch.arange(blocks - 1), 1 << 20):
            before += float(self._blocks_before(index).sum())
        of_last = float(self._blocks_before(torch.tensor([blocks - 1])).sum())
        triangles = (blocks - 1) * (b * (b + 1) // 2) + last * (last + 1) // 2
        return heads * (triangles + b * (b * round(before) + last * round(of_last)))

    def _blocks_before(self, i: Tensor) -> Tensor:
        """How many blocks before it each of the blocks i, int64 (blocks,), sees: float64."""
        near = (i - max(1, self.local_window // self.block_size) + 1).clamp(min=0)
        far = torch.minimum(torch.full_like(i, self.global_tokens // self.block_size), i)
        between = (near - far).clamp(min=0)  # neither in the window nor global
        strided = torch.zeros_like(i)
        if self.stride:
            strided = ((i - far) // self.stride - (i - near) // self.stride).clamp(min=0)
        return (i - between + strided).double() + self.density * (between - strided).double()

    def _counted_pairs(self, tokens: int, is_causal: bool) -> int:
        b = self.block_size
        index = torch.arange(-(-tokens // b))
        sizes = (tokens - index * b).clamp(max=b)  # the last block may be shorter
        total = int((sizes * (sizes + 1) // 2).sum()) if is_causal else 0  # the diagonal blocks
        for rows in torch.split(index, 256):
            seen = self.blocks(rows, index)
            if is_causal:
                seen &= index[None, :] < rows[:, None]
            total += int((sizes[rows] * (seen * sizes).sum(1)).sum())
        return total

    def covers(self, queries: Tensor, head: int) -> Tensor:
        return torch.ones(len(queries), dtype=torch.bool)

    def key_rows(self, start: int, stop: int, tokens: int, head: int, *, is_causal: bool) -> Tensor:
        b = self.block_size
        queries = torch.arange(start // b, -(-stop // b))
        keys = torch.arange(-(-(stop if is_causal else tokens) // b))
        seen = self.blocks(queries, keys)
        if is_causal:
            seen &= keys[None, :] <= queries[:, None]
        blocks = keys[seen.any(0)]
        rows = (blocks[:, None] * b + torch.arange(b)).flatten()
        return rows[rows < (stop if is_causal else tokens)]

    def remote_key_rows(
        self, start: int, stop: int, tokens: int, head: int, *, is_causal: bool
    ) -> Tensor:
        if not is_causal:
            return super().remote_key_rows(start, stop, tokens, head, is_causal=False)
        # Some query blocks at a time, and only keys that none of those before has seen: there may
        # be a million blocks of either.
        b, (sink, first) = self.block_size, self.retained(start)
        keys, found = torch.arange(-(-start // b)), [torch.zeros(0, dtype=torch.int64)]
        keys = keys[(keys < sink // b) | (keys >= first // b)]
        for queries in torch.split(torch.arange(start // b, -(-stop // b)), 256):
            seen = self.blocks(queries, keys).any(0)
            found.append(keys[seen])
            keys = keys[~seen]
        rows = (torch.cat(found).sort().values[:, None] * b + torch.arange(b)).flatten()
        return rows[rows < start]

    def retained(self, position: int) -> tuple[int, int]:
        b, here = self.block_size, position // self.block_size
        global_blocks = self.global_tokens // b
        if self.stride or self.density > 0 or here < global_blocks:
            return 0, 0  # a later query may see any block
        oldest = here - max(1, self.local_window // b) + 1
        return self.global_tokens, max(global_blocks, oldest) * b

    def visible_keys(self, position: int, heads: int) -> list[tuple[range, range | Tensor]]:
        keys = self.key_rows(position, position + 1, position + 1, 0, is_causal=True)
        return [(range(heads), keys)]

    def first_key(self, start: int, stop: int, heads: int) -> int:
        if self.global_tokens:
            return 0
        b = self.block_size
        first, last = start // b, (stop - 1) // b
        found = max(0, first + 1 - max(1, self.local_window // b))
        if self.stride:
            steps_over_a_multiple = first // self.stride < last // self.stride
            found = min(found, 0 if steps_over_a_multiple else first % self.stride)
        if self.density > 0:
            found = min(found, self._first_random_block(first, last, found))
        return found * b

    def _first_random_block(self, first: int, last: int, stop: int) -> int:
        """The first random key block below `stop` of query blocks in [first, last], else `stop`."""
        rows = torch.arange(first, min(last, first + 255) + 1)[:, None]
        for start in range(0, min(stop, 1 << 20), 4096):
            columns = torch.arange(start, min(start + 4096, stop))
            hit = (uniform(self.seed, rows, columns) < self.density).any(0)
            if hit.any():
                return start + int(hit.nonzero()[0])
        return stop


@dataclass(frozen=True)
class Dilated(Pattern):
    """LongNet's branches: within segments of w tokens, head h keeps positions p ≡ h (mod r).

    With `blocks`, the kept rows of a segment, counted 0, 1, 2… from its start, see each other only
    as that block-sparse pattern allows. If the tensors hold only some of a model's heads,
    `first_head` is the index of the first of them.
    """

    differs_by_head = True

    segment_lengths: tuple[int, ...]
    dilation_rates: tuple[int, ...]
    blocks: BlockSparse | None = None
    first_head: int = 0

    def __post_init__(self) -> None:
        for name in ("segment_lengths", "dilation_rates"):  # tuples: a pattern can be hashed
            object.__setattr__(self, name, as_integers(name, getattr(self, name)))
        if not isinstance(self.blocks, BlockSparse | None):
            raise TypeError(f"blocks must be BlockSparse(...) or None, got {self.blocks!r}")
        object.__setattr__(self, "first_head", as_integer("first_head", self.first_head))
        if problems := branch_problems(self.segment_lengths, self.dilation_rates):
            raise ValueError("; ".join(problems))

    @property
    def branches(self) -> tuple[tuple[int, int], ...]:
        """(segment length w, dilation rate r) of each branch."""
        return tuple(zip(self.segment_lengths, self.dilation_rates, strict=True))

    def counts(self, queries: Tensor, keys: Tensor, head: int) -> Tensor:
        p, k, head = queries[:, None], keys[None, :], self.first_head + head
        seen = torch.zeros(len(queries), len(keys), dtype=torch.int64)
        for w, r in self.branches:
            in_branch = (p // w == k // w) & (p % r == head % r) & (k % r == head % r)
            if self.blocks is not None:
                in_branch &= self.blocks.counts(queries % w // r, keys % w // r, head) > 0
            seen += in_branch
        return seen

    def pairs(self, tokens: int, heads: int, *, is_causal: bool) -> int:
        total = 0
        for w, r in self.branches:
            residues = Counter((self.first_head + head) % r for head in range(heads))
            for residue, heads_here in residues.items():
                rows = len(range(residue, tokens, r))
                whole, rest = divmod(rows, w // r)
                inner = self.blocks or Dense()
                per_segment, in_rest = (
                    inner.pairs(length, 1, is_causal=is_causal) for length in (w // r, rest)
                )
                total += heads_here * (whole * per_segment + in_rest)
        return total

    def covers(self, queries: Tensor, head: int) -> Tensor:
        kept = [queries % r == (self.first_head + head) % r for r in self.dilation_rates]
        return torch.stack(kept).any(0)

    def _branch_rows(
        self, start: int, stop: int, tokens: int, head: int, is_causal: bool
    ) -> Iterator[range]:
        """The rows that queries in [start, stop) see, branch by branch."""
        residue = self.first_head + head
        for w, r in self.branches:
            queries = range(_at_or_after(start, residue, r), stop, r)
            if queries:
                first = _at_or_after(queries[0] // w * w, residue, r)
                end = queries[-1] + 1 if is_causal else min((queries[-1] // w + 1) * w, tokens)
                yield range(first, end, r)

    def key_rows(self, start: int, stop: int, tokens: int, head: int, *, is_causal: bool) -> Tensor:
        found = union(self._branch_rows(start, stop, tokens, head, is_causal))
        if self.blocks is None:
            return found
        position = torch.arange(start, stop)
        seen = self.counts(position, found, head) > 0
        if is_causal:
            seen &= found[None, :] <= position[:, None]
        return found[seen.any(0)]

    def remote_key_rows(
        self, start: int, stop: int, tokens: int, head: int, *, is_causal: bool
    ) -> Tensor:
        if self.blocks is not None:
            return super().remote_key_rows(start, stop, tokens, head, is_causal=is_causal)
        rows = self._branch_rows(start, stop, tokens, head, is_causal)
        return union(outside(rows, start, stop))

    def retained(self, position: int) -> tuple[int, int]:
        return 0, min(position // w * w for w in self.segment_lengths)

    def visible_keys(self, position: int, heads: int) -> list[tuple[range, range | Tensor]]:
        found: list[tuple[range, range | Tensor]] = []
        for w, r in self.branches:
            seeing = range((position - self.first_head) % r, heads, r)
            keys = range(position // w * w + position % r, position + 1, r)
            if self.blocks is None or not seeing:
                found.append((seeing, keys))
            else:
                last = len(keys) - 1
                rows = self.blocks.key_rows(last, last + 1, last + 1, 0, is_causal=True)
                found.append((seeing, keys.start + r * rows))
        return [(seeing, keys) for seeing, keys in found if seeing]

    def first_key(self, start: int, stop: int, heads: int) -> int:
        found = start
        for w, r in self.branches:
            for residue in {(self.first_head + head) % r for head in range(heads)}:
                query = _at_or_after(start, residue, r)
                if query >= stop:
                    continue
                segment, row = query // w * w, 0
                if self.blocks is not None:
                    first = (query - segment) // r
                    rows = len(range(query, min(segment + w, stop), r))
                    row = self.blocks.first_key(first, first + rows, 1)
                found = min(found, _at_or_after(segment, residue, r) + row * r)
        return found


def as_integer(name: str, value: object) -> int:
    """The argument `name` as an int; floats and text are refused."""
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"{name} must be an integer, got {value!r}") from None


def as_integers(name: str, values: Iterable[int]) -> tuple[int, ...]:
    """The argument `name`, a sequence of integers, as a tuple."""
    try:
        return tuple(operator.index(value) for value in values)
    except TypeError:
        example = (values,) if isinstance(values, int) else (2048, 4096)
        raise TypeError(
            f"{name} must be a sequence of integers, e.g. {example}, got {values!r}"
        ) from None


def union(ranges: Iterable[range]) -> Tensor:
    """The sorted members of all ranges: int64."""
    rows = [torch.arange(r.start, r.stop, r.step) for r in ranges if r]
    return torch.unique(torch.cat(rows)) if rows else torch.zeros(0, dtype=torch.int64)


def outside(ranges: Iterable[range], start: int, stop: int) -> Iterator[range]:
    """What of ranges is outside [start, stop), where there may be millions of members."""
    for rows in ranges:
        yield range(rows.start, min(start, rows.stop), rows.step)
        first = max(rows.start, _at_or_after(stop, rows.start, rows.step))
        yield range(first, rows.stop, rows.step)


def _at_or_after(start: int, head: int, r: int) -> int:
    """The first position p ≥ start with p ≡ head (mod r)."""
    return start + (head - start) % r


@lru_cache(maxsize=64)
def patterns_of(attention: Attention, layers: int) -> tuple[Pattern, ...]:
    """The pattern of each of a model's layers, by a run file's [attention] section."""
    return tuple(islice(cycle(map(layer_pattern, attention.cycle)), layers))


def pattern_of(attention: Attention) -> Pattern:
    """The pattern of a run file's [attention] section, if all layers have the same."""
    if attention.layers:
        raise ValueError("attention.layers has a pattern per layer: use patterns_of")
    return layer_pattern(attention)


def layer_pattern(attention: LayerAttention) -> Pattern:
    """The pattern of a layer."""
    if attention.kind == "dense":
        return Dense()
    if attention.kind == "window":
        from longspan.attention.window import Window  # it is a Pattern

        return Window(attention.window, attention.sinks, max(1, attention.window_dilation))
    if attention.kind == "dilated":
        return Dilated(attention.segment_lengths, attention.dilation_rates)
    blocks = BlockSparse(
        attention.block_size,
        attention.local_window,
        attention.global_tokens,
        attention.stride,
        attention.density,
        attention.block_seed,
    )
    if attention.kind == "block_sparse":
        return blocks
    return Dilated(attention.segment_lengths, attention.dilation_rates, blocks)
