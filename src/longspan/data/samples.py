"""Samples, batches of them, and the loss of a model without long context on them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from longspan.constants import IGNORE_INDEX

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Sample:
    """One sequence of `context` tokens. Arrays are int64 of shape (context,)."""

    tokens: Ints
    targets: Ints
    """The next token at each position, or IGNORE_INDEX for no loss."""
    documents: Ints | None = None
    """A number for each token; a run of equal ones is a document, which attention does not leave.
    None for one document."""


@dataclass(frozen=True)
class Batch:
    """A batch of samples: int64 tensors of shape (batch, context)."""

    tokens: Tensor
    targets: Tensor
    documents: Tensor | None = None
    """See `Sample`."""
    samples: Tensor | None = None
    """The index of each sample in the endless order, int64 (batch,)."""

    def split(self, size: int) -> list[Batch]:
        """Split into batches of at most `size` samples."""
        starts = range(0, len(self.tokens), size)
        return [self._map(itemgetter(slice(i, i + size))) for i in starts]

    def pin_memory(self) -> Batch:
        """Copy to page-locked host memory, from which copies to a GPU are asynchronous."""
        return self._map(lambda x: x.pin_memory())

    def to(self, device: torch.device) -> Batch:
        """Copy to a device, asynchronously from pinned memory.

        Documents stay in host memory: that is where attention looks up their boundaries.
        """
        there = self._map(lambda x: x.to(device, non_blocking=True))
        return replace(there, documents=self.documents)

    def _map(self, function: Callable[[Tensor], Tensor]) -> Batch:
        documents = None if self.documents is None else function(self.documents)
        samples = None if self.samples is None else function(self.samples)
        return Batch(function(self.tokens), function(self.targets), documents, samples)


@dataclass(frozen=True)
class Baseline:
    """The loss of a model without long context on the same targets, in nats per token."""

    name: str
    nats: float


def collate(samples: Sequence[Sample], indices: Sequence[int] | None = None) -> Batch:
    """Stack samples, of these indices, into tensors of shape (batch, context) in host memory."""
    import torch  # late: `longspan data` makes no tensor

    tokens, targets = (
        torch.from_numpy(np.stack([getattr(sample, name) for sample in samples]))
        for name in ("tokens", "targets")
    )
    documents = [sample.documents for sample in samples if sample.documents is not None]
    return Batch(
        tokens,
        targets,
        torch.from_numpy(np.stack(documents)) if documents else None,
        None if indices is None else torch.tensor(indices),
    )


def count_targets(samples: list[Sample]) -> int:
    """Return the number of positions with a target."""
    return sum(int((sample.targets != IGNORE_INDEX).sum()) for sample in samples)


def bigram_nats(fitted: list[Sample], samples: list[Sample], vocab: int) -> float:
    """Return the cross-entropy, in nats, of `samples` under a bigram model of `fitted`.

    Witten-Bell smoothing mixes in the unigram model, by as much as new tokens are to be expected:
        p(b | a) = (n(a, b) + d(a) p(b)) / (n(a) + d(a)),   p(b) = (n(b) + 1) / (n + vocab),
    where n counts pairs and d(a) the different tokens after a; after an unseen a it is p(b). Only
    pairs that occur are counted, so memory is O(tokens + vocab), not O(vocab²).
    """
    if count_targets(samples) == 0:
        return 0.0
    before, after = _pairs(fitted)
    pairs, counts = np.unique(before * vocab + after, return_counts=True)
    unigram = (np.bincount(after, minlength=vocab) + 1) / (len(after) + vocab)
    total = np.bincount(before, minlength=vocab)
    different = np.maximum(1, np.bincount(pairs // vocab, minlength=vocab))
    pairs, counts = np.append(pairs, vocab * vocab), np.append(counts, 0)  # above all pairs
    before, after = _pairs(samples)
    found = np.searchsorted(pairs, before * vocab + after)
    count = np.where(pairs[found] == before * vocab + after, counts[found], 0)
    smoothed = count + different[before] * unigram[after]
    return float(np.mean(np.log(total[before] + different[before]) - np.log(smoothed)))


def _pairs(samples: list[Sample]) -> tuple[Ints, Ints]:
    """The tokens of samples that have a target, and their targets."""
    before = np.concatenate([sample.tokens for sample in samples])
    after = np.concatenate([sample.targets for sample in samples])
    return before[after != IGNORE_INDEX], after[after != IGNORE_INDEX]
