"""`Mask`: the options of `attend`, and the checks of its tensors and options."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from longspan.attention.pattern import Dense, Pattern


@dataclass(frozen=True)
class Mask:
    """What decides which weights are zero. The fields are arguments of `attend`."""

    pattern: Pattern
    is_causal: bool = True
    documents: Tensor | None = None
    key_padding_mask: Tensor | None = None
    dropout_p: float = 0.0
    dropout_seed: int = 0

    @property
    def is_pattern_only(self) -> bool:
        """Whether there are no documents, no padding and no dropout."""
        return self.documents is None and self.key_padding_mask is None and self.dropout_p == 0


def check_tensors(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Check that q, k and v fit together, whatever the number of queries and keys."""
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
        raise ValueError(
            f"k and v must have the same shape, got {tuple(k.shape)} and {tuple(v.shape)}"
        )
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
        raise ValueError(f"head_dim must be a multiple of 8 on {q.device.type}, got {head_dim}")


def check_mask(q: Tensor, mask: Mask, keys: int) -> None:
    """Check the options against a sequence of `keys` tokens."""
    batch = q.shape[0]
    for name in ("documents", "key_padding_mask"):
        given = getattr(mask, name)
        if given is not None and given.shape != (batch, keys):
            raise ValueError(
                f"{name} must be (batch, keys) = {(batch, keys)}, got {tuple(given.shape)}"
            )
        if given is not None and given.device != q.device:
            raise ValueError(f"{name} must be on {q.device} like q, got {given.device}")
    documents, padding = mask.documents, mask.key_padding_mask
    if documents is not None and (documents.is_floating_point() or documents.dtype == torch.bool):
        raise ValueError(f"documents must be integers, got {documents.dtype}")
    if padding is not None and padding.dtype != torch.bool:
        raise ValueError(f"key_padding_mask must be bool, got {padding.dtype}")
    if not 0 <= mask.dropout_p < 1:
        raise ValueError(f"dropout_p must be at least 0 and below 1, got {mask.dropout_p}")


def check_lengths(queries: int, keys: int, mask: Mask) -> None:
    """Check that the options allow this many queries over this many keys."""
    if queries == keys:
        return
    if mask.is_causal and queries > keys:
        raise ValueError(
            f"causal attention needs at least as many keys as queries, got {queries} queries and "
            f"{keys} keys"
        )
    if not mask.is_causal and not isinstance(mask.pattern, Dense):
        raise ValueError(
            f"{mask.pattern} needs as many keys as queries without causality, got {queries} "
            f"queries and {keys} keys: set is_causal=True, so that the queries are the last "
            "positions, or use Dense()"
        )
    if not mask.is_causal and mask.documents is not None:
        raise ValueError(
            f"documents need as many keys as queries without causality, got {queries} queries and "
            f"{keys} keys: set is_causal=True"
        )
