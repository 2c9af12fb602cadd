"""`attend`: the one entry to attention. Validate, choose, call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from longspan.attention.dilated import dilated_attention
from longspan.attention.masked import Mask, masked_attention
from longspan.attention.pattern import BlockSparse, Dense, Dilated, Pattern

BackendName = Literal["sdpa", "views", "masked"]


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
    - `documents`: int64 (batch, keys); no query sees a key of another document.
    - `key_padding_mask`: bool (batch, keys), True for keys that none may see.
    - `dropout_p` drops weights after the softmax, by a hash of (`dropout_seed`, batch, head,
      query, key): the same on every device and backend.
    - `backend` forces one of those `choose_backend` names.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    mask = Mask(pattern, is_causal, documents, key_padding_mask, dropout_p, dropout_seed)
    _check(q, k, v, mask)
    chosen = choose_backend(q, k, mask)
    if backend not in (None, chosen.name, "masked"):
        raise ValueError(
            f"backend {backend!r} cannot do this, {chosen.name!r} can: {chosen.reason}"
        )
    if (backend or chosen.name) == "masked":
        return masked_attention(q, k, v, mask, scale)
    if (group := q.shape[2] // k.shape[2]) > 1:
        k, v = k.repeat_interleave(group, dim=2), v.repeat_interleave(group, dim=2)
    if chosen.name == "sdpa":
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        out = scaled_dot_product_attention(q, k, v, is_causal=is_causal, scale=scale)
        return out.transpose(1, 2)
    assert isinstance(pattern, Dilated)
    joined: Tensor = dilated_attention(
        q, k, v, pattern.segment_lengths, pattern.dilation_rates, is_causal, scale
    )[0]
    return joined


def choose_backend(q: Tensor, k: Tensor, mask: Mask) -> Backend:
    """The backend `attend` uses for this case, and why.

    "sdpa" is torch's own dense attention, "views" the dilated branches as strided views into
    torch's flash kernels, "masked" plain chunked code that can do everything.
    """
    if mask.documents is not None:
        return Backend("masked", "documents are given")
    if mask.key_padding_mask is not None:
        return Backend("masked", "a key padding mask is given")
    if mask.dropout_p > 0:
        return Backend("masked", "there is dropout")
    match mask.pattern:
        case Dense() if q.shape[1] == k.shape[1] or not mask.is_causal:
            return Backend("sdpa", "a dense pattern with nothing masked")
        case Dilated(blocks=BlockSparse()):
            return Backend("masked", "the dilated segments are block-sparse")
        case Dilated() if q.shape[1] == k.shape[1]:
            return Backend("views", "a dilated pattern with nothing masked")
        case Dense() | Dilated():
            return Backend("masked", "there are fewer queries than keys")
    return Backend("masked", "the pattern is neither dense nor dilated")


def _check(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> None:
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
    (batch, queries, heads, head_dim), keys = q.shape, k.shape[1]
    if (batch, head_dim) != (k.shape[0], k.shape[3]):
        raise ValueError(
            f"q and k must agree in batch and head_dim, got {tuple(q.shape)} and {tuple(k.shape)}"
        )
    if heads % k.shape[2]:
        raise ValueError(
            f"the number of key heads must divide the {heads} query heads, got {k.shape[2]}"
        )
    _check_lengths(queries, keys, mask)
    for name in ("documents", "key_padding_mask"):
        given = getattr(mask, name)
        if given is not None and given.shape != (batch, keys):
            raise ValueError(
                f"{name} must be (batch, keys) = {(batch, keys)}, got {tuple(given.shape)}"
            )
    if not 0 <= mask.dropout_p < 1:
        raise ValueError(f"dropout_p must be at least 0 and below 1, got {mask.dropout_p}")
    if q.device.type != "cpu" and head_dim % 8:
        raise ValueError(f"on {q.device.type} head_dim must be a multiple of 8, got {head_dim}")


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
