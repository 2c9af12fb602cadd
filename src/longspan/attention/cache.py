"""The KV cache for decoding: it holds keys and values for as long as a later query may see them."""

from __future__ import annotations

import torch
from torch import Tensor

from longspan.attention.functional import attend
from longspan.attention.mask import Mask
from longspan.attention.pattern import Pattern
from longspan.attention.reference import reference_attention


class KVCache:
    """The KV cache of one attention layer.

    Call `attend` with the tokens of a sequence in order, any number at a time: the outputs equal
    those of one causal `attend` over the whole sequence. `rows` is the number of positions in the
    cache, out of `length` tokens seen so far; with a dilated pattern it is at most the longest
    segment.
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
        """Append the next tokens' k and v; returns the output for q. Shapes as in `attend`."""
        scale = q.shape[3] ** -0.5 if scale is None else scale
        if not q.shape[1] == k.shape[1] == v.shape[1]:
            raise ValueError(
                "a KV cache needs the same number of queries, keys and values, got "
                f"{q.shape[1]}, {k.shape[1]} and {v.shape[1]}"
            )
        new = torch.arange(self.length, self.length + q.shape[1])
        if self._keys is None or self._values is None:
            out = attend(q, k, v, self.pattern, scale=scale)
            k, v = k.clone(), v.clone()  # the caller may overwrite them
        else:
            k, v = torch.cat([self._keys, k], dim=1), torch.cat([self._values, v], dim=1)
            new = torch.cat([self._positions, new])
            out = reference_attention(q, k, v, Mask(self.pattern), scale, new)
        self.length += q.shape[1]
        self._store(k, v, new, heads=q.shape[2])
        return out

    def _store(self, k: Tensor, v: Tensor, positions: Tensor, heads: int) -> None:
        needed = [self.pattern.may_see(positions, self.length, head) for head in range(heads)]
        kept = torch.stack(needed).any(0)
        if not kept.all():
            rows = kept.nonzero()[:, 0].to(k.device)
            k, v, positions = k[:, rows], v[:, rows], positions[kept]
        self._keys, self._values, self._positions = k, v, positions
