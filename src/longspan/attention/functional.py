"""`attend`: the entry point of attention. It validates, chooses a backend and calls it."""

from __future__ import annotations

import os
import warnings
from dataclasses import dataclass
from importlib.util import find_spec
from textwrap import shorten
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from longspan.attention.custom_op import attend_branches
from longspan.attention.mask import Mask, check_lengths, check_mask, check_scale, check_tensors
from longspan.attention.merge import has_efficient_kernel, is_before_ampere
from longspan.attention.pattern import BlockSparse, Dense, Dilated, Pattern
from longspan.attention.window import Window

BackendName = Literal["sdpa", "strided", "triton", "reference"]
BACKENDS: tuple[BackendName, ...] = get_args(BackendName)

MAX_HEADS = 64
"""More heads than this, and than tokens, are probably tokens: q was given with its heads first."""

DENSE_TOKENS = 2048
"""The fewest for which our kernels for dense attention were compared with torch's."""
_HAS_TRITON = find_spec("triton") is not None
_IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


@dataclass(frozen=True)
class Backend:
    """The code that computes an attention, and why it was chosen."""

    name: BackendName
    reason: str


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pattern: Pattern,
    *,
    is_causal: bool = True,
    scale: float | None = None,
    documents: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    key_padding_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: int = 0,
    sink_logits: Tensor | None = None,
    backend: BackendName | None = None,
) -> Tensor:
    """Attention of q over k and v under `pattern`, in O(tokens) memory.

    q: (batch, queries, heads, head_dim); k, v: (batch, keys, kv_heads, head_dim), where kv_heads
    divides heads and query head h reads kv head h // (heads / kv_heads). Returns q's shape; a
    query that sees no key gives zeros.

    - There may be fewer queries than keys: causal queries are then the last ones, as in decoding;
      without causality only a Dense pattern allows it, as in cross-attention.
    - `scale` multiplies the scores; the default is 1/√head_dim.
    - `documents`: integers (batch, keys); a run of equal ones is a document. Each is attended as
      if it were alone: no query sees a key of another one, and the positions of the pattern start
      again in each. They may be on the CPU, which saves a wait for the GPU.
    - `cu_seqlens`: documents given as cumulative lengths 0, end of the first, …, number of keys,
      for every row of the batch, on either device. The values are checked on the CPU only.
    - `key_padding_mask`: bool (batch, keys), True for padding, which no query sees.
    - `dropout_p` drops weights after the softmax, by a hash of (`dropout_seed`, batch, head,
      query, key): the same on every device and backend.
    - `sink_logits`: a logit per head (heads,) in the denominator of each softmax, as of one more
      key whose value is zero (learnable attention sinks).
    - `backend` forces one of those that `choose_backend` names.
    """
    check_tensors(q, k, v)
    _warn_if_transposed(q)
    if scale is None:
        scale = q.shape[-1] ** -0.5
    else:
        check_scale(scale)
    if cu_seqlens is not None:
        documents = _documents_from(cu_seqlens, documents, k)
    options = documents, key_padding_mask, dropout_p, dropout_seed, sink_logits
    mask = Mask(pattern, is_causal, *options)
    check_lengths(q.shape[1], k.shape[1], mask)
    check_mask(q, mask, k.shape[1])
    return attend_checked(q, k, v, mask, scale, backend)


def attend_checked(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float, backend: BackendName | None = None
) -> Tensor:
    """`attend` for arguments that are known to be valid."""
    mask = mask.unpacked(q.shape[0], k.shape[1])
    chosen = choose_backend(q, k, mask)
    name = backend or chosen.name
    if name not in BACKENDS:
        raise ValueError(f"backend must be one of {BACKENDS} or None, got {name!r}")
    if name not in (chosen.name, "reference"):
        problems = {"triton": triton_problem, "strided": strided_problem}
        problem = problems[name](q, k, mask) if name in problems else chosen.reason
        if problem is not None:
            raise ValueError(
                f"backend {name!r} does not support this: {problem}; use {chosen.name!r}"
            )
    if scale <= 0 and (name == "strided" or (name == "sdpa" and q.device.type == "cpu")):
        q, scale = q * scale, 1.0  # torch's kernel masks with -inf before it scales
    if name == "sdpa":
        group = q.shape[2] // k.shape[2]
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        out = scaled_dot_product_attention(
            q, k, v, is_causal=mask.is_causal, scale=scale, enable_gqa=group > 1
        )
        return out.transpose(1, 2)
    return attend_branches(q, k, v, mask, scale, name)


def choose_backend(q: Tensor, k: Tensor, mask: Mask) -> Backend:
    """The backend that `attend` uses for these inputs, and why.

    "sdpa" is torch's dense attention; "triton" is our GPU kernels; "strided" runs dilated branches
    as strided views in torch's own kernels, on CPUs and on GPUs that our kernels do not support;
    "reference" is plain chunked PyTorch code that supports everything.
    """
    same_length = q.shape[1] == k.shape[1]
    if mask.dropout_p > 0:
        return Backend("reference", "there is dropout")
    match mask.pattern:
        case Dense() if (
            mask.is_pattern_only
            and mask.sink_logits is None
            and (same_length or not mask.is_causal)
        ):
            if _has_faster_dense_kernels(q, mask):
                return Backend("triton", "causal, 16 bits, head_dim 64, on a Hopper GPU")
            return Backend("sdpa", "a dense pattern without documents or padding")
    is_cpu = q.device.type == "cpu"
    kernels = "the device is a CPU" if is_cpu else triton_problem(q, k, mask)
    if kernels is None:
        return Backend("triton", "a pattern that the kernels support, on a GPU")
    problem = strided_problem(q, k, mask)
    if problem is None:
        return Backend("strided", f"a dilated pattern or documents without padding; {kernels}")
    return Backend("reference", problem if is_cpu else kernels)


def _has_faster_dense_kernels(q: Tensor, mask: Mask) -> bool:
    """Whether our kernels are faster than torch's, by measurements on an H200.

    They do not give the same bits twice.
    """
    if not _HAS_TRITON or q.device.type != "cuda" or torch.are_deterministic_algorithms_enabled():
        return False
    tokens, head_dim = q.shape[1], q.shape[3]
    if not mask.is_causal or head_dim != 64 or q.dtype.itemsize != 2 or tokens % 128:
        return False
    from longspan.attention.kernels.launch import has_gluon

    return tokens >= DENSE_TOKENS and has_gluon(q.device)


def strided_problem(q: Tensor, k: Tensor, mask: Mask) -> str | None:
    """Why strided views in torch's kernels do not support these inputs; None if they do."""
    where = "on a CPU" if q.device.type == "cpu" else "for torch's kernels"
    if q.device.type != "cpu" and not has_efficient_kernel(q):
        return f"memory-efficient attention does not support {q.dtype} on {q.device.type}"
    if q.shape[1] != k.shape[1]:
        return "there are fewer queries than keys"
    if mask.dropout_p > 0:
        return "there is dropout"
    if mask.key_padding_mask is not None:
        return f"there is padding, {where}"
    match mask.pattern:
        case Dense() | Dilated(blocks=None):
            return None
    return f"the pattern is neither dense nor dilated, {where}"


def triton_problem(q: Tensor, k: Tensor, mask: Mask) -> str | None:
    """Why the Triton kernels do not support these inputs; None if they do."""
    if not _HAS_TRITON:
        return "Triton is not installed"
    if q.device.type != "cuda" and not _IS_INTERPRETED:
        return f"Triton does not support {q.device.type}"
    if is_before_ampere(q):
        return "the kernels need a GPU of compute capability 8.0 or newer"
    if q.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"{q.dtype} is not supported by the kernels"
    if q.shape[3] > 256 or q.shape[3] % 8:
        return f"head_dim must be a multiple of 8 and at most 256, got {q.shape[3]}"
    if q.shape[1] != k.shape[1]:
        return "there are fewer queries than keys"
    if mask.dropout_p > 0:
        return "there is dropout"
    unit = 32 if q.dtype == torch.float32 else 64
    match mask.pattern:
        case BlockSparse() as blocks if blocks.block_size % unit:
            return f"block_size must be a multiple of {unit}, got {blocks.block_size}"
        case Dilated(blocks=BlockSparse() as blocks) if blocks.block_size % unit:
            return f"block_size must be a multiple of {unit}, got {blocks.block_size}"
        case Dense() | Dilated() | BlockSparse() | Window():
            return None
    return f"the kernels do not support {type(mask.pattern).__name__}"


def _warn_if_transposed(q: Tensor) -> None:
    tokens, heads = q.shape[1:3]
    if heads > tokens > 1 and heads > MAX_HEADS:
        warnings.warn(
            f"q has {tokens} tokens and {heads} heads: is it (batch, heads, tokens, head_dim)? "
            "attend takes (batch, tokens, heads, head_dim): use q.transpose(1, 2)",
            stacklevel=3,
        )


def _documents_from(cu_seqlens: Tensor, documents: Tensor | None, k: Tensor) -> Tensor:
    """Document indices, int64 (batch, keys), from cumulative lengths."""
    if documents is not None:
        raise ValueError("documents and cu_seqlens exclude each other, got both: give one of them")
    if not isinstance(cu_seqlens, Tensor):
        raise TypeError(f"cu_seqlens must be a torch.Tensor, got {type(cu_seqlens).__name__}")
    if cu_seqlens.dim() != 1:
        raise ValueError(f"cu_seqlens must have one dimension, got {tuple(cu_seqlens.shape)}")
    if cu_seqlens.is_floating_point():
        raise ValueError(f"cu_seqlens must be integers, got {cu_seqlens.dtype}")
    # Reading the values on a GPU would wait for it in every layer.
    if cu_seqlens.device.type == "cpu" and not torch.compiler.is_compiling():
        ends = cu_seqlens.tolist()
        if ends[:1] != [0] or ends[-1:] != [k.shape[1]] or ends != sorted(ends):
            raise ValueError(
                f"cu_seqlens must be cumulative lengths that rise from 0 to {k.shape[1]}, the "
                f"number of keys, got {shorten(str(ends), 80)}"
            )
    position = torch.arange(k.shape[1], device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    return torch.searchsorted(cu_seqlens, position, right=True).expand(k.shape[0], -1)
