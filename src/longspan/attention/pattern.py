"""Patterns: which keys a query sees, and what that costs.

A pattern is the one statement of the mask. The oracle, the operators and the FLOP counts below
are all derived from it. Positions and heads are counted from 0; `tokens` is the sequence length.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from longspan.config import Attention, branch_problems


class Pattern(ABC):
    """Which keys a query sees, per head."""

    @abstractmethod
    def counts(self, queries: Tensor, keys: Tensor, head: int) -> Tensor:
        """How often each query sees each key before causality: int64 (queries, keys).

        `queries` and `keys` are 1-D int64 tensors of absolute positions. A key that two branches
        reach counts twice: the attention is one softmax over that multiset.
        """

    @abstractmethod
    def pairs(self, tokens: int, heads: int, *, is_causal: bool) -> int:
        """Query-key pairs over all heads of one sequence, each counted as often as it is seen."""

    def flops(self, tokens: int, heads: int, head_dim: int, *, is_causal: bool) -> int:
        """Forward FLOPs of one sequence; forward and backward together are 3.5 times this.

        Per pair: 2·head_dim for q·k and 2·head_dim for p·v.
        """
        return 4 * head_dim * self.pairs(tokens, heads, is_causal=is_causal)


@dataclass(frozen=True)
class Dense(Pattern):
    """Every query sees every key once."""

    def counts(self, queries: Tensor, keys: Tensor, head: int) -> Tensor:
        return torch.ones(len(queries), len(keys), dtype=torch.int64)

    def pairs(self, tokens: int, heads: int, *, is_causal: bool) -> int:
        return heads * _pairs_within(tokens, is_causal)


@dataclass(frozen=True)
class Dilated(Pattern):
    """LongNet's branches: within segments of w tokens, head h keeps positions p ≡ h (mod r).

    >>> Dilated(segment_lengths=(2048, 4096, 8192), dilation_rates=(1, 2, 4))
    Dilated(segment_lengths=(2048, 4096, 8192), dilation_rates=(1, 2, 4))
    """

    segment_lengths: tuple[int, ...]
    dilation_rates: tuple[int, ...]

    def __post_init__(self) -> None:
        if problems := branch_problems(self.segment_lengths, self.dilation_rates):
            raise ValueError("; ".join(problems))

    @property
    def branches(self) -> tuple[tuple[int, int], ...]:
        """(segment length w, dilation rate r) of each branch."""
        return tuple(zip(self.segment_lengths, self.dilation_rates, strict=True))

    def counts(self, queries: Tensor, keys: Tensor, head: int) -> Tensor:
        p, k = queries[:, None], keys[None, :]
        seen = torch.zeros(len(queries), len(keys), dtype=torch.int64)
        for w, r in self.branches:
            seen += (p // w == k // w) & (p % r == head % r) & (k % r == head % r)
        return seen

    def pairs(self, tokens: int, heads: int, *, is_causal: bool) -> int:
        total = 0
        for w, r in self.branches:
            for offset in range(min(r, heads, tokens)):
                heads_here = len(range(offset, heads, r))
                rows = len(range(offset, tokens, r))
                whole, rest = divmod(rows, w // r)
                per_head = whole * _pairs_within(w // r, is_causal) + _pairs_within(rest, is_causal)
                total += heads_here * per_head
        return total


def _pairs_within(rows: int, is_causal: bool) -> int:
    return rows * (rows + 1) // 2 if is_causal else rows * rows


def pattern_of(attention: Attention) -> Pattern:
    """The pattern a run file's [attention] section describes."""
    if attention.kind == "dense":
        return Dense()
    return Dilated(attention.segment_lengths, attention.dilation_rates)
