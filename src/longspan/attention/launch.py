"""Launches of the Triton kernels: a plan of branches, tiles, and memory that stays small."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad
from triton.tools.tensor_descriptor import TensorDescriptor

from longspan.attention import kernels
from longspan.attention.pattern import BlockSparse

LOG2_E = 1.4426950408889634
PARTIAL_BYTES = 128 << 20
"""Of each float32 buffer that branches are joined in; longer sequences go slab by slab."""


@dataclass(frozen=True)
class Tiles:
    """Queries and keys per tile, and how the compiler is to lay the kernel out."""

    queries: int
    keys: int
    warps: int
    stages: int


def tiles_of(kernel: str, head_dim: int, dtype: torch.dtype) -> Tiles:
    """The fastest of those tried on an H200 for head_dim 64 and 128; the others merely fit."""
    if dtype == torch.float32:
        return Tiles(32, 32, 4, 1)
    if head_dim <= 64:
        keys_or_queries = {"forward": (64, 64), "query_grad": (64, 32), "key_grad": (32, 64)}
        return Tiles(*keys_or_queries[kernel], 4, 3)
    if head_dim <= 128:
        return {
            "forward": Tiles(64, 64, 4, 3),
            "query_grad": Tiles(64, 64, 4, 2),
            "key_grad": Tiles(32, 64, 4, 3),
        }[kernel]
    return Tiles(32, 64, 8, 1) if kernel == "key_grad" else Tiles(64, 32, 8, 2)


@dataclass(frozen=True)
class Branch:
    """One branch as the kernels see it: lengths in rows, and its place among the others."""

    rate: int
    segment: int
    inner: int  # rows of the segments it crosses; 0 where it visits its segments whole
    ratios: tuple[int, ...]  # the outer branches' rates over its own
    is_first: bool
    is_last: bool


@dataclass(frozen=True)
class Plan:
    """The branches from the sparsest to the densest.

    In a chain each branch keeps only positions that the next one keeps: it is enough to hold the
    partial results of every `partial_rate`-th position, and the last branch writes the result.
    """

    branches: tuple[Branch, ...]
    is_chain: bool
    partial_rate: int
    reach: int  # the longest segment: no pair is further apart

    def writes_every_row(self) -> bool:
        return self.is_chain and self.branches[-1].rate == 1


def plan(segment_lengths: Sequence[int], rates: Sequence[int], has_blocks: bool) -> Plan:
    """Order the branches and, where they are nested, let each visit what the inner ones have not.

    Nested: every segment is made of whole inner ones, every rate is a multiple of the inner ones
    and divides every segment. A key's multiplicity must further repeat within a tile of 32.
    """
    dense_to_sparse = sorted(zip(segment_lengths, rates, strict=True))
    widest, sparsest = dense_to_sparse[-1]
    pairs = list(pairwise(dense_to_sparse))
    is_nested = (
        all(w % v == 0 and r % s == 0 for (v, s), (w, r) in pairs)
        and all(w % sparsest == 0 for w, _ in dense_to_sparse)
        and 32 % (sparsest // dense_to_sparse[0][1]) == 0
        and not (has_blocks and pairs)
    )
    last = len(dense_to_sparse) - 1
    branches = tuple(
        Branch(
            rate=r,
            segment=w // r,
            inner=dense_to_sparse[i - 1][0] // r if is_nested and i > 0 else 0,
            ratios=tuple(s // r for _, s in dense_to_sparse[i + 1 :]) if is_nested else (),
            is_first=i == last,
            is_last=is_nested and i == 0,
        )
        for i, (w, r) in enumerate(dense_to_sparse)
    )[::-1]
    partial_rate = dense_to_sparse[1][1] if is_nested and pairs else 1
    reach = widest if is_nested else math.lcm(*segment_lengths)
    return Plan(branches, is_nested, partial_rate, reach)


@lru_cache(maxsize=32)
def block_lists(
    blocks: BlockSparse, count: int, is_causal: bool, of_keys: bool, device: torch.device
) -> tuple[Tensor, Tensor]:
    """CSR lists of the key blocks of each query block, or of the query blocks of each key block.

    Int32 `offsets` (count + 1,) and indices; under causality without the block itself.
    """
    index = torch.arange(count, device=device)
    found, lengths = [], []
    for rows in torch.split(index, max(1, (1 << 22) // count)):
        kept = blocks.blocks(index, rows).T if of_keys else blocks.blocks(rows, index)
        if is_causal:
            earlier = index[None, :] < rows[:, None]
            kept = kept & (~earlier & (index[None, :] != rows[:, None]) if of_keys else earlier)
        found.append(kept.nonzero()[:, 1].int())
        lengths.append(kept.sum(1))
    offsets = pad(torch.cat(lengths).cumsum(0), (1, 0)).int()
    return offsets, torch.cat(found)


def _descriptor(x: Tensor, rate: int, rows: int, dims: int) -> Any:
    """(batch, tokens, heads, head_dim) as (batch, rows, rate, heads, head_dim), read in tiles."""
    batch, tokens, heads, head_dim = x.shape
    b, n, h, _ = x.stride()
    shape = [batch, tokens // rate, rate, heads, head_dim]
    return TensorDescriptor(x, shape, [b, rate * n, n, h, 1], [1, rows, 1, 1, dims])


def _readable(x: Tensor, multiple: int) -> Tensor:
    """As descriptors want it: rows of 16-byte units, their number a multiple of every rate."""
    unit = 16 // x.element_size()
    if x.stride(3) != 1 or any(s % unit for s in x.stride()[:3]) or x.data_ptr() % 16:
        x = x.contiguous()
    rest = -x.shape[1] % multiple
    return pad(x, (0, 0, 0, 0, 0, rest)) if rest else x


class _Call:
    """What every launch of one attention shares."""

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        ids: tuple[Tensor, Tensor] | None,
        segment_lengths: Sequence[int],
        rates: Sequence[int],
        blocks: BlockSparse | None,
        is_causal: bool,
    ) -> None:
        self.batch, self.tokens, self.heads, self.head_dim = q.shape
        self.dtype, self.device = q.dtype, q.device
        self.group = self.heads // k.shape[2]
        self.ids, self.blocks, self.is_causal = ids, blocks, is_causal
        self.plan = plan(segment_lengths, rates, blocks is not None)
        self.unit = math.lcm(*rates)
        self.dims = max(16, 1 << (self.head_dim - 1).bit_length())

    def slabs(self) -> Iterator[slice]:
        """Runs of tokens that no pair leaves, as long as the partial results allow."""
        per_token = 4 * self.batch * self.heads * self.head_dim // self.plan.partial_rate
        fitting = PARTIAL_BYTES // max(1, per_token * self.plan.reach)
        step = self.plan.reach * max(1, fitting)
        for start in range(0, self.tokens, step):
            yield slice(start, min(start + step, self.tokens))

    def new_partial(self, tokens: int) -> Tensor:
        """Float32 (batch, every partial_rate-th token, heads, head_dim); none for one branch."""
        needed = len(self.plan.branches) > 1 or not self.plan.is_chain
        rows = -(-tokens // self.plan.partial_rate) if needed else 0
        new = torch.empty if self.plan.is_chain else torch.zeros
        shape = (self.batch, rows, self.heads, self.head_dim)
        return new(shape, dtype=torch.float32, device=self.device)

    def new_result(self) -> Tensor:
        new = torch.empty if self.plan.writes_every_row() else torch.zeros
        shape = (self.batch, self.tokens, self.heads, self.head_dim)
        return new(shape, dtype=self.dtype, device=self.device)

    def id_arguments(self, slab: slice, unused: Tensor) -> tuple[Tensor, Tensor, int]:
        if self.ids is None:
            return unused, unused, 0
        q_ids, k_ids = (x[:, slab] for x in self.ids)
        return q_ids, k_ids, q_ids.stride(0)

    def list_arguments(self, branch: Branch, of_keys: bool, unused: Tensor) -> tuple[Any, ...]:
        if self.blocks is None:
            return unused, unused, 1
        size = self.blocks.block_size
        count = -(-branch.segment // size)
        lists = block_lists(self.blocks, count, self.is_causal, of_keys, self.device)
        return (*lists, size)

    def grid(self, branch: Branch, tokens: int, tile: int) -> tuple[int, int]:
        length = branch.inner or branch.segment
        rows = -(-tokens // branch.rate)
        return -(-rows // length) * -(-length // tile), self.batch * self.heads

    def constants(self, branch: Branch, tiles: Tiles, tokens: int, looped: int) -> dict[str, Any]:
        """`looped`: rows per step of the kernel's loop."""
        whole = tokens % (branch.segment * branch.rate) == 0
        return {
            "RATIOS": branch.ratios,
            "CROSS": branch.inner > 0,
            "CAUSAL": self.is_causal,
            "FIRST": branch.is_first,
            "LAST": branch.is_last,
            "EVEN": whole and (branch.inner or branch.segment) % looped == 0,
            "LISTED": self.blocks is not None,
            "IDS": self.ids is not None,
            "HEAD_DIM": self.head_dim,
            "DIMS": self.dims,
            "TILE_M": tiles.queries,
            "TILE_N": tiles.keys,
            "num_warps": tiles.warps,
            "num_stages": tiles.stages,
        }


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ids: tuple[Tensor, Tensor] | None,
    segment_lengths: Sequence[int],
    rates: Sequence[int],
    blocks: BlockSparse | None,
    is_causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """q (batch, tokens, heads, head_dim) and k, v with heads that divide q's, to the output and
    its base-2 log-sum-exp (batch, heads, tokens); `ids`: int64 (batch, tokens) of queries, keys.
    """
    call = _Call(q, k, ids, segment_lengths, rates, blocks, is_causal)
    out = call.new_result()
    shape = (call.batch, call.heads, call.tokens)
    lse = torch.full(shape, -torch.inf, dtype=torch.float32, device=q.device)
    q, k, v = (_readable(x, call.unit) for x in (q, k, v))
    for slab in call.slabs():
        _forward_slab(call, slab, q, k, v, out, lse, scale)
    return out, lse


def _forward_slab(
    call: _Call, slab: slice, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    scale: float,
) -> None:  # fmt: skip
    tokens = slab.stop - slab.start
    padded = slice(slab.start, slab.stop + -slab.stop % call.unit)
    q, k, v, own_out, lse = q[:, padded], k[:, padded], v[:, padded], out[:, slab], lse[..., slab]
    partial = call.new_partial(tokens)
    q_ids, k_ids, id_stride = call.id_arguments(slab, lse)
    tiles = tiles_of("forward", call.head_dim, call.dtype)
    for branch in call.plan.branches:
        offsets, listed, block = call.list_arguments(branch, False, lse)
        kernels.forward[call.grid(branch, tokens, tiles.queries)](
            q,
            _descriptor(k, branch.rate, tiles.keys, call.dims),
            _descriptor(v, branch.rate, tiles.keys, call.dims),
            own_out, partial, lse, q_ids, k_ids, offsets, listed,
            q.stride()[:3], own_out.stride()[:3], partial.stride()[:3], lse.stride()[:2],
            id_stride, tokens, call.heads, call.group, branch.rate, branch.segment, branch.inner,
            call.plan.partial_rate, block, scale * LOG2_E,
            **call.constants(branch, tiles, tokens, tiles.keys),
        )  # fmt: skip
    if not call.plan.is_chain:
        own_out.copy_(partial)


def backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    ids: tuple[Tensor, Tensor] | None,
    segment_lengths: Sequence[int],
    rates: Sequence[int],
    blocks: BlockSparse | None,
    is_causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v, from that of the output and what `forward` returned."""
    call = _Call(q, k, ids, segment_lengths, rates, blocks, is_causal)
    grad_q, grad_k, grad_v = call.new_result(), call.new_result(), call.new_result()
    q, k, v, grad = (_readable(x, call.unit) for x in (q, k, v, grad))
    delta, limit = torch.empty_like(lse), torch.empty_like(lse)
    kernels.prepare_backward[(-(-call.tokens // 64), call.batch * call.heads)](
        out, grad, lse, delta, limit, out.stride()[:3], grad.stride()[:3], lse.stride()[:2],
        call.tokens, call.heads, HEAD_DIM=call.head_dim, DIMS=call.dims, TILE=64,
    )  # fmt: skip
    for slab in call.slabs():
        padded = slice(slab.start, slab.stop + -slab.stop % call.unit)
        inputs = _Inputs(
            q[:, padded], k[:, padded], v[:, padded], grad[:, padded],
            limit[..., slab], delta[..., slab],
        )  # fmt: skip
        _query_grad_slab(call, slab, inputs, grad_q[:, slab], scale)
        _key_grad_slab(call, slab, inputs, grad_k[:, slab], grad_v[:, slab], scale)
    if call.group > 1:
        grouped = (call.batch, call.tokens, -1, call.group, call.head_dim)
        grad_k, grad_v = grad_k.view(grouped).sum(3), grad_v.view(grouped).sum(3)
    return grad_q, grad_k, grad_v


class _Inputs(NamedTuple):
    """One slab of what a gradient is computed from."""

    q: Tensor
    k: Tensor
    v: Tensor
    grad: Tensor
    limit: Tensor
    delta: Tensor


def _query_grad_slab(
    call: _Call, slab: slice, inputs: _Inputs, grad_q: Tensor, scale: float
) -> None:
    q, k, v, grad, limit, delta = inputs
    tokens = slab.stop - slab.start
    partial = call.new_partial(tokens)
    q_ids, k_ids, id_stride = call.id_arguments(slab, limit)
    tiles = tiles_of("query_grad", call.head_dim, call.dtype)
    for branch in call.plan.branches:
        offsets, listed, block = call.list_arguments(branch, False, limit)
        kernels.query_grad[call.grid(branch, tokens, tiles.queries)](
            q,
            _descriptor(k, branch.rate, tiles.keys, call.dims),
            _descriptor(v, branch.rate, tiles.keys, call.dims),
            grad, limit, delta, grad_q, partial, q_ids, k_ids, offsets, listed,
            q.stride()[:3], grad.stride()[:3], grad_q.stride()[:3], partial.stride()[:3],
            limit.stride()[:2], id_stride, tokens, call.heads, call.group, branch.rate,
            branch.segment, branch.inner, call.plan.partial_rate, block, scale * LOG2_E, scale,
            **call.constants(branch, tiles, tokens, tiles.keys),
        )  # fmt: skip
    if not call.plan.is_chain:
        grad_q.copy_(partial)


def _key_grad_slab(
    call: _Call, slab: slice, inputs: _Inputs, grad_k: Tensor, grad_v: Tensor, scale: float
) -> None:
    q, k, v, grad, limit, delta = inputs
    tokens = slab.stop - slab.start
    partial_k, partial_v = call.new_partial(tokens), call.new_partial(tokens)
    q_ids, k_ids, id_stride = call.id_arguments(slab, limit)
    tiles = tiles_of("key_grad", call.head_dim, call.dtype)
    for branch in call.plan.branches:
        offsets, listed, block = call.list_arguments(branch, True, limit)
        kernels.key_grad[call.grid(branch, tokens, tiles.keys)](
            _descriptor(q, branch.rate, tiles.queries, call.dims),
            k,
            v,
            _descriptor(grad, branch.rate, tiles.queries, call.dims),
            limit, delta, grad_k, grad_v, partial_k, partial_v, q_ids, k_ids, offsets, listed,
            k.stride()[:3], v.stride()[:3], grad_k.stride()[:3], partial_k.stride()[:3],
            limit.stride()[:2], id_stride, tokens, call.heads, call.group, branch.rate,
            branch.segment, branch.inner, call.plan.partial_rate, block, scale * LOG2_E, scale,
            **call.constants(branch, tiles, tokens, tiles.queries),
        )  # fmt: skip
    if not call.plan.is_chain:
        grad_k.copy_(partial_k)
        grad_v.copy_(partial_v)
