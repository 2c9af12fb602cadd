"""`Mask`: the options of `attend`, and the checks of its tensors and options."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from longspan.attention.packed import Packed, document_starts
from longspan.attention.pattern import Dense, Pattern

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
"""The dtypes of q, k and v."""


@dataclass(frozen=True)
class Mask:
    """What decides the weights besides the scores. The fields are arguments of `attend`."""

    pattern: Pattern
    is_causal: bool = True
    documents: Tensor | None = None
    key_padding_mask: Tensor | None = None
    dropout_p: float = 0.0
    dropout_seed: int = 0
    sink_logits: Tensor | None = None
    first_row: int = 0
    """The index in the batch of the first row, which dropout depends on."""

    def __post_init__(self) -> None:
        check_pattern(self.pattern)
        if not isinstance(self.is_causal, bool):
            raise TypeError(f"is_causal must be True or False, got {self.is_causal!r}")
        for name in ("documents", "key_padding_mask", "sink_logits"):
            given = getattr(self, name)
            if given is not None and not isinstance(given, Tensor):
                raise TypeError(f"{name} must be a torch.Tensor, got {type(given).__name__}")
        if not isinstance(self.dropout_p, (float, int)):
            raise TypeError(f"dropout_p must be a number, got {self.dropout_p!r}")
        if isinstance(self.dropout_seed, float):
            raise TypeError(f"dropout_seed must be an integer, got {self.dropout_seed!r}")

    @property
    def is_pattern_only(self) -> bool:
        """Whether there are no documents, no padding and no dropout."""
        return self.documents is None and self.key_padding_mask is None and self.dropout_p == 0

    def of_row(self, row: int) -> Mask:
        """The mask of one row of the batch, with its documents as a pattern."""
        rows, pattern = slice(row, row + 1), self.pattern
        padding = None if self.key_padding_mask is None else self.key_padding_mask[rows]
        if self.documents is not None:
            pattern = Packed(pattern, document_starts(self.documents[row]))
        return replace(
            self,
            pattern=pattern,
            documents=None,
            key_padding_mask=padding,
            first_row=self.first_row + row,
        )

    def unpacked(self, batch: int, tokens: int) -> Mask:
        """A Packed pattern's documents as a tensor, the same for every row of a batch."""
        if not isinstance(self.pattern, Packed):
            return self
        ids = self.pattern.ids(tokens).expand(batch, -1)
        return replace(self, pattern=self.pattern.inner, documents=ids)


def check_pattern(pattern: object) -> None:
    if not isinstance(pattern, Pattern):
        came = f"the {pattern}" if isinstance(pattern, type) else type(pattern).__name__
        raise TypeError(
            f"pattern must be Dense(), Dilated(...), BlockSparse(...) or Window(...), got {came}"
        )


def check_scale(scale: object) -> None:
    """Check a scale that was given."""
    if not isinstance(scale, (float, int)) or not math.isfinite(scale):
        raise ValueError(f"scale must be a finite number or None for 1/√head_dim, got {scale!r}")


def check_tensors(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Check that q, k and v fit together, whatever the number of queries and keys."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}")
        if x.dtype not in DTYPES:
            names = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
            raise TypeError(f"{name} must be floating point ({names}), got {x.dtype}")
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
    if 0 in (heads, head_dim, k.shape[2]):
        raise ValueError(
            "q and k need at least one head and one element per head, got "
            f"{tuple(q.shape)} and {tuple(k.shape)}"
        )
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
        may_be_here = name == "documents" and given is not None and given.device.type == "cpu"
        if given is not None and given.device != q.device and not may_be_here:
            raise ValueError(f"{name} must be on {q.device} like q, got {given.device}")
    documents, padding = mask.documents, mask.key_padding_mask
    if documents is not None and (documents.is_floating_point() or documents.dtype == torch.bool):
        raise ValueError(f"documents must be integers, got {documents.dtype}")
    if padding is not None and padding.dtype != torch.bool:
        raise ValueError(f"key_padding_mask must be bool, got {padding.dtype}")
    check_sinks(q, mask.sink_logits)
    if not 0 <= mask.dropout_p < 1:
        raise ValueError(f"dropout_p must be at least 0 and below 1, got {mask.dropout_p}")


def check_sinks(q: Tensor, sink_logits: Tensor | None) -> None:
    """Check that there is a logit for each of q's heads, on its device."""
    if sink_logits is None:
        return
    if not sink_logits.is_floating_point() or sink_logits.shape != q.shape[2:3]:
        raise ValueError(
            f"sink_logits must be floating point, one for each of {q.shape[2]} heads, got "
            f"{sink_logits.dtype} of shape {tuple(sink_logits.shape)}"
        )
    if sink_logits.device != q.device:
        raise ValueError(f"sink_logits must be on {q.device} like q, got {sink_logits.device}")


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
