"""Keys and values kept for decoding, for as long as a later query may see them."""

from __future__ import annotations

import torch
from torch import Tensor

from longspan.attention.functional import attend
from longspan.attention.pattern import Pattern
from longspan.attention.reference import Mask, masked_attention


class KVCache:
    """The cache of one attention layer.

    Feed it the tokens of a sequence in order, any number at a time: the outputs are those of one
    causal `attend` over the whole sequence. `rows` says how many positions it holds of the
    `length` it has seen; under a dilated pattern that is at most the longest segment.
    """

    def __init__(self, pattern: Pattern) -> None:
        self.pattern = pattern
        self.length = 0
        self._positions = torch.zeros(0, dtype=torch.int64)
        self._keys: Tensor | None = None
        self._values: Tensor | None = None

    @property
    def rows(self) -> int:
        return len(self._positions)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None) -> Tensor:
        """Take the next tokens' q, k, v, shaped as for `attend`; returns the output at each q."""
        scale = q.shape[3] ** -0.5 if scale is None else scale
        if not q.shape[1] == k.shape[1] == v.shape[1]:
            raise ValueError(
                "a cache takes as many queries as keys and values, got "
                f"{q.shape[1]}, {k.shape[1]} and {v.shape[1]}"
            )
        new = torch.arange(self.length, self.length + q.shape[1])
        if self._keys is None or self._values is None:
            out = attend(q, k, v, self.pattern, scale=scale)
            k, v = k.clone(), v.clone()  # the caller's may change
        else:
            k, v = torch.cat([self._keys, k], dim=1), torch.cat([self._values, v], dim=1)
            new = torch.cat([self._positions, new])
            out = masked_attention(q, k, v, Mask(self.pattern), scale, new)
        self.length += q.shape[1]
        self._keep(k, v, new, heads=q.shape[2])
        return out

    def _keep(self, k: Tensor, v: Tensor, positions: Tensor, heads: int) -> None:
        awaited = [self.pattern.awaits(positions, self.length, head) for head in range(heads)]
        kept = torch.stack(awaited).any(0)
        if not kept.all():
            rows = kept.nonzero()[:, 0].to(k.device)
            k, v, positions = k[:, rows], v[:, rows], positions[kept]
        self._keys, self._values, self._positions = k, v, positions
