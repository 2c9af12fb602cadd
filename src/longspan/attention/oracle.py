"""The float64 oracle: attention computed directly from the pattern's definition.

O(tokens²) memory and one loop over heads: slow, and easy to verify by reading. Every backend is
tested against it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from longspan.attention.mask import check_pattern
from longspan.attention.packed import Packed, document_starts
from longspan.attention.pattern import Pattern
from longspan.hashing import uniform


def attend_oracle(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pattern: Pattern,
    *,
    is_causal: bool = True,
    scale: float | None = None,
    documents: Tensor | None = None,
    key_padding_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: int = 0,
    sink_logits: Tensor | None = None,
) -> Tensor:
    """Softmax over the multiset of keys that each query sees, in float64, differentiable.

    Takes the arguments of `attend`. Returns float64 (batch, queries, heads, head_dim) on the CPU.
    """
    check_pattern(pattern)
    q, k, v = q.double().cpu(), k.double().cpu(), v.double().cpu()
    (batch, queries, heads, head_dim), keys = q.shape, k.shape[1]
    scale = head_dim**-0.5 if scale is None else scale
    group = heads // k.shape[2]
    key_at = torch.arange(keys)
    query_at = torch.arange(queries) + (keys - queries if is_causal else 0)
    patterns = [pattern] * batch
    if documents is not None:  # each is a sequence of its own
        patterns = [Packed(pattern, document_starts(ids)) for ids in documents.cpu()]
    hidden = torch.zeros(batch, queries, keys, dtype=torch.bool)
    if is_causal:
        hidden |= key_at[None, :] > query_at[:, None]
    if key_padding_mask is not None:
        hidden |= key_padding_mask.cpu()[:, None, :]
    outputs = []
    for head in range(heads):
        counts = torch.stack([pattern.counts(query_at, key_at, head) for pattern in patterns])
        counts = counts.masked_fill(hidden, 0)
        # A key seen c times contributes c·exp(score): log c added to its score, -inf for c = 0.
        scores = scale * q[:, :, head] @ k[:, :, head // group].mT + counts.double().log()
        uncovered = (counts == 0).all(-1, keepdim=True)
        scores = scores.masked_fill(uncovered, 0.0)  # the softmax of an empty row has no gradient
        if sink_logits is not None:  # as the score of one more key, whose value is zero
            sink = sink_logits.double().cpu()[head].expand(batch, queries, 1)
            scores = torch.cat([scores, sink], dim=-1)
        weights = scores.softmax(-1)[..., :keys].masked_fill(uncovered, 0.0)
        if dropout_p > 0:
            rows = torch.arange(batch)[:, None, None]
            indices = rows, torch.tensor(head), query_at[:, None], key_at
            kept = uniform(dropout_seed, *indices) >= dropout_p
            weights = weights * kept / (1 - dropout_p)
        outputs.append(weights @ v[:, :, head // group])
    return torch.stack(outputs, dim=2)
