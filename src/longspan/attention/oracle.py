"""The float64 oracle: attention computed straight from the pattern's definition.

O(tokens²) memory and one loop over heads: slow, and easy to check by eye. Everything fast is
compared with it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from longspan.attention.pattern import Pattern


def attend_oracle(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pattern: Pattern,
    *,
    is_causal: bool = True,
    scale: float | None = None,
) -> Tensor:
    """Softmax over the multiset of keys each query sees, in float64, differentiable by autograd.

    q is (batch, tokens, heads, head_dim), k and v (batch, tokens, kv_heads, head_dim); query head
    h reads kv head h // (heads / kv_heads). Returns float64 (batch, tokens, heads, head_dim).
    A query that no branch covers gives zeros.
    """
    q, k, v = q.double().cpu(), k.double().cpu(), v.double().cpu()
    tokens, heads, head_dim = q.shape[1:]
    scale = head_dim**-0.5 if scale is None else scale
    group = heads // k.shape[2]
    position = torch.arange(tokens)
    outputs = []
    for head in range(heads):
        counts = pattern.counts(position, position, head)
        if is_causal:
            counts = counts.tril()
        # A key seen c times contributes c·exp(score): log c added to its score, -inf for c = 0.
        scores = scale * q[:, :, head] @ k[:, :, head // group].mT + counts.double().log()
        uncovered = (counts == 0).all(-1, keepdim=True)
        scores = scores.masked_fill(uncovered, 0.0)  # a softmax of nothing has no gradient
        weights = scores.softmax(-1).masked_fill(uncovered, 0.0)
        outputs.append(weights @ v[:, :, head // group])
    return torch.stack(outputs, dim=2)
