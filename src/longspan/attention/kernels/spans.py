"""Where the documents of a sliding window are in the rows of queries and of keys."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from longspan.attention.packed import Packed
from longspan.attention.pattern import Pattern


class Span(NamedTuple):
    """The queries of one document, [first, end), and the keys that they see, as positions in it.

    `query` and `key` are where position 0 would be in the rows of q and of k; `sink` is where it
    is in those of k. Keys before `first_key` are sinks or absent.
    """

    query: int
    key: int
    sink: int
    first_key: int
    first: int
    end: int


def spans_of(starts: tuple[int, ...], tokens: int) -> tuple[Span, ...]:
    """Whole documents that begin at `starts`."""
    return tuple(Span(a, a, a, 0, 0, b - a) for a, b in pairwise((*starts, tokens)))


def shard_spans(pattern: Pattern, remote: Tensor, local: range) -> tuple[Span, ...] | None:
    """The documents of the `local` queries over their `remote` keys, followed by the local ones.

    `pattern`: a causal window, or documents with it; `remote`: increasing positions before `local`.
    None if the remote keys are not some sinks and then all others from one on.
    """
    documents = pattern if isinstance(pattern, Packed) else Packed(pattern, (0,))
    rows, spans = len(remote), list[Span]()
    for begin, first, end in documents.documents(local.start, local.stop):
        query = begin - local.start
        key, sink, first_key = rows + query, rows + query, 0
        if first > 0:  # only the first document began in an earlier shard
            positions = remote - begin
            sinks = int((positions == torch.arange(rows)).sum())  # increasing, so these lead
            first_key = first - (rows - sinks)
            if not torch.equal(positions[sinks:], torch.arange(first_key, first)):
                return None
            sink = 0
            if sinks == rows:  # all keys from the first one on, or no key at all
                first_key = 0 if rows == first else first
        spans.append(Span(query, key, sink, first_key, first, end))
    return tuple(spans)
