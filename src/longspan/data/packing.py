"""Best-fit packing: documents into windows of `context` tokens, cut only where one does not fit.

A document longer than a window fills whole windows; the rest of it, and every shorter document, is
placed by best-fit decreasing: the longest first, each into the fullest window that has room for it
(Ding et al. 2024, "Fewer Truncations Improve Language Modeling"). Pieces of equal length are placed
together, so the time depends on the number of different lengths, not of documents.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from longspan.constants import IGNORE_INDEX
from longspan.data.samples import Ints, Sample
from longspan.data.source import TokenSource
from longspan.data.token_split import TokenSplit
from longspan.wording import counted


@dataclass(frozen=True)
class Packing:
    """Pieces of documents, ordered by window."""

    starts: Ints
    """The first token of each piece in the split."""
    lengths: Ints
    has_end: NDArray[np.bool_]
    """Whether a piece ends with its document: its last token has no target."""
    windows: Ints
    """Where the pieces of each window begin, and in the end the number of pieces."""

    def __len__(self) -> int:
        """The number of windows."""
        return len(self.windows) - 1

    @property
    def tokens(self) -> int:
        return int(self.lengths.sum())


def pack(document_ends: Ints, context: int) -> Packing:
    """Pack the documents that end at `document_ends`, one after another in a split."""
    begins = np.concatenate([[0], document_ends])[:-1].astype(np.int64)
    sizes = document_ends - begins
    whole, rest = sizes // context, sizes % context
    # Piece number 0, 1, … of each document that is longer than a window, then the rests.
    numbers = np.arange(whole.sum()) - np.repeat(np.cumsum(whole) - whole, whole)
    whole_starts = np.repeat(begins, whole) + context * numbers
    has_rest = rest > 0
    starts = np.concatenate([whole_starts, (begins + whole * context)[has_rest]])
    lengths = np.concatenate([np.full(len(whole_starts), context), rest[has_rest]])
    window = np.concatenate(
        [np.arange(len(whole_starts)), len(whole_starts) + best_fit(rest[has_rest], context)]
    )
    order = np.lexsort((starts, window))
    starts, lengths, window = starts[order], lengths[order], window[order]
    count = int(window[-1]) + 1 if len(window) else 0
    return Packing(
        starts,
        lengths,
        np.isin(starts + lengths, document_ends),
        np.searchsorted(window, np.arange(count + 1)),
    )


def best_fit(lengths: Ints, capacity: int) -> Ints:
    """The bin of each item, for items of these lengths and bins of `capacity`: int64 (items,)."""
    order = np.argsort(-lengths, kind="stable")
    descending, found = lengths[order], np.empty(len(lengths), dtype=np.int64)
    free: dict[int, list[Ints]] = {}  # bins by how much room they have
    rooms: list[int] = []  # the keys of `free`, sorted
    opened = 0
    edges = [*np.flatnonzero(np.diff(descending, prepend=-1)).tolist(), len(lengths)]
    for first, stop in pairwise(edges):
        length, at = int(descending[first]), first
        while at < stop:
            place = bisect_left(rooms, length)
            room = rooms[place] if place < len(rooms) else capacity
            each = min(room // length, stop - at)  # items that a bin takes
            wanted = (stop - at) // each
            if place < len(rooms):
                bins = free[room].pop()
                taken, left = bins[:wanted], bins[wanted:]
                if len(left):
                    free[room].append(left)
                elif not free[room]:
                    del free[room], rooms[place]
            else:
                taken = np.arange(opened, opened + wanted)
                opened += wanted
            count = len(taken) * each
            found[order[at : at + count]] = np.repeat(taken, each)
            at += count
            if now := room - each * length:
                if now not in free:
                    insort(rooms, now)
                free.setdefault(now, []).append(taken)
    return found


class PackedSource(TokenSource):
    """Packs whole documents into windows, for attention that does not cross their boundaries."""

    def __init__(self, splits: dict[str, TokenSplit], context: int, *arguments: Any) -> None:
        self._packings = {name: pack(x.document_ends, context) for name, x in splits.items()}
        super().__init__(splits, context, *arguments)

    @property
    def least_tokens(self) -> int:
        return self.context  # fewer would be one window that is mostly padding

    def num_windows(self, split: str) -> int:
        return len(self._packings[split])

    def describe(self) -> str:
        packing = self._packings["train"]
        padding = 1 - packing.tokens / (len(packing) * self.context)
        documents = counted(len(self.splits["train"].document_ends), "document")
        return f"{super().describe()} of {documents}, {padding:.1%} padding"

    def num_targets(self, seed: int, index: int) -> int:
        packing = self._packings["train"]
        window = self._train_window(seed, index)
        pieces = slice(*packing.windows[window : window + 2])
        first = packing.starts[pieces] + 1
        return int(self.splits["train"].num_targets(first, first + packing.lengths[pieces]).sum())

    def _window(self, split: str, window: int) -> Sample:
        packing = self._packings[split]
        tokens = np.zeros(self.context, dtype=np.int64)
        targets = np.full(self.context, IGNORE_INDEX, dtype=np.int64)
        documents = np.zeros(self.context, dtype=np.int64)
        at = 0
        for number, piece in enumerate(range(*packing.windows[window : window + 2])):
            start, length = int(packing.starts[piece]), int(packing.lengths[piece])
            read = self._tokens(split, start, start + length + (not packing.has_end[piece]))
            tokens[at : at + length] = read[:length]
            is_target = self.splits[split].is_target(start + 1, start + len(read))
            targets[at : at + len(read) - 1] = np.where(is_target, read[1:], IGNORE_INDEX)
            documents[at : at + length] = number
            at += length
        documents[at:] = -1  # padding
        return Sample(tokens, targets, documents)
