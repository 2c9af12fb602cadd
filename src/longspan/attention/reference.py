"""The backend that supports everything: any pattern, documents, padding, dropout, decoding.

Queries are processed in chunks, each with the keys and the mask that the pattern gives it. Chunks
are recomputed in the backward pass (activation checkpointing). Memory is O(tokens + chunk × keys),
the cost follows the pattern, and the arithmetic is float32. It is plain PyTorch, one head at a
time, for inputs without a faster backend.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from longspan.attention.mask import Mask
from longspan.dtypes import accumulation_dtype
from longspan.hashing import uniform

CHUNK = 256
"""Queries per chunk."""


def reference_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    scale: float,
    key_positions: Tensor | None = None,
    *,
    first_query: int | None = None,
    first_head: int = 0,
    tokens: int | None = None,
) -> Tensor:
    """q (batch, queries, heads, head_dim); k, v (batch, keys, kv_heads, head_dim).

    `key_positions`: increasing int64 (keys,), the positions of the keys if they are not 0, 1, 2…;
    they must include every position that the queries see. Queries are consecutive and start at
    `first_query`; by default causal queries end at the last key and others start at 0.
    `first_head` is the index of q's first head in the pattern, `tokens` the length of the sequence
    if it continues after the last key.
    """
    if mask.documents is not None:
        outputs = []
        for row in range(q.shape[0]):
            rows, of_row = slice(row, row + 1), mask.of_row(row)
            outputs.append(
                reference_attention(
                    q[rows],
                    k[rows],
                    v[rows],
                    of_row,
                    scale,
                    key_positions,
                    first_query=first_query,
                    first_head=first_head,
                    tokens=tokens,
                )
            )
        return torch.cat(outputs)
    queries, heads = q.shape[1:3]
    group = heads // k.shape[2]
    if key_positions is None:
        key_positions = torch.arange(k.shape[1])
    tokens = int(key_positions[-1]) + 1 if tokens is None else tokens
    if first_query is None:
        first_query = tokens - queries if mask.is_causal else 0
    outputs = []
    for head in range(heads):
        key, value = k[:, :, head // group], v[:, :, head // group]
        chunks = [
            checkpoint(
                _attend_chunk, q[:, start : start + CHUNK, head], key, value, key_positions,
                first_query + start, tokens, first_head + head, mask, scale, use_reentrant=False,
                preserve_rng_state=False,
            )
            for start in range(0, queries, CHUNK)
        ]  # fmt: skip
        outputs.append(torch.cat(chunks, dim=1))
    return torch.stack(outputs, dim=2)


def _attend_chunk(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_positions: Tensor,
    first: int,
    tokens: int,
    head: int,
    mask: Mask,
    scale: float,
) -> Tensor:
    """One head: q (batch, chunk, head_dim) from position `first`; k, v (batch, keys, head_dim)."""
    last, device = first + q.shape[1], q.device
    dtype = accumulation_dtype(q)
    rows = mask.pattern.key_rows(first, last, tokens, head, is_causal=mask.is_causal)
    position = torch.arange(first, last)
    counts = mask.pattern.counts(position, rows, head)
    if mask.is_causal:
        counts = counts.masked_fill(rows[None, :] > position[:, None], 0)
    index = torch.searchsorted(key_positions, rows).to(device)
    rows, position, counts = rows.to(device), position.to(device), counts.to(device)
    seen = (counts > 0)[None]  # (batch or 1, chunk, rows)
    if mask.key_padding_mask is not None:
        seen = seen & ~mask.key_padding_mask[:, rows][:, None, :]

    with torch.autocast(device.type, enabled=False):  # it would run the products in 16 bits
        scores = scale * (q.to(dtype) @ k[:, index].to(dtype).mT) + counts.to(dtype).log()
        scores = scores.masked_fill(~seen, -torch.inf)
        some = seen.any(-1, keepdim=True)  # a query that sees nothing gives zeros, not NaN
        scores = scores.masked_fill(~some, 0.0)
        if mask.sink_logits is not None:
            sink = mask.sink_logits[head].to(dtype).expand(*scores.shape[:2], 1)
            scores = torch.cat([scores, sink], dim=-1)
        weights = scores.softmax(-1)[..., : len(rows)].masked_fill(~some, 0.0)
        if mask.dropout_p > 0:
            batch = mask.first_row + torch.arange(q.shape[0], device=device)[:, None, None]
            indices = batch, torch.tensor(head, device=device), position[:, None], rows
            kept = uniform(mask.dropout_seed, *indices) >= mask.dropout_p
            weights = weights * kept / (1 - mask.dropout_p)
        return (weights @ v[:, index].to(dtype)).to(q.dtype)
