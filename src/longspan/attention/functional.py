"""`attend`: the one entry to attention. Validate, choose, call."""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from longspan.attention.custom_op import attend_in_branches
from longspan.attention.pattern import BlockSparse, Dense, Dilated, Pattern
from longspan.attention.reference import Mask, masked_attention

BackendName = Literal["sdpa", "views", "triton", "masked"]

_HAS_TRITON = find_spec("triton") is not None
_IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


@dataclass(frozen=True)
class Backend:
    """Who computes an attention, and why that one."""

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
    backend: BackendName | None = None,
) -> Tensor:
    """Attention of q over k and v under `pattern`, in O(tokens) memory.

    q: (batch, queries, heads, head_dim); k, v: (batch, keys, kv_heads, head_dim), where kv_heads
    divides heads and query head h reads kv head h // (heads / kv_heads). Returns q's shape; a
    query that sees no key gives zeros.

    - There may be fewer queries than keys: causal queries are then the last ones, as in decoding;
      without causality only a Dense pattern allows it, as in cross-attention.
    - `scale` multiplies the scores and is 1/√head_dim unless given.
    - `documents`: integers (batch, keys); no query sees a key of another document.
    - `cu_seqlens`: the same as the borders 0, end of the first document, …, in every batch row.
    - `key_padding_mask`: bool (batch, keys), True for keys that none may see.
    - `dropout_p` drops weights after the softmax, by a hash of (`dropout_seed`, batch, head,
      query, key): the same on every device and backend.
    - `backend` forces one of those `choose_backend` names.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if cu_seqlens is not None:
        documents = _documents_between(cu_seqlens, documents, k)
    mask = Mask(pattern, is_causal, documents, key_padding_mask, dropout_p, dropout_seed)
    check_tensors(q, k, v)
    _check_lengths(q.shape[1], k.shape[1], mask)
    check_mask(q, mask, k.shape[1])
    chosen = choose_backend(q, k, mask)
    name = backend or chosen.name
    if name not in (chosen.name, "masked"):
        problem = _kernels_problem(q, k, mask) if name == "triton" else chosen.reason
        if problem is not None:
            raise ValueError(f"backend {name!r} cannot do this, {chosen.name!r} can: {problem}")
    if name == "masked":
        return masked_attention(q, k, v, mask, scale)
    if scale <= 0 and q.device.type == "cpu":
        q, scale = q * scale, 1.0  # torch's kernel masks by -inf before it scales
    if name == "sdpa":
        group = q.shape[2] // k.shape[2]
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        out = scaled_dot_product_attention(
            q, k, v, is_causal=is_causal, scale=scale, enable_gqa=group > 1
        )
        return out.transpose(1, 2)
    return attend_in_branches(
        q, k, v, pattern, ids=_ids(mask), is_causal=is_causal, scale=scale, backend=name
    )


def choose_backend(q: Tensor, k: Tensor, mask: Mask) -> Backend:
    """The backend `attend` uses for this case, and why.

    "sdpa" is torch's own dense attention; "views" the dilated branches as strided views into
    torch's flash kernel for CPUs; "triton" our kernels for GPUs; "masked" plain chunked code that
    can do everything.
    """
    masks_nothing = mask.documents is None and mask.key_padding_mask is None
    same_length = q.shape[1] == k.shape[1]
    if mask.dropout_p > 0:
        return Backend("masked", "there is dropout")
    match mask.pattern:
        case Dense() if masks_nothing and (same_length or not mask.is_causal):
            return Backend("sdpa", "a dense pattern with nothing masked")
        case _ if q.device.type != "cpu":
            problem = _kernels_problem(q, k, mask)
            if problem is None:
                return Backend("triton", "a pattern the kernels know, on a GPU")
            return Backend("masked", problem)
        case Dilated(blocks=None) if masks_nothing and same_length:
            return Backend("views", "a dilated pattern with nothing masked, on a CPU")
    if not same_length:
        return Backend("masked", "there are fewer queries than keys")
    if not masks_nothing:
        return Backend("masked", "documents or padding are masked, on a CPU")
    return Backend("masked", "the pattern is neither dense nor dilated, on a CPU")


def _kernels_problem(q: Tensor, k: Tensor, mask: Mask) -> str | None:
    """Why the Triton kernels cannot take this case; None if they can."""
    if not _HAS_TRITON:
        return "Triton is not installed"
    if q.device.type != "cuda" and not _IS_INTERPRETED:
        return f"Triton has no kernels for {q.device.type}"
    if q.device.type == "cuda" and torch.cuda.get_device_capability(q.device) < (8, 0):
        return "the kernels need a GPU of compute capability 8.0 or newer"
    if q.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"the kernels know no {q.dtype}"
    if q.shape[3] > 256 or q.shape[3] % 8:
        return f"the kernels need a head_dim of at most 256, in eights, got {q.shape[3]}"
    if q.shape[1] != k.shape[1]:
        return "there are fewer queries than keys"
    if mask.dropout_p > 0:
        return "there is dropout"
    unit = 32 if q.dtype == torch.float32 else 64
    match mask.pattern:
        case BlockSparse() as blocks if blocks.block_size % unit:
            return f"blocks of {blocks.block_size} are no multiple of {unit}"
        case Dilated(blocks=BlockSparse() as blocks) if blocks.block_size % unit:
            return f"blocks of {blocks.block_size} are no multiple of {unit}"
        case Dense() | Dilated() | BlockSparse():
            return None
    return f"the kernels do not know {type(mask.pattern).__name__}"


def _documents_between(cu_seqlens: Tensor, documents: Tensor | None, k: Tensor) -> Tensor:
    """Document numbers, int64 (batch, keys), of the runs between the borders."""
    if documents is not None:
        raise ValueError("give documents or cu_seqlens, not both")
    if cu_seqlens.dim() != 1:
        raise ValueError(f"cu_seqlens must have one dimension, got {tuple(cu_seqlens.shape)}")
    if cu_seqlens.is_floating_point():
        raise ValueError(f"cu_seqlens must be integers, got {cu_seqlens.dtype}")
    position = torch.arange(k.shape[1], device=k.device, dtype=cu_seqlens.dtype)
    return torch.searchsorted(cu_seqlens, position, right=True).expand(k.shape[0], -1)


def _ids(mask: Mask) -> tuple[Tensor | None, Tensor | None]:
    """Numbers of the queries and of the keys that are equal where they may meet: a document is
    even, and a key that none may see odd.
    """
    padding = mask.key_padding_mask
    if mask.documents is None and padding is None:
        return None, None
    if mask.documents is not None:
        queries = 2 * mask.documents.long()
    else:
        assert padding is not None
        queries = torch.zeros_like(padding, dtype=torch.int64)
    keys = queries if padding is None else queries + padding
    return queries.contiguous(), keys.contiguous()


def check_tensors(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Whether q, k and v can attend at all, how ever long each is."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != 4:
            raise ValueError(
                f"{name} must be (batch, tokens, heads, head_dim), got shape {tuple(x.shape)}"
            )
        if x.dtype != q.dtype or x.device != q.device:
            raise ValueError(
                f"q, k and v must share dtype and device: q is {q.dtype} on {q.device}, "
                f"{name} is {x.dtype} on {x.device}"
            )
    if k.shape != v.shape:
        raise ValueError(f"k and v must have one shape, got {tuple(k.shape)} and {tuple(v.shape)}")
    batch, _, heads, head_dim = q.shape
    if (batch, head_dim) != (k.shape[0], k.shape[3]):
        raise ValueError(
            f"q and k must agree in batch and head_dim, got {tuple(q.shape)} and {tuple(k.shape)}"
        )
    if heads % k.shape[2]:
        raise ValueError(
            f"the number of key heads must divide the {heads} query heads, got {k.shape[2]}"
        )
    if q.device.type != "cpu" and head_dim % 8:
        raise ValueError(f"on {q.device.type} head_dim must be a multiple of 8, got {head_dim}")


def check_mask(q: Tensor, mask: Mask, keys: int) -> None:
    """Whether what masks a sequence of `keys` tokens is well-formed."""
    batch = q.shape[0]
    for name in ("documents", "key_padding_mask"):
        given = getattr(mask, name)
        if given is not None and given.shape != (batch, keys):
            raise ValueError(
                f"{name} must be (batch, keys) = {(batch, keys)}, got {tuple(given.shape)}"
            )
        if given is not None and given.device != q.device:
            raise ValueError(f"{name} must be on {q.device} as q is, got {given.device}")
    documents, padding = mask.documents, mask.key_padding_mask
    if documents is not None and (documents.is_floating_point() or documents.dtype == torch.bool):
        raise ValueError(f"documents must be integers, got {documents.dtype}")
    if padding is not None and padding.dtype != torch.bool:
        raise ValueError(f"key_padding_mask must be bool, got {padding.dtype}")
    if not 0 <= mask.dropout_p < 1:
        raise ValueError(f"dropout_p must be at least 0 and below 1, got {mask.dropout_p}")


def _check_lengths(queries: int, keys: int, mask: Mask) -> None:
    if queries == keys:
        return
    if mask.is_causal and queries > keys:
        raise ValueError(f"causal attention needs a key for every query, got {queries} and {keys}")
    if not mask.is_causal and not isinstance(mask.pattern, Dense):
        raise ValueError(
            f"{queries} queries over {keys} keys have no place in {mask.pattern}: make them "
            "causal, so that the queries are the last positions, or use Dense()"
        )
    if not mask.is_causal and mask.documents is not None:
        raise ValueError("documents need as many queries as keys, or causal attention")
