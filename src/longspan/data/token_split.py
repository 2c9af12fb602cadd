"""The tokens of a split: where documents end, and which tokens are targets."""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from longspan.data.samples import Ints
from longspan.data.shards import Spans


class Tokens(Protocol):
    """Tokens that are read by slices: an array, or the file of a shard."""

    def __len__(self) -> int: ...
    def __getitem__(self, which: slice, /) -> NDArray[Any]: ...


class TokenSplit:
    """One split: tokens that are read as if concatenated, and the end of each document.

    A token is a target if it has a loss and is not the first of its document.
    """

    def __init__(
        self, arrays: Sequence[Tokens], document_ends: Ints, loss: Spans | None = None
    ) -> None:
        """`loss`: the tokens that have one; None for all."""
        self.arrays, self.document_ends = arrays, document_ends
        self._edges: Ints | None = None
        """Where spans of tokens with a loss begin and end, alternating."""
        self._begins = document_ends
        """First tokens of documents, the first one excepted, that have a loss."""
        if loss is not None:
            self._edges = loss.ravel()
            self._loss_before = np.concatenate([[0], np.cumsum(loss[:, 1] - loss[:, 0])])
            self._begins = document_ends[
                np.searchsorted(self._edges, document_ends, "right") % 2 == 1
            ]
        self._starts = [0, *itertools.accumulate(map(len, arrays))]
        self.total = self._starts[-1]

    def read(self, start: int, stop: int) -> Ints:
        chunks, first = [], bisect_right(self._starts, start) - 1
        for array, offset in zip(self.arrays[first:], self._starts[first:], strict=False):
            if offset >= stop:
                break
            chunks.append(array[max(start - offset, 0) : stop - offset].astype(np.int64))
        return np.concatenate(chunks)

    @property
    def is_masked(self) -> bool:
        """Whether some tokens have no loss."""
        return self._edges is not None

    @property
    def targets(self) -> int:
        return int(self.num_targets(np.array(1), np.array(self.total))) if self.total else 0

    def num_targets(self, first: Ints, stop: Ints) -> Ints:
        """How many of the tokens from `first` up to `stop` are targets, for each pair of them.

        `first` is at least 1; `stop` may be one beyond the last token.
        """
        begins = np.searchsorted(self._begins, stop) - np.searchsorted(self._begins, first)
        if self._edges is None:
            return np.asarray(stop - first - begins)
        return np.asarray(self._with_loss(stop) - self._with_loss(first) - begins)

    def is_target(self, first: int, stop: int) -> NDArray[np.bool_]:
        """Whether each of the tokens from `first`, at least 1, up to `stop` is a target."""
        found = np.ones(stop - first, dtype=np.bool_)
        if self._edges is not None:
            found = np.searchsorted(self._edges, np.arange(first, stop), "right") % 2 == 1
        begins = self._begins[slice(*np.searchsorted(self._begins, [first, stop]))]
        found[begins - first] = False
        return found

    def _with_loss(self, position: Ints) -> Ints:
        """How many tokens before a position have a loss."""
        assert self._edges is not None
        edge = np.searchsorted(self._edges, position, "right")
        since = position - np.append(self._edges, 0)[edge - 1]
        return np.asarray(self._loss_before[edge // 2] + np.where(edge % 2 == 1, since, 0))
