"""`Packed`: several documents in one sequence, each with the pattern of a sequence of its own."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from longspan.attention.pattern import Dilated, Pattern


@dataclass(frozen=True)
class Packed(Pattern):
    """Documents one after another: positions of `inner` start again at 0 in each of them.

    So a document sees what it sees alone, and nothing of the others.
    """

    inner: Pattern
    starts: tuple[int, ...]
    """The position of the first token of each document; the first one is 0."""

    def __post_init__(self) -> None:
        assert self.starts[0] == 0, self.starts
        object.__setattr__(self, "differs_by_head", self.inner.differs_by_head)

    def documents(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Documents with positions in [start, stop): where each begins, and its part of them.

        The part, first and last + 1, is relative to the beginning of the document.
        """
        for begin, end in pairwise((*self.starts, max(stop, self.starts[-1]))):
            if begin < stop and start < end:
                yield begin, max(start, begin) - begin, min(stop, end) - begin

    def ids(self, tokens: int) -> Tensor:
        """The document of each token: int64 (tokens,)."""
        return torch.searchsorted(torch.tensor(self.starts), torch.arange(tokens), right=True) - 1

    def counts(self, queries: Tensor, keys: Tensor, head: int) -> Tensor:
        starts = torch.tensor(self.starts)
        query_document, key_document = (
            torch.searchsorted(starts, x, right=True) - 1 for x in (queries, keys)
        )
        found = torch.zeros(len(queries), len(keys), dtype=torch.int64)
        for document in sorted(set(query_document.tolist())):
            rows, begin = (query_document == document).nonzero()[:, 0], self.starts[document]
            columns = (key_document == document).nonzero()[:, 0]
            inner = self.inner.counts(queries[rows] - begin, keys[columns] - begin, head)
            found[rows[:, None], columns] = inner
        return found

    def pairs(self, tokens: int, heads: int, *, is_causal: bool) -> int:
        return sum(
            self.inner.pairs(last, heads, is_causal=is_causal)
            for _, _, last in self.documents(0, tokens)
        )

    def covers(self, queries: Tensor, head: int) -> Tensor:
        starts = torch.tensor(self.starts)
        begin = starts[torch.searchsorted(starts, queries, right=True) - 1]
        return self.inner.covers(queries - begin, head)

    def key_rows(self, start: int, stop: int, tokens: int, head: int, *, is_causal: bool) -> Tensor:
        rows = []
        for begin, first, last in self.documents(start, stop):
            _, _, length = next(self.documents(begin, tokens))
            inner = self.inner.key_rows(first, last, length, head, is_causal=is_causal)
            rows.append(begin + inner)
        return torch.cat(rows)

    def remote_key_rows(
        self, start: int, stop: int, tokens: int, head: int, *, is_causal: bool
    ) -> Tensor:
        if not is_causal:
            return super().remote_key_rows(start, stop, tokens, head, is_causal=False)
        begin, first, last = next(self.documents(start, stop))  # others begin inside
        return begin + self.inner.remote_key_rows(first, last, last, head, is_causal=True)

    def retained(self, position: int) -> tuple[int, int]:
        begin = self._begin(position)
        sink, start = self.inner.retained(position - begin)
        return 0, begin if sink else begin + start

    def visible_keys(self, position: int, heads: int) -> list[tuple[range, range | Tensor]]:
        begin = self._begin(position)
        found = self.inner.visible_keys(position - begin, heads)
        return [(seeing, _shifted(keys, begin)) for seeing, keys in found]

    def first_key(self, start: int, stop: int, heads: int) -> int:
        begin, first, last = next(self.documents(start, stop))  # later ones see later keys
        return begin + self.inner.first_key(first, last, heads)

    def _begin(self, position: int) -> int:
        return self.starts[bisect_right(self.starts, position) - 1]


def _shifted(keys: range | Tensor, by: int) -> range | Tensor:
    return (
        range(keys.start + by, keys.stop + by, keys.step) if isinstance(keys, range) else keys + by
    )


def document_starts(ids: Tensor) -> tuple[int, ...]:
    """The position of the first token of each document: a run of equal integers (tokens,)."""
    changes = (ids[1:] != ids[:-1]).nonzero()[:, 0] + 1
    return (0, *changes.tolist())


def from_head(pattern: Pattern, head: int) -> Pattern:
    """The pattern of tensors whose first head is number `head` of those that `pattern` knows."""
    match pattern:
        case Dilated():
            return replace(pattern, first_head=pattern.first_head + head)
        case Packed():
            return replace(pattern, inner=from_head(pattern.inner, head))
    return pattern
