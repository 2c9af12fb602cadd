"""`Window`: a sliding window that is exact to the token, with attention sinks and dilation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from longspan.attention.pattern import Pattern, as_integer, outside, union


@dataclass(frozen=True)
class Window(Pattern):
    """Each query sees the `window` keys nearest to it, itself included, and the first `sinks` keys.

    With d = `dilation`, those are the keys at a distance of 0, d, 2d … (window − 1)·d: before it if
    causal, else also after it. Sinks keep the attention of a long sequence stable (Xiao et al.
    2023, "Efficient Streaming Language Models with Attention Sinks"); with a dilation this is the
    1-D neighborhood of NATTEN (Hassani & Shi 2022), except that it is cut off at the ends.
    """

    window: int
    sinks: int = 0
    dilation: int = 1

    def __post_init__(self) -> None:
        for name, least in (("window", 1), ("sinks", 0), ("dilation", 1)):
            value = as_integer(name, getattr(self, name))
            object.__setattr__(self, name, value)
            if value < least:
                raise ValueError(f"{name} must be at least {least}, got {value}")

    @property
    def span(self) -> int:
        """The largest distance of a key in the window."""
        return (self.window - 1) * self.dilation

    def sees(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Whether queries see keys, before causality: positions that broadcast together."""
        distance = queries - keys
        seen = (distance.abs() <= self.span) & (distance % self.dilation == 0)
        return seen | (keys < self.sinks)

    def counts(self, queries: Tensor, keys: Tensor, head: int) -> Tensor:
        return self.sees(queries[:, None], keys[None, :]).long()

    def pairs(self, tokens: int, heads: int, *, is_causal: bool) -> int:
        w, d, sinks = self.window, self.dilation, min(self.sinks, tokens)
        # The keys before a query and itself: the row i of its residue sees min(i + 1, window).
        rows, more = divmod(tokens, d)
        near = more * _clipped_sum(rows + 1, w) + (d - more) * _clipped_sum(rows, w)
        in_both = sum(min(w, (tokens - 1 - key) // d + 1) for key in range(sinks))
        of_sinks = sinks * tokens - sinks * (sinks - 1) // 2
        if not is_causal:
            near = 2 * near - tokens
            in_both += sum(min(w - 1, key // d) for key in range(sinks))
            of_sinks = sinks * tokens
        return heads * (near + of_sinks - in_both)

    def covers(self, queries: Tensor, head: int) -> Tensor:
        return torch.ones(len(queries), dtype=torch.bool)

    def key_rows(self, start: int, stop: int, tokens: int, head: int, *, is_causal: bool) -> Tensor:
        return union(self._rows(start, stop, tokens, is_causal))

    def remote_key_rows(
        self, start: int, stop: int, tokens: int, head: int, *, is_causal: bool
    ) -> Tensor:
        return union(outside(self._rows(start, stop, tokens, is_causal), start, stop))

    def _rows(self, start: int, stop: int, tokens: int, is_causal: bool) -> Iterator[range]:
        """The rows that queries in [start, stop) see: the sinks, and those of each residue."""
        yield range(min(self.sinks, stop if is_causal else tokens))
        for first in range(start, min(stop, start + self.dilation)):  # one query of each residue
            last = first + (stop - 1 - first) // self.dilation * self.dilation
            end = last + 1 if is_causal else min(last + self.span + 1, tokens)
            yield range(self._oldest(first), end, self.dilation)

    def retained(self, position: int) -> tuple[int, int]:
        start = position - self.span
        return (self.sinks, start) if start > self.sinks else (0, 0)

    def visible_keys(self, position: int, heads: int) -> list[tuple[range, range | Tensor]]:
        near = range(self._oldest(position), position + 1, self.dilation)
        sinks = [key for key in range(min(self.sinks, position + 1)) if key not in near]
        found: list[tuple[range, range | Tensor]] = [(range(heads), near)]
        return [*found, (range(heads), torch.tensor(sinks))] if sinks else found

    def first_key(self, start: int, stop: int, heads: int) -> int:
        if self.sinks:
            return 0
        return min(self._oldest(p) for p in range(start, min(stop, start + self.dilation)))

    def _oldest(self, position: int) -> int:
        """The first key in the window of the query at `position`."""
        return position - min(self.window - 1, position // self.dilation) * self.dilation


def _clipped_sum(count: int, limit: int) -> int:
    """The sum of min(i, limit) for i = 1 … count."""
    below = min(count, limit)
    return below * (below + 1) // 2 + (count - below) * limit
