"""Launches of the Triton kernels: a plan of branches, tiles, and memory that stays small."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from longspan.attention.kernels import block_sparse
from longspan.attention.kernels import branch as branch_kernels
from longspan.attention.kernels.block_index import block_lists
from longspan.attention.kernels.block_sparse import LOG2_E
from longspan.attention.kernels.launch import Launch, Tiles
from longspan.attention.pattern import BlockSparse

PARTIAL_BYTES = 128 << 20
"""Of each float32 buffer that branches are joined in; longer sequences go slab by slab."""


def tiles_of(kernel: str, head_dim: int, dtype: torch.dtype, block: int = 0) -> Tiles:
    """The fastest of those tried on an H200 for head_dim 64 and 128; the others merely fit.

    They divide `block`, the size of block-sparse blocks where there are any.
    """
    if dtype == torch.float32:
        return Tiles(32, 32, 4, 1)
    has_wide_blocks = block > 0 and block % 128 == 0
    if head_dim <= 64:
        return {
            "forward": Tiles(128, 128, 4, 2) if has_wide_blocks else Tiles(64, 64, 4, 3),
            "query_grad": Tiles(64, 64 if block else 32, 4, 3),
            "key_grad": Tiles(32, 64, 4, 3),
        }[kernel]
    if head_dim <= 128:
        return {
            "forward": Tiles(128, 64, 4, 2) if has_wide_blocks else Tiles(64, 64, 4, 3),
            "query_grad": Tiles(64, 64, 4, 2) if block else Tiles(128, 64, 8, 3),
            "key_grad": Tiles(64, 64, 4, 2) if block else Tiles(32, 64, 4, 3),
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


@dataclass(frozen=True, eq=False)  # one object for each, see `_calls`: its hash is its address
class _Call:
    """What the launches of one attention share: its shapes and its pattern."""

    batch: int
    tokens: int
    heads: int
    group: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device
    segment_lengths: tuple[int, ...]
    rates: tuple[int, ...]
    blocks: BlockSparse | None
    first_head: int
    is_causal: bool
    has_ids: bool
    scale: float

    @cached_property
    def plan(self) -> Plan:
        return plan(self.segment_lengths, self.rates, self.blocks is not None)

    @cached_property
    def unit(self) -> int:
        return math.lcm(*self.rates)

    @cached_property
    def dims(self) -> int:
        return max(16, 1 << (self.head_dim - 1).bit_length())

    @cached_property
    def slabs(self) -> list[slice]:
        """Runs of tokens that no pair leaves, as long as the partial results allow."""
        reach = math.lcm(self.plan.reach, 4)  # keeps every slab's rows of numbers aligned
        per_token = 4 * self.batch * self.heads * self.head_dim // self.plan.partial_rate
        step = reach * max(1, PARTIAL_BYTES // max(1, per_token * reach))
        starts = range(0, self.tokens, step)
        return [slice(start, min(start + step, self.tokens)) for start in starts]

    def padded(self, slab: slice) -> slice:
        """The slab as the inputs have it, whose tokens are a multiple of every rate."""
        return slice(slab.start, slab.stop + -slab.stop % self.unit)

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

    @cached_property
    def is_listed(self) -> bool:
        """Whether the backward pass is that of `listed`: 16-bit blocks of whole sequences."""
        return (
            self.blocks is not None
            and self.blocks.block_size == block_sparse.BLOCK
            and self.is_causal
            and not self.has_ids
            and self.rates == (1,)
            and self.segment_lengths[0] >= self.tokens
            and block_sparse.SHORTEST <= self.tokens <= block_sparse.LONGEST
            and self.tokens % block_sparse.BLOCK == 0
            and self.head_dim in (64, 128)
            and self.dtype.itemsize == 2
            and block_sparse.has_kernels(self.device)
        )

    def listed(self, branch: Branch, unused: Tensor, *, of_keys: bool) -> tuple[Tensor, Tensor]:
        if self.blocks is None:
            return unused, unused
        count = -(-branch.segment // self.blocks.block_size)
        return block_lists(self.blocks, count, self.is_causal, of_keys, self.device)


_calls = lru_cache(maxsize=64)(_Call)


@lru_cache(maxsize=512)
def _launches(
    call: _Call,
    name: str,
    tokens: int,
    strides: tuple[tuple[int, ...], ...],
    described: tuple[tuple[int, ...], ...],
    id_stride: int,
) -> list[Launch]:
    """The launches of one kernel over a slab of `tokens`, one per branch.

    `strides`: of the tensors that the kernel addresses by pointers, in its order; `described`: of
    those it reads through descriptors, which a launch makes once.
    """
    of_keys = name == "key_grad"
    block = 1 if call.blocks is None else call.blocks.block_size
    tiles = tiles_of(name, call.head_dim, call.dtype, 0 if call.blocks is None else block)
    tile, step = (tiles.keys, tiles.queries) if of_keys else (tiles.queries, tiles.keys)
    scales = (call.scale * LOG2_E,) if name == "forward" else (call.scale * LOG2_E, call.scale)
    launches = []
    for branch in call.plan.branches:
        length = branch.inner or branch.segment
        rows = -(-tokens // branch.rate)
        numbers = (
            *strides, id_stride, tokens, call.heads, call.first_head, call.group, branch.rate,
            branch.segment, branch.inner, call.plan.partial_rate, block, *scales,
        )  # fmt: skip
        constants = {
            "RATIOS": branch.ratios,
            "CROSS": branch.inner > 0,
            "CAUSAL": call.is_causal,
            "FIRST": branch.is_first,
            "LAST": branch.is_last,
            "EVEN": tokens % (branch.segment * branch.rate) == 0 and length % step == 0,
            "LISTED": call.blocks is not None,
            "IDS": call.has_ids,
            "HEAD_DIM": call.head_dim,
            "DIMS": call.dims,
            "TILE_M": tiles.queries,
            "TILE_N": tiles.keys,
        }
        grid = (-(-rows // length) * -(-length // tile), call.batch * call.heads)
        kernel, unit = getattr(branch_kernels, name), (branch.rate, step, call.dims)
        launches.append(Launch(kernel, grid, numbers, constants, tiles, unit))
    return launches


@lru_cache(maxsize=64)
def _preparation(call: _Call, strides: tuple[tuple[int, ...], ...]) -> Launch:
    numbers = (*strides, call.tokens, call.heads)
    constants = {"HEAD_DIM": call.head_dim, "DIMS": call.dims, "TILE": 64}
    grid = (-(-call.tokens // 64), call.batch * call.heads)
    return Launch(branch_kernels.prepare_backward, grid, numbers, constants, Tiles(64, 64, 4, 1))


def _readable(x: Tensor, multiple: int) -> Tensor:
    """As the kernels want it: rows of 16-byte units, their number a multiple of every rate."""
    unit = 16 // x.element_size()
    b, n, h, d = x.stride()
    if d != 1 or b % unit or n % unit or h % unit or x.data_ptr() % 16:
        x = x.clone(memory_format=torch.contiguous_format)  # a new, aligned place
    rest = -x.shape[1] % multiple
    return pad(x, (0, 0, 0, 0, 0, rest)) if rest else x


def _call_of(
    q: Tensor, k: Tensor, ids: tuple[Tensor, Tensor] | None, segment_lengths: Sequence[int],
    rates: Sequence[int], blocks: BlockSparse | None, first_head: int, is_causal: bool,
    scale: float,
) -> _Call:  # fmt: skip
    batch, tokens, heads, head_dim = q.shape
    return _calls(
        batch, tokens, heads, heads // k.shape[2], head_dim, q.dtype, q.device,
        tuple(segment_lengths), tuple(rates), blocks, first_head, is_causal, ids is not None, scale,
    )  # fmt: skip


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ids: tuple[Tensor, Tensor] | None,
    segment_lengths: Sequence[int],
    rates: Sequence[int],
    blocks: BlockSparse | None,
    first_head: int,
    is_causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """q (batch, tokens, heads, head_dim) and k, v with heads that divide q's, to the output and
    its base-2 log-sum-exp (batch, heads, tokens); `ids`: int64 (batch, tokens) of queries, keys.
    """
    call = _call_of(q, k, ids, segment_lengths, rates, blocks, first_head, is_causal, scale)
    out = call.new_result()
    shape = (call.batch, call.heads, call.tokens)
    lse = torch.full(shape, -torch.inf, dtype=torch.float32, device=q.device)
    q, k, v = (_readable(x, call.unit) for x in (q, k, v))
    with torch.cuda.device_of(q):  # type: ignore[no-untyped-call]  # where Triton launches
        for slab in call.slabs:
            own = call.padded(slab)
            _forward_slab(
                call, _rows(q, own), _rows(k, own), _rows(v, own), _rows(out, slab),
                _rows(lse, slab, 2), *_ids_of(ids, slab, lse),
            )  # fmt: skip
    return out, lse


def _rows(x: Tensor, rows: slice, dim: int = 1) -> Tensor:
    """A slab of `x`: itself where there is only one, since a view costs as much as a launch."""
    start, stop = rows.start, rows.stop
    return x if stop - start == x.shape[dim] else x.narrow(dim, start, stop - start)


def _ids_of(
    ids: tuple[Tensor, Tensor] | None, slab: slice, unused: Tensor
) -> tuple[Tensor, Tensor]:
    return (unused, unused) if ids is None else (_rows(ids[0], slab), _rows(ids[1], slab))


def _forward_slab(
    call: _Call, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, q_ids: Tensor,
    k_ids: Tensor,
) -> None:  # fmt: skip
    tokens = out.shape[1]
    partial = call.new_partial(tokens)
    strides = q.stride()[:3], out.stride()[:3], partial.stride()[:3], lse.stride()[:2]
    id_stride = q_ids.stride(0) if call.has_ids else 0
    described = k.stride(), v.stride()
    launches = _launches(call, "forward", tokens, strides, described, id_stride)
    for branch, launch in zip(call.plan.branches, launches, strict=True):
        launch(
            q, launch.described(0, k), launch.described(1, v), out, partial, lse, q_ids, k_ids,
            *call.listed(branch, lse, of_keys=False),
        )  # fmt: skip
    if not call.plan.is_chain:
        out.copy_(partial)


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
    first_head: int,
    is_causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v, from that of the output and what `forward` returned."""
    call = _call_of(q, k, ids, segment_lengths, rates, blocks, first_head, is_causal, scale)
    grad_q, grad_k, grad_v = call.new_result(), call.new_result(), call.new_result()
    q, k, v, grad = (_readable(x, call.unit) for x in (q, k, v, grad))
    out, lse = _readable(out, 1), lse.contiguous()
    delta, limit = torch.empty_like(lse), torch.empty_like(lse)
    with torch.cuda.device_of(q):  # type: ignore[no-untyped-call]
        strides = out.stride()[:3], grad.stride()[:3], lse.stride()[:2]
        _preparation(call, strides)(out, grad, lse, delta, limit)
        if call.is_listed:
            assert call.blocks is not None
            block_sparse.gradients(
                q, k, v, grad, limit, delta, grad_q, grad_k, grad_v, call.blocks, call.scale
            )
        else:
            for slab in call.slabs:
                own = call.padded(slab)
                inputs = _Inputs(
                    _rows(q, own), _rows(k, own), _rows(v, own), _rows(grad, own),
                    _rows(limit, slab, 2), _rows(delta, slab, 2), *_ids_of(ids, slab, lse),
                )  # fmt: skip
                _query_grad_slab(call, inputs, _rows(grad_q, slab))
                _key_grad_slab(call, inputs, _rows(grad_k, slab), _rows(grad_v, slab))
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
    q_ids: Tensor
    k_ids: Tensor


def _query_grad_slab(call: _Call, inputs: _Inputs, grad_q: Tensor) -> None:
    q, k, v, grad, limit, delta, q_ids, k_ids = inputs
    tokens = grad_q.shape[1]
    partial = call.new_partial(tokens)
    strides = (
        q.stride()[:3], grad.stride()[:3], grad_q.stride()[:3], partial.stride()[:3],
        limit.stride()[:2],
    )  # fmt: skip
    id_stride = q_ids.stride(0) if call.has_ids else 0
    described = k.stride(), v.stride()
    launches = _launches(call, "query_grad", tokens, strides, described, id_stride)
    for branch, launch in zip(call.plan.branches, launches, strict=True):
        launch(
            q, launch.described(0, k), launch.described(1, v), grad, limit, delta, grad_q, partial,
            q_ids, k_ids, *call.listed(branch, limit, of_keys=False),
        )  # fmt: skip
    if not call.plan.is_chain:
        grad_q.copy_(partial)


def _key_grad_slab(call: _Call, inputs: _Inputs, grad_k: Tensor, grad_v: Tensor) -> None:
    q, k, v, grad, limit, delta, q_ids, k_ids = inputs
    tokens = grad_k.shape[1]
    partial_k, partial_v = call.new_partial(tokens), call.new_partial(tokens)
    strides = (
        k.stride()[:3], v.stride()[:3], grad_k.stride()[:3], partial_k.stride()[:3],
        limit.stride()[:2],
    )  # fmt: skip
    id_stride = q_ids.stride(0) if call.has_ids else 0
    described = q.stride(), grad.stride()
    launches = _launches(call, "key_grad", tokens, strides, described, id_stride)
    for branch, launch in zip(call.plan.branches, launches, strict=True):
        launch(
            launch.described(0, q), k, v, launch.described(1, grad), limit, delta, grad_k, grad_v,
            partial_k, partial_v, q_ids, k_ids, *call.listed(branch, limit, of_keys=True),
        )  # fmt: skip
    if not call.plan.is_chain:
        grad_k.copy_(partial_k)
        grad_v.copy_(partial_v)
