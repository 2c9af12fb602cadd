"""One part of a joint softmax: some queries over some keys, by torch's flash kernels or cuDNN's.

`scaled_dot_product_attention` hides the log-sum-exp; the ATen operators beneath it return it and
take it back in their backward. That recomputes P = exp(S − lse) and uses δ = rowsum(dO ∘ O). Handed
the *joined* O and lse instead of the part's own, P is the part's share of the joint softmax and δ
the joint one, so the result is the part's exact share of the joint gradient.

Outputs are (batch, queries, heads, head_dim), log-sum-exps (batch, queries, heads), natural.
"""

from __future__ import annotations

import torch
from torch import Tensor

aten = torch.ops.aten
flash = aten._scaled_dot_product_flash_attention_for_cpu
flash_backward = aten._scaled_dot_product_flash_attention_for_cpu_backward


def has_kernel(x: Tensor) -> bool:
    """Whether there is a kernel for queries like `x`."""
    if x.device.type == "cpu":
        return x.is_floating_point()
    halves = (torch.float16, torch.bfloat16)
    return x.device.type == "cuda" and x.dtype in halves and x.shape[-1] <= 256


def exact_type(x: Tensor) -> torch.dtype:
    """What parts are joined in."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def attend_part(
    q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """q (batch, queries, heads, head_dim) over k, v (batch, keys, kv_heads, head_dim).

    Causal: query i sees the keys to i, of as many as there are queries.
    """
    if q.device.type == "cuda":
        return _gpu_part(q, k, v, is_causal, scale)
    k, v = _shared(k, q), _shared(v, q)
    out, lse = flash(*(_by_head(x) for x in (q, k, v)), 0.0, is_causal, scale=scale)
    return out.transpose(1, 2), lse.transpose(1, 2)


def part_gradients(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *, is_causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The part's share of the gradients of q, k and v; `out` and `lse` are the joined ones."""
    if q.device.type == "cuda":
        return _gpu_gradients(grad, q, k, v, out, lse, is_causal, scale)
    whole_k, whole_v = _shared(k, q), _shared(v, q)
    inputs = (_by_head(x) for x in (grad, q, whole_k, whole_v, out, lse))
    found = flash_backward(*inputs, 0.0, is_causal, scale=scale)
    grad_q, grad_k, grad_v = (x.transpose(1, 2) for x in found)
    return grad_q, _summed(grad_k, k), _summed(grad_v, v)


def _has_cudnn(q: Tensor) -> bool:
    """Whether cuDNN's kernel is the faster one; its sums may come in any order."""
    has_cudnn = torch.backends.cudnn.is_available()  # type: ignore[no-untyped-call]
    if torch.are_deterministic_algorithms_enabled() or not has_cudnn:
        return False
    return torch.cuda.get_device_capability(q.device) >= (9, 0)


def _gpu_part(
    q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    if _has_cudnn(q):
        by_head = (x.transpose(1, 2) for x in (q, k, v))
        out, lse, *_ = aten._scaled_dot_product_cudnn_attention(
            *by_head, None, True, 0.0, is_causal, False, scale=scale
        )
        return out.transpose(1, 2), lse.squeeze(-1).transpose(1, 2)
    rows = q.shape[1], k.shape[1]
    out, lse, *_ = aten._flash_attention_forward(
        q, k, v, None, None, *rows, 0.0, is_causal, False, scale=scale
    )
    return out, lse.transpose(1, 2)


def _gpu_gradients(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, is_causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    rows, lse = (q.shape[1], k.shape[1]), lse.transpose(1, 2).contiguous()
    random = torch.empty(2, dtype=torch.int64, device=q.device)  # unread without dropout
    if _has_cudnn(q):
        by_head = (x.transpose(1, 2) for x in (grad, q, k, v, out))
        grad_q, grad_k, grad_v = aten._scaled_dot_product_cudnn_attention_backward(
            *by_head, lse[..., None], random[0], random[1], None, None, None, *rows, 0.0, is_causal,
            scale=scale,
        )  # fmt: skip
        return grad_q.transpose(1, 2), grad_k.transpose(1, 2), grad_v.transpose(1, 2)
    grads: tuple[Tensor, Tensor, Tensor] = aten._flash_attention_backward(
        grad, q, k, v, out, lse, None, None, *rows, 0.0, is_causal, random, random, scale=scale
    )
    return grads


def join_part(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Take a part's output (..., head_dim) and log-sum-exp (...) into those of the others."""
    joined = torch.logaddexp(lse, part_lse)
    out.mul_((lse - joined).exp()[..., None])
    out.addcmul_(part.to(out.dtype), (part_lse - joined).exp()[..., None])
    lse.copy_(joined)


def _shared(x: Tensor, q: Tensor) -> Tensor:
    """A key head per query head, which the CPU's kernel wants."""
    group = q.shape[2] // x.shape[2]
    return x if group == 1 else x.repeat_interleave(group, dim=2)


def _summed(grad: Tensor, like: Tensor) -> Tensor:
    """The inverse of `_shared` for gradients."""
    if grad.shape[2] == like.shape[2]:
        return grad
    return grad.reshape(*grad.shape[:2], like.shape[2], -1, grad.shape[3]).sum(3)


def _by_head(x: Tensor) -> Tensor:
    """(batch, rows, heads, ...) to (batch, heads, rows, ...), without gaps."""
    return x.transpose(1, 2).contiguous()
