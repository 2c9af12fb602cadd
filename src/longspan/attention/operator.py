"""`attend`: the one entry to attention. Validate, choose, call."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from longspan.attention.dilated import dilated_attention
from longspan.attention.pattern import Dense, Dilated, Pattern


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pattern: Pattern,
    *,
    is_causal: bool = True,
    scale: float | None = None,
) -> Tensor:
    """Attention of q over k and v under `pattern`, in O(tokens) memory.

    q: (batch, tokens, heads, head_dim); k, v: (batch, tokens, kv_heads, head_dim), where kv_heads
    divides heads and query head h reads kv head h // (heads / kv_heads). `scale` multiplies the
    scores and is 1/√head_dim unless given. Returns (batch, tokens, heads, head_dim); a query that
    no branch covers gives zeros.
    """
    _check(q, k, v)
    group = q.shape[2] // k.shape[2]
    if group > 1:
        k, v = k.repeat_interleave(group, dim=2), v.repeat_interleave(group, dim=2)
    scale = q.shape[3] ** -0.5 if scale is None else scale
    match pattern:
        case Dense():
            return scaled_dot_product_attention(
                q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2),
                is_causal=is_causal, scale=scale,
            ).transpose(1, 2)  # fmt: skip
        case Dilated(segment_lengths, dilation_rates):
            out: Tensor = dilated_attention(
                q, k, v, segment_lengths, dilation_rates, is_causal, scale
            )[0]
            return out
    raise ValueError(f"expected a Dense or Dilated pattern, got {pattern!r}")


def _check(q: Tensor, k: Tensor, v: Tensor) -> None:
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
    batch, tokens, heads, head_dim = q.shape
    if (batch, tokens, head_dim) != (k.shape[0], k.shape[1], k.shape[3]):
        raise ValueError(
            "q and k must agree in batch, tokens and head_dim, got "
            f"{tuple(q.shape)} and {tuple(k.shape)}"
        )
    if heads % k.shape[2]:
        raise ValueError(
            f"the number of key heads must divide the {heads} query heads, got {k.shape[2]}"
        )
    if q.device.type != "cpu" and head_dim % 8:
        raise ValueError(f"on {q.device.type} head_dim must be a multiple of 8, got {head_dim}")
