"""The path that can do everything: any pattern, documents, padding, dropout, decoding.

Queries go in chunks, each against the keys that the pattern says it needs, with the mask of that
chunk alone; a chunk is computed again in the backward pass instead of being kept. Memory is
O(tokens + chunk × keys), cost follows the pattern, and the arithmetic is float32. It is plain
PyTorch, one head at a time: for what has no faster path.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from longspan.attention.pattern import Pattern
from longspan.hashing import uniform

CHUNK = 256
"""Queries at a time."""


@dataclass(frozen=True)
class Mask:
    """What `attend` was asked for, beside the tensors."""

    pattern: Pattern
    is_causal: bool = True
    documents: Tensor | None = None
    key_padding_mask: Tensor | None = None
    dropout_p: float = 0.0
    dropout_seed: int = 0


def masked_attention(
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

    `key_positions`, int64 (keys,) and rising, says where the keys stand when not at 0, 1, 2…; it
    must hold every position that the queries see. The queries follow one another from
    `first_query`; unless given, causal ones end with the last key, others begin at 0. `first_head`
    says which of the mask's heads the first one is, `tokens` how long the sequence is where it goes
    on after the last key.
    """
    queries, heads = q.shape[1:3]
    group = heads // k.shape[2]
    if key_positions is None:
        key_positions = torch.arange(k.shape[1])
    tokens = int(key_positions[-1]) + 1 if tokens is None else tokens
    if first_query is None:
        first_query = tokens - queries if mask.is_causal else 0
    by_head = []
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
        by_head.append(torch.cat(chunks, dim=1))
    return torch.stack(by_head, dim=2)


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
    """q (batch, chunk, head_dim) of queries from `first` on; k, v (batch, keys, head_dim)."""
    last, device = first + q.shape[1], q.device
    exact = torch.float64 if q.dtype == torch.float64 else torch.float32
    rows = mask.pattern.key_rows(first, last, tokens, head, is_causal=mask.is_causal)
    position = torch.arange(first, last)
    counts = mask.pattern.counts(position, rows, head)
    if mask.is_causal:
        counts = counts.masked_fill(rows[None, :] > position[:, None], 0)
    index = torch.searchsorted(key_positions, rows).to(device)
    rows, position, counts = rows.to(device), position.to(device), counts.to(device)
    seen = (counts > 0)[None]  # (batch or 1, chunk, rows)
    if mask.documents is not None:
        documents = mask.documents
        seen = seen & (documents[:, position][:, :, None] == documents[:, rows][:, None, :])
    if mask.key_padding_mask is not None:
        seen = seen & ~mask.key_padding_mask[:, rows][:, None, :]

    with torch.autocast(device.type, enabled=False):  # which would take the products in 16 bits
        scores = scale * (q.to(exact) @ k[:, index].to(exact).mT) + counts.to(exact).log()
        scores = scores.masked_fill(~seen, -torch.inf)
        some = seen.any(-1, keepdim=True)  # a query that sees nothing gives zeros, not NaN
        weights = scores.masked_fill(~some, 0.0).softmax(-1).masked_fill(~some, 0.0)
        if mask.dropout_p > 0:
            batch = torch.arange(q.shape[0], device=device)[:, None, None]
            place = batch, torch.tensor(head, device=device), position[:, None], rows
            kept = uniform(mask.dropout_seed, *place) >= mask.dropout_p
            weights = weights * kept / (1 - mask.dropout_p)
        return (weights @ v[:, index].to(exact)).to(q.dtype)
