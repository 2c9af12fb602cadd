"""Context in time: a rank walks each sequence in chunks, `train.chunk_tokens` at a time.

The step is exact and takes about one forward pass more; what it needs in memory is the activations
of one chunk, and of each layer the rows of keys and values that later chunks see (see
`attention/context_parallel/chunks.py`). Everything but attention is local to a token, so the model
is called for a chunk as it is for a sequence, with the positions of the chunk: with sequence
(context) parallelism those of the rank's share of it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from longspan.attention import KVCaches, Shards
from longspan.attention.context_parallel.chunks import ChunkAttention, Walk
from longspan.attention.packed import document_starts
from longspan.models.decoder import Decoder, SelfAttention, document_positions
from longspan.parallel.pipeline import ForwardContext


class _Sequence(NamedTuple):
    """Samples that are walked together. Tensors are (batch, tokens)."""

    tokens: Tensor
    targets: Tensor
    positions: Tensor | None
    """In documents, if there are any; the batch is then one sample."""
    starts: tuple[int, ...]
    """Where those documents start."""
    samples: Tensor | None
    """With dropout, the index of each sample (batch,)."""
    shards: Shards


class ChunkedDecoder:
    """A decoder that walks sequences in chunks."""

    def __init__(
        self,
        model: Decoder,
        chunk_tokens: int,
        *,
        offload: bool,
        group: dist.ProcessGroup | None = None,
        agree: Callable[..., list[int]] | None = None,
    ) -> None:
        """`offload`: keep the rows of earlier chunks in CPU memory; `group`: the ranks that split
        every chunk, all of which are given whole sequences; `agree`: the largest of each of the
        given numbers over ranks that must take equally many passes.
        """
        self._model, self._chunk_tokens, self._agree = model, chunk_tokens, agree
        self._walk = Walk(offload=offload, group=group)
        attentions = (m for m in model.modules() if isinstance(m, SelfAttention))
        for layer, attention in enumerate(attentions):
            attention.attend = ChunkAttention(self._walk, layer)

    def backward(
        self,
        module: nn.Module,
        batch: tuple[Tensor, Tensor, Tensor | None, Tensor | None],
        scale: Tensor,
        context: ForwardContext,
        sync: Callable[[bool], AbstractContextManager[None]],
    ) -> Tensor:
        """Add the gradients of scale · loss of this rank's tokens; returns scale · loss.

        `batch`: tokens, targets and documents (batch, tokens), which may be in host memory, and
        with dropout the indices of samples (batch,); `module` is what a training step calls;
        `sync(is_last)` makes the context of a forward and backward pass, the last of this batch or
        not.
        """
        total = torch.zeros((), device=scale.device)
        sequences = self._sequences(*batch)
        for number, sequence in enumerate(sequences, start=1):
            chunks = range(sequence.shards.ranks)
            with self._walking(sequence):
                for chunk in chunks[:-1]:
                    with torch.no_grad(), context():
                        tokens, _, _, samples = self._enter(sequence, chunk, scale, keeps=True)
                        self._model.run_blocks(tokens, samples)
                for chunk in reversed(chunks):
                    is_last = chunk == 0 and number == len(sequences)
                    with sync(is_last):
                        with context():
                            inputs = self._enter(sequence, chunk, scale, keeps=False)
                            loss = module(*inputs) * scale
                        loss.backward()
                    total += loss.detach()
        return total

    @torch.no_grad()
    def __call__(self, tokens: Tensor, targets: Tensor, documents: Tensor | None = None) -> Tensor:
        """The summed cross-entropy of this rank's share of tokens (batch, tokens)."""
        total = torch.zeros((), device=tokens.device)
        for sequence in self._sequences(tokens, targets, documents):
            with self._walking(sequence):
                for chunk in range(sequence.shards.ranks):
                    total += self._model(*self._enter(sequence, chunk, tokens, keeps=True))
        return total

    def new_caches(self, capacity: int | None = None) -> KVCaches:
        return self._model.new_caches(capacity)

    def next_logits(self, tokens: Tensor, caches: KVCaches) -> Tensor:
        return self._model.next_logits(tokens, caches)

    def _sequences(
        self,
        tokens: Tensor,
        targets: Tensor,
        documents: Tensor | None,
        samples: Tensor | None = None,
    ) -> list[_Sequence]:
        """The whole batch or, with documents, one sample at a time: each has its own chunks."""
        length = tokens.shape[1]
        if documents is None:
            shards = Shards(self._boundaries((0,), length))
            return [_Sequence(tokens, targets, None, (), samples, shards)]
        found, documents = [], documents.cpu()
        starts_of = [document_starts(ids) for ids in documents]
        chunks = [self._boundaries(starts, length) for starts in starts_of]
        if self._agree is not None:
            counts = self._agree(*(len(boundaries) - 1 for boundaries in chunks))
            chunks = list(map(self._split, chunks, starts_of, counts))
        for row, (ids, starts) in enumerate(zip(documents, starts_of, strict=True)):
            rows, shards = slice(row, row + 1), Shards(chunks[row])
            found.append(
                _Sequence(
                    tokens[rows],
                    targets[rows],
                    document_positions(ids[None]),
                    starts,
                    None if samples is None else samples[rows],
                    shards,
                )
            )
        return found

    def _boundaries(self, starts: tuple[int, ...], tokens: int) -> tuple[int, ...]:
        return chunk_boundaries(starts, tokens, self._chunk_tokens, self._walk.ranks)

    def _split(
        self, boundaries: tuple[int, ...], starts: tuple[int, ...], count: int
    ) -> tuple[int, ...]:
        return split_chunks(boundaries, starts, count, self._chunk_tokens, self._walk.ranks)

    @contextmanager
    def _walking(self, sequence: _Sequence) -> Iterator[None]:
        self._walk.begin(sequence.shards, sequence.starts)
        try:
            yield
        finally:
            self._walk.end()
            self._model.positions = self._model.positions_in_documents = None

    def _enter(
        self, sequence: _Sequence, chunk: int, like: Tensor, *, keeps: bool
    ) -> tuple[Tensor, Tensor, None, Tensor | None]:
        """Come to a chunk; returns what the model is given, on the device of `like`."""
        self._walk.enter(chunk, keeps=keeps and chunk < sequence.shards.ranks - 1)
        local = self._walk.local_range
        here = slice(local.start, local.stop)
        self._model.positions = torch.arange(local.start, local.stop, device=like.device)
        if sequence.positions is not None:
            self._model.positions_in_documents = sequence.positions[:, here]
        samples = sequence.samples
        tokens, targets = (
            x[:, here].to(like.device, non_blocking=True)
            for x in (sequence.tokens, sequence.targets)
        )
        return tokens, targets, None, None if samples is None else samples.to(like.device)


def chunk_boundaries(
    starts: tuple[int, ...], tokens: int, size: int, least: int = 1
) -> tuple[int, ...]:
    """Where chunks of at most `size` tokens begin and end in a sequence of documents at `starts`.

    A chunk ends with a document if it can, so that few rows are kept: only a document longer than
    a chunk is cut, and it begins with a chunk. `least`: tokens that every chunk has, a divisor of
    `size` and `tokens`.
    """
    found = [0]
    while (here := found[-1]) + size < tokens:
        last = starts[bisect_right(starts, here + size) - 1]
        found.append(min(here + size if last < here + least else last, tokens - least))
    return (*found, tokens)


def split_chunks(
    boundaries: tuple[int, ...], starts: tuple[int, ...], count: int, size: int, least: int = 1
) -> tuple[int, ...]:
    """`chunk_boundaries` with longest chunks split, until there are `count`.

    Where a document starts, as near to the middle as there is one; else at half of `size`, a
    quarter, and so on, which segments may be aligned with.
    """
    found = list(boundaries)
    while len(found) <= count:
        length, first = max((b - a, a) for a, b in pairwise(found))
        stop = first + length
        cuts = [x for x in starts if first + least <= x <= stop - least]
        if cuts:
            cut = min(cuts, key=lambda x: abs(2 * x - first - stop))
        else:
            part = size
            while part >= length:
                part //= 2
            cut = min(first + part, stop - least)
        found.insert(found.index(stop), cut)
    return tuple(found)
