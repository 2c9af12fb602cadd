"""One attention over a run of keys that also returns its log-sum-exp, so that parts can be joined.

`torch.nn.functional.scaled_dot_product_attention` hides the log-sum-exp; the ATen operators
beneath it return it and take it back in their backward. Layout here is theirs:
(batch, heads, tokens, head_dim), and (batch, heads, tokens) for the log-sum-exp.

Flash backward recomputes P = exp(S − lse) and uses δ = rowsum(dO ∘ O). Handed the *joined* O and
lse of several parts instead of the part's own, P is the part's share of the joint softmax and δ
is the joint one, so the result is the part's exact share of the joint gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

_aten = torch.ops.aten


def partial_forward(
    q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Output (batch, heads, tokens, head_dim) and log-sum-exp (batch, heads, tokens)."""
    if q.device.type == "cpu":
        out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, is_causal, scale=scale
        )
    elif q.dtype == torch.float32:
        out, lse, *_ = _aten._scaled_dot_product_efficient_attention(
            q, k, v, None, True, 0.0, is_causal, scale=scale
        )
        lse = lse[..., : q.shape[2]]  # the kernel pads its rows to a multiple of 32
    else:
        out, lse, *_ = _aten._scaled_dot_product_flash_attention(
            q, k, v, 0.0, is_causal, False, scale=scale
        )
    return out, lse


def partial_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    is_causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """This part's share of the gradients of q, k and v, given the joined `out` and `lse`."""
    if q.device.type == "cpu":
        grads = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad_out, q, k, v, out, lse, 0.0, is_causal, scale=scale
        )
    elif q.dtype == torch.float32:
        rows = lse.shape[-1]
        lse = pad(lse, (0, -rows % 32), value=float("inf")).contiguous()
        no_rng = torch.zeros((), dtype=torch.int64)
        grads = _aten._scaled_dot_product_efficient_attention_backward(
            grad_out, q, k, v, None, out, lse, no_rng, no_rng, 0.0,
            [True, True, True, False], is_causal, scale=scale,
        )[:3]  # fmt: skip
    else:
        rows = q.shape[2]
        no_rng = torch.zeros(2, dtype=torch.uint64, device=q.device)
        grads = _aten._scaled_dot_product_flash_attention_backward(
            grad_out, q, k, v, out, lse.contiguous(), None, None, rows, rows,
            0.0, is_causal, no_rng, no_rng, scale=scale,
        )  # fmt: skip
    grad_q, grad_k, grad_v = grads
    return grad_q, grad_k, grad_v
