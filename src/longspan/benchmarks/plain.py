"""A plain dilated attention as a baseline: gather, attend and scatter, branch by branch.

Each branch gathers its rows, runs torch's flash attention on them and scatters the outputs back.
The branches are then averaged with weights from their log-sum-exps. As in other implementations no
gradient flows through those weights, so its gradients are not those of the joint softmax.
"""

from __future__ import annotations

import torch
from torch import Tensor

from longspan.attention import Dilated
from longspan.torch_internals import cpu_flash_attention, sdpa_flash_attention


def plain_dilated(q: Tensor, k: Tensor, v: Tensor, pattern: Dilated) -> Tensor:
    """q, k, v (batch, tokens, heads, head_dim), causal; segments must divide the tokens."""
    outputs, logs = [], []
    for w, r in pattern.branches:
        out, lse = _branch(q, k, v, min(w, q.shape[1]), r)
        outputs.append(out)
        logs.append(lse)
    weights = torch.stack(logs).softmax(0).to(q.dtype)
    return sum((w[..., None] * out for w, out in zip(weights, outputs, strict=True)), q * 0)


def _branch(q: Tensor, k: Tensor, v: Tensor, w: int, r: int) -> tuple[Tensor, Tensor]:
    batch, tokens, heads, dims = q.shape
    assert tokens % w == 0
    row = torch.arange(tokens // r, device=q.device)[:, None] * r
    rows = row + torch.arange(heads, device=q.device) % r  # (tokens / r, heads)
    index = rows[None, :, :, None].expand(batch, -1, -1, dims)

    def gathered(x: Tensor) -> Tensor:
        return x.gather(1, index).reshape(-1, w // r, heads, dims).transpose(1, 2)

    partial, lse = _flash(gathered(q), gathered(k), gathered(v))
    partial = partial.transpose(1, 2).reshape(batch, tokens // r, heads, dims)
    lse = lse.detach().transpose(1, 2).reshape(batch, tokens // r, heads)
    out = torch.zeros_like(q).scatter(1, index, partial)
    uncovered = torch.full((batch, tokens, heads), -1e8, dtype=lse.dtype, device=q.device)
    return out, uncovered.scatter(1, index[..., 0], lse)


def _flash(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """The output and the log-sum-exp, (batch, heads, tokens, head_dim) and without head_dim."""
    if q.device.type == "cpu":
        return cpu_flash_attention(q, k, v, is_causal=True)
    return sdpa_flash_attention(q, k, v, is_causal=True)
