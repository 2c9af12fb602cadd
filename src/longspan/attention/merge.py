"""Partial attention, some queries over some keys, and merging partials into one softmax.

The flash and cuDNN operators return the log-sum-exp and accept it in their backward pass, which
recomputes P = exp(S − lse) and uses δ = rowsum(dO ∘ O). Given the *merged* O and lse instead of the
partial's, P is the partial's share of the joint softmax and δ the joint one. So the result is the
partial's exact share of the joint gradient.

Outputs are (batch, queries, heads, head_dim), log-sum-exps (batch, queries, heads), natural.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from longspan.constants import CUDNN_PAIRS
from longspan.torch_internals import (
    cpu_flash_attention,
    cpu_flash_attention_backward,
    cudnn_attention,
    cudnn_attention_backward,
    efficient_attention,
    efficient_attention_backward,
    flash_attention,
    flash_attention_backward,
)

Forward = Callable[..., tuple[Tensor, Tensor]]
"""q, k, v and options to the output and its log-sum-exp."""
Backward = Callable[..., tuple[Tensor, Tensor, Tensor]]
"""The output's gradient, q, k, v, the merged output and log-sum-exp, and options to gradients."""
ROWS = 4096
"""Tokens whose δ is computed at a time for the gradient of sinks: float32 takes little memory."""


def is_before_ampere(q: Tensor) -> bool:
    """Whether q is on a GPU with compute capability below 8.0, such as a V100.

    Flash attention and our Triton kernels do not run there; memory-efficient attention does.
    """
    return q.device.type == "cuda" and torch.cuda.get_device_capability(q.device) < (8, 0)


def sdpa_kernels(q: Tensor) -> tuple[Forward, Backward]:
    """Torch's attention of (batch, heads, tokens, head_dim) with a log-sum-exp (batch, heads,
    tokens), for as many heads of keys as of queries: on a CPU, or on any NVIDIA GPU.
    """
    if q.device.type == "cpu":
        return cpu_flash_attention, cpu_flash_attention_backward
    return efficient_attention, efficient_attention_backward


def has_efficient_kernel(q: Tensor) -> bool:
    """Whether memory-efficient attention supports q on its GPU; in 16 bits a V100 has fp16 only."""
    if q.device.type != "cuda" or torch.version.hip or q.shape[3] > 256 or q.shape[3] % 8:
        return False
    has_bf16 = q.dtype == torch.bfloat16 and not is_before_ampere(q)
    return q.dtype in (torch.float16, torch.float32) or has_bf16


def has_flash_kernel(q: Tensor, scale: float) -> bool:
    """Whether `attend_partial` supports these queries; the kernels need a positive scale."""
    if scale <= 0:
        return False
    if q.device.type == "cpu":
        return q.is_floating_point()
    if is_before_ampere(q):
        return has_efficient_kernel(q)
    half = (torch.float16, torch.bfloat16)
    return q.device.type == "cuda" and q.dtype in half and q.shape[-1] <= 256


def attend_partial(
    q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """The output and log-sum-exp of q (batch, queries, heads, head_dim) over k, v.

    k, v: (batch, keys, kv_heads, head_dim). Causal attention needs as many keys as queries.
    """
    if q.device.type == "cpu" or is_before_ampere(q):
        k, v = _repeat_kv(k, q), _repeat_kv(v, q)
        heads_first = (_contiguous_heads_first(x) for x in (q, k, v))
        attention, _ = sdpa_kernels(q)
        out, lse = attention(*heads_first, is_causal=is_causal, scale=scale)
    elif not _has_cudnn(q, k):
        out, lse = flash_attention(q, k, v, is_causal=is_causal, scale=scale)
        return out, lse.transpose(1, 2)
    else:
        heads_first = (x.transpose(1, 2) for x in (q, k, v))
        out, lse = cudnn_attention(*heads_first, is_causal=is_causal, scale=scale)
    return out.transpose(1, 2), lse.transpose(1, 2)


def partial_gradients(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *, is_causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The partial's share of the gradients of q, k and v, given the merged `out` and `lse`."""
    if q.device.type == "cpu" or is_before_ampere(q):
        all_k, all_v = _repeat_kv(k, q), _repeat_kv(v, q)
        inputs = (_contiguous_heads_first(x) for x in (grad, q, all_k, all_v, out, lse))
        _, gradients = sdpa_kernels(q)
        found = gradients(*inputs, is_causal=is_causal, scale=scale)
        grad_q, grad_k, grad_v = (x.transpose(1, 2) for x in found)
        return grad_q, _sum_groups(grad_k, k), _sum_groups(grad_v, v)
    lse = lse.transpose(1, 2).contiguous()
    if not _has_cudnn(q, k):
        return flash_attention_backward(grad, q, k, v, out, lse, is_causal=is_causal, scale=scale)
    grad, q, k, v, out = (x.transpose(1, 2) for x in (grad, q, k, v, out))
    found = cudnn_attention_backward(grad, q, k, v, out, lse, is_causal=is_causal, scale=scale)
    grad_q, grad_k, grad_v = (x.transpose(1, 2) for x in found)
    return grad_q, grad_k, grad_v


def merge_partial(out: Tensor, lse: Tensor, partial: Tensor, partial_lse: Tensor) -> None:
    """Merge a partial's output (..., head_dim) and log-sum-exp (...) into `out` and `lse`."""
    merged = torch.logaddexp(lse, partial_lse)
    out.mul_((lse - merged).exp()[..., None])
    out.addcmul_(partial.to(out.dtype), (partial_lse - merged).exp()[..., None])
    lse.copy_(merged)


def merge_sinks(out: Tensor, lse: Tensor, sink_logits: Tensor | None) -> tuple[Tensor, Tensor]:
    """Merge a key of value zero whose score is its head's logit (heads,) into `out` and `lse`.

    So the backward pass of a partial needs nothing else: see above. `sink_gradient` is the logits'.
    """
    if sink_logits is None:
        return out, lse
    merged = torch.logaddexp(lse, sink_logits.to(lse.dtype))
    # With `out` there is no product in float32.
    found = torch.mul(out, (lse - merged).exp()[..., None], out=torch.empty_like(out))
    return found, merged


def sink_gradient(
    grad: Tensor, out: Tensor, lse: Tensor, sink_logits: Tensor | None
) -> Tensor | None:
    """The gradient of the logits (heads,), given that of the merged `out`, and `out` and `lse`.

    With the weight p of the sink, whose value is zero, dS = p · (0 − δ).
    """
    if sink_logits is None:
        return None
    logits, total = sink_logits.to(lse.dtype), lse.new_zeros(sink_logits.shape)
    for start in range(0, lse.shape[1], ROWS):
        rows = slice(start, start + ROWS)
        delta = (grad[:, rows].to(lse.dtype) * out[:, rows].to(lse.dtype)).sum(-1)
        total -= ((logits - lse[:, rows]).exp() * delta).sum((0, 1))
    return total.to(sink_logits.dtype)


def attend_with_sinks(
    q: Tensor, k: Tensor, v: Tensor, sink_logits: Tensor | None, forward: Forward,
    backward: Backward, unit: float, *options: Any,
) -> Tensor:  # fmt: skip
    """Attention by `forward` with the sinks merged, and its gradients by `backward`.

    The log-sum-exps of these are (batch, heads, queries), multiples of `unit`.
    """
    out: Tensor
    out, _ = _WithSinks.apply(  # type: ignore[no-untyped-call]
        q, k, v, sink_logits, forward, backward, unit, *options
    )
    return out


class _WithSinks(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, forward: Forward,
        backward: Backward, unit: float, *options: Any,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        out, lse = merge_stored_sinks(*forward(q, k, v, *options), sinks, unit)
        ctx.save_for_backward(q, k, v, out, lse, sinks)
        ctx.gradients, ctx.unit, ctx.options = backward, unit, options
        ctx.mark_non_differentiable(lse)
        ctx.set_materialize_grads(False)  # no zeros for the log-sum-exp, which has no gradient
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _grad_lse: Any) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, sinks = ctx.saved_tensors
        grads = ctx.gradients(grad, q, k, v, out, lse, *ctx.options)
        of_sinks = stored_sink_gradient(grad, out, lse, sinks, ctx.unit)
        return *grads, of_sinks, *[None] * (3 + len(ctx.options))


def merge_stored_sinks(
    out: Tensor, lse: Tensor, sinks: Tensor | None, unit: float
) -> tuple[Tensor, Tensor]:
    """`merge_sinks` for a log-sum-exp (batch, heads, queries) in multiples of `unit`."""
    if sinks is None:
        return out, lse
    out, merged = merge_sinks(out, lse.transpose(1, 2) * unit, sinks)
    return out, (merged / unit).transpose(1, 2).contiguous()


def stored_sink_gradient(
    grad: Tensor, out: Tensor, lse: Tensor, sinks: Tensor | None, unit: float
) -> Tensor | None:
    """`sink_gradient` for a log-sum-exp (batch, heads, queries) in multiples of `unit`."""
    if sinks is None:
        return None
    return sink_gradient(grad, out, lse.transpose(1, 2) * unit, sinks)


def _has_cudnn(q: Tensor, k: Tensor) -> bool:
    """Whether cuDNN's kernel is faster; it is not deterministic.

    It plans every new shape for tens of milliseconds, which few queries over few keys do not pay.
    """
    if q.shape[1] * k.shape[1] < CUDNN_PAIRS:
        return False
    has_cudnn = torch.backends.cudnn.is_available()  # type: ignore[no-untyped-call]
    if torch.are_deterministic_algorithms_enabled() or not has_cudnn:
        return False
    return torch.cuda.get_device_capability(q.device) >= (9, 0)


def _repeat_kv(x: Tensor, q: Tensor) -> Tensor:
    """One kv head per query head, which `sdpa_kernels` need."""
    group = q.shape[2] // x.shape[2]
    return x if group == 1 else x.repeat_interleave(group, dim=2)


def _sum_groups(grad: Tensor, like: Tensor) -> Tensor:
    """The backward of `_repeat_kv`."""
    if grad.shape[2] == like.shape[2]:
        return grad
    return grad.reshape(*grad.shape[:2], like.shape[2], -1, grad.shape[3]).sum(3)


def _contiguous_heads_first(x: Tensor) -> Tensor:
    """(batch, rows, heads, ...) to (batch, heads, rows, ...), contiguous."""
    return x.transpose(1, 2).contiguous()
