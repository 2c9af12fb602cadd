"""The backend that supports everything: any pattern, documents, padding, dropout, decoding.

Queries are processed in chunks, each with the keys and the mask that the pattern gives it. The
backward pass recomputes the weights of a chunk from the log-sum-exp. Memory is O(tokens + chunk ×
keys), the cost follows the pattern, and the arithmetic is float32. It is plain PyTorch, one head at
a time, for inputs without a faster backend.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from longspan.attention.mask import Mask
from longspan.attention.merge import attend_with_sinks
from longspan.dtypes import accumulation_dtype
from longspan.hashing import uniform

CHUNK = 256
"""Queries per chunk."""


class Places(NamedTuple):
    """Which queries and keys of a sequence are given; by default keys 0, 1, 2… and all heads."""

    key_positions: Tensor | None = None
    """Increasing int64 (keys,); they must include every position that the queries see."""
    first_query: int | None = None
    """Queries are consecutive. By default causal ones end at the last key, others start at 0."""
    first_head: int = 0
    tokens: int | None = None
    """The length of the sequence, if it continues after the last key."""


WHOLE = Places()


def reference_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float, places: Places = WHOLE
) -> Tensor:
    """q (batch, queries, heads, head_dim); k, v (batch, keys, kv_heads, head_dim)."""
    sinks, first_head = mask.sink_logits, places.first_head
    if sinks is not None:
        sinks = sinks[first_head : first_head + q.shape[2]]
    return attend_with_sinks(q, k, v, sinks, forward, backward, 1.0, mask, scale, places)


def forward(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float, places: Places = WHOLE
) -> tuple[Tensor, Tensor]:
    """The output and its natural log-sum-exp (batch, heads, queries); -inf if nothing is seen.

    Without `mask.sink_logits`, like `backward`.
    """
    batch, queries, heads, _ = q.shape
    dtype = accumulation_dtype(q)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty((batch, heads, queries), dtype=dtype, device=q.device)
    with torch.autocast(q.device.type, enabled=False):  # it would run the products in 16 bits
        for chunk in _chunks(q, k, mask, places):
            query, key, value = chunk.of(q, k, v, dtype)
            scores = scale * (query @ key.mT) + chunk.log_counts
            chunk_lse = scores.logsumexp(-1)
            weights = _weights(scores, chunk_lse)
            if chunk.kept is not None:
                weights = weights * chunk.kept
            out[chunk.rows, chunk.queries, chunk.head] = (weights @ value).to(out.dtype)
            lse[chunk.rows, chunk.head, chunk.queries] = chunk_lse
    return out, lse


def backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, mask: Mask,
    scale: float, places: Places = WHOLE,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of q, k and v, given that of the output and the results of `forward`."""
    dtype = lse.dtype
    dq, dk, dv = (torch.zeros(x.shape, dtype=dtype, device=x.device) for x in (q, k, v))
    delta = (grad_out.to(dtype) * out.to(dtype)).sum(-1)  # (batch, queries, heads)
    with torch.autocast(q.device.type, enabled=False):
        for chunk in _chunks(q, k, mask, places):
            rows, queries, head = chunk.rows, chunk.queries, chunk.head
            query, key, value = chunk.of(q, k, v, dtype)
            grad = grad_out[rows, queries, head].to(dtype)
            scores = scale * (query @ key.mT) + chunk.log_counts
            p = _weights(scores, lse[rows, head, queries])
            dp, dropped = grad @ value.mT, p
            if chunk.kept is not None:
                dp, dropped = dp * chunk.kept, p * chunk.kept
            ds = scale * p * (dp - delta[rows, queries, head][..., None])
            dq[rows, queries, head] = ds @ key
            dk[rows, chunk.keys, chunk.key_head] += ds.mT @ query
            dv[rows, chunk.keys, chunk.key_head] += dropped.mT @ grad
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def _weights(scores: Tensor, lse: Tensor) -> Tensor:
    """exp(scores − lse), and zeros for queries that see nothing."""
    return (scores - lse.masked_fill(lse == -torch.inf, torch.inf)[..., None]).exp()


class _Chunk(NamedTuple):
    """Some queries of one head, and the keys that they see."""

    rows: slice  # of the batch
    queries: slice
    head: int
    key_head: int
    keys: Tensor  # indices into the given keys
    log_counts: Tensor  # (batch or 1, queries, keys); a key seen c times counts c · exp(score)
    kept: Tensor | None  # the same shape: what weights are multiplied by, with dropout

    def of(self, q: Tensor, k: Tensor, v: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
        keys = (x[self.rows, self.keys, self.key_head].to(dtype) for x in (k, v))
        return q[self.rows, self.queries, self.head].to(dtype), *keys


def _chunks(q: Tensor, k: Tensor, mask: Mask, places: Places) -> Iterator[_Chunk]:
    """Heads one after the other, in rows of the batch that share a pattern."""
    batch, queries, heads, _ = q.shape
    rows = [(slice(None), mask)]
    if mask.documents is not None:
        rows = [(slice(row, row + 1), mask.of_row(row)) for row in range(batch)]
    positions, first, first_head, tokens = places
    if positions is None:
        positions = torch.arange(k.shape[1])
    if tokens is None:
        tokens = int(positions[-1]) + 1
    if first is None:
        first = tokens - queries if mask.is_causal else 0
    for row, of_row in rows:
        for head in range(heads):
            for start in range(0, queries, CHUNK):
                end = min(start + CHUNK, queries)
                seeing = torch.arange(first + start, first + end)
                span = first + start, first + end, tokens, first_head + head
                seen = of_row.pattern.key_rows(*span, is_causal=mask.is_causal)
                log_counts = _log_counts(of_row, seeing, seen, first_head + head, q)
                yield _Chunk(
                    row, slice(start, end), head, head * k.shape[2] // heads,
                    torch.searchsorted(positions, seen).to(q.device), log_counts,
                    _kept(of_row, seeing, seen, first_head + head, q[row]),
                )  # fmt: skip


def _log_counts(mask: Mask, queries: Tensor, keys: Tensor, head: int, like: Tensor) -> Tensor:
    """log of how often each query sees each key: (batch or 1, queries, keys)."""
    counts = mask.pattern.counts(queries, keys, head)
    if mask.is_causal:
        counts = counts.masked_fill(keys[None, :] > queries[:, None], 0)
    found = counts.to(like.device, accumulation_dtype(like)).log()[None]
    if mask.key_padding_mask is not None:
        is_padding = mask.key_padding_mask[:, keys.to(like.device)]
        found = found.masked_fill(is_padding[:, None, :], -torch.inf)
    return found


def _kept(mask: Mask, queries: Tensor, keys: Tensor, head: int, q: Tensor) -> Tensor | None:
    """0 for weights that dropout drops, else 1 / (1 − p)."""
    if mask.dropout_p == 0:
        return None
    batch = mask.first_row + torch.arange(len(q), device=q.device)[:, None, None]
    indices = torch.tensor(head), queries[:, None], keys
    drawn = uniform(mask.dropout_seed, batch, *(x.to(q.device) for x in indices))
    return (drawn >= mask.dropout_p).to(accumulation_dtype(q)) / (1 - mask.dropout_p)
