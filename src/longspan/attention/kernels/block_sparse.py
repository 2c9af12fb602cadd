"""A causal backward pass by lists of blocks that computes dS once for every pair.

The kernels of `kernels` compute it twice, for dQ and for dK: 7 products per pair. Here key_grad
stores the dS of each listed pair of blocks in a scratch, and query_grad is one product per pair, 5
in all. The scratch stays within SCRATCH_BYTES:

- A few heads run at a time, as many as fill the GPU, in two lanes: streams, so that the end of one
  kernel runs beside the other lane's.
- Where the pairs of one head are too many, its queries go chunk by chunk. The gradients of its keys
  and values are then joined over the chunks in float32; a query's lies in one chunk.

No atomics: the same input gives the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from longspan.attention.kernels import block_sparse_kernels
from longspan.attention.kernels.block_index import Chunk, Lists, chunked_lists
from longspan.attention.kernels.launch import Launch, Tiles
from longspan.attention.pattern import BlockSparse

LOG2_E = 1.4426950408889634
BLOCK = 128
SCRATCH_BYTES = 560 << 20
"""Of dS, in both lanes together."""
FULL = 512
"""Blocks of keys that fill the GPU; heads with fewer are launched together."""
SHORTEST, LONGEST = 8192, 262144
"""Tokens. Below, the launches take the host longer; above, joining costs what a product saves."""


@lru_cache(maxsize=8)
def has_kernels(device: torch.device) -> bool:
    """Whether the kernels here are tuned for the device; on a CPU Triton interprets them."""
    if device.type == "cpu":
        return True
    return torch.version.hip is None and torch.cuda.get_device_capability(device) == (9, 0)


@lru_cache(maxsize=8)
def _has_gluon(device: torch.device) -> bool:
    """Gluon is experimental: its key_grad was tried with Triton 3.6 alone."""
    return device.type == "cuda" and triton.__version__.startswith("3.6.")


@lru_cache(maxsize=8)
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _described(x: Tensor, block: list[int], is_gluon: bool = False) -> Any:
    """A matrix that is read or written a block at a time."""
    if is_gluon:
        from longspan.attention.kernels import hopper

        return hopper.described(x, block)
    return TensorDescriptor(x, list(x.shape), list(x.stride()), block)


@dataclass(frozen=True)
class _Case:
    """What the launches depend on; the scratch of a lane holds `most` tiles."""

    blocks: BlockSparse
    most: int
    is_gluon: bool
    dtype: torch.dtype
    device: torch.device
    batch: int
    tokens: int
    heads: int
    group: int
    head_dim: int
    scale: float
    strides: tuple[int, int]  # of the rows of k and v

    @cached_property
    def lists(self) -> Lists:
        return chunked_lists(self.blocks, self.tokens // BLOCK, self.most, self.device)

    @cached_property
    def together(self) -> int:
        """The heads of one launch: as many as fill the GPU and have room, in equal shares."""
        heads = self.batch * self.heads
        most = min(self.most // self.lists.most_tiles, FULL // (self.tokens // BLOCK), heads)
        return max(n for n in range(1, max(1, most) + 1) if heads % n == 0)

    @cached_property
    def key_tiles(self) -> Tiles:
        """The fastest of those tried on an H200, as is the other."""
        return Tiles(64, 64, 4, 2, 168 if self.head_dim == 64 and not self.is_gluon else None)

    @cached_property
    def query_tiles(self) -> Tiles:
        return Tiles(128, 128, 8, 7 if self.head_dim == 64 else 5)

    @cached_property
    def launches(self) -> list[tuple[Chunk, Launch, Launch]]:
        """key_grad and query_grad of each chunk."""
        return [(c, self._key_grad(c), self._query_grad(c)) for c in self.lists.chunks]

    def _key_grad(self, chunk: Chunk) -> Launch:
        kernel = block_sparse_kernels.key_grad
        numbers: tuple[float, ...] = (
            self.tokens, self.heads, self.group, chunk.begin, self.lists.most_tiles,
            self.scale * LOG2_E, self.scale,
        )  # fmt: skip
        if self.is_gluon:
            from longspan.attention.kernels import hopper

            kernel = hopper.key_grad
        else:
            numbers += self.strides
        tiles = self.key_tiles
        constants = {
            "FIRST": chunk.begin == 0,
            "LAST": chunk.end == self.tokens // BLOCK,
            "HEAD_DIM": self.head_dim,
            "TILE_M": tiles.queries,
            "TILE_N": tiles.keys,
        }
        grid = chunk.end * BLOCK // tiles.keys, self.together
        return Launch(kernel, grid, numbers, constants, tiles)

    def _query_grad(self, chunk: Chunk) -> Launch:
        tiles = self.query_tiles
        numbers = (
            self.tokens, self.heads, self.group, chunk.end, self.lists.most_tiles, self.scale
        )  # fmt: skip
        constants = {"HEAD_DIM": self.head_dim, "TILE_M": tiles.queries, "TILE_N": tiles.keys}
        grid = (chunk.end - chunk.begin) * BLOCK // tiles.queries, self.together
        return Launch(block_sparse_kernels.query_grad, grid, numbers, constants, tiles)


_cases = lru_cache(maxsize=64)(_Case)


class _Lane(NamedTuple):
    """A stream, the scratch as key_grad writes and query_grad reads it, and what chunks join."""

    stream: torch.cuda.Stream | None  # None: the current one
    written: Any
    read: Any
    partials: tuple[Tensor, ...]  # of keys and values: float32 (together, tokens, head_dim)


def _lane(case: _Case, stream: torch.cuda.Stream | None) -> _Lane:
    rows = case.together * case.lists.most_tiles * BLOCK
    scratch = torch.empty(rows, BLOCK, dtype=case.dtype, device=case.device)
    tokens = case.tokens if len(case.lists.chunks) > 1 else 0
    shape = (2, case.together, tokens, case.head_dim)
    partials = torch.empty(shape, dtype=torch.float32, device=case.device)
    written, read = case.key_tiles, case.query_tiles
    return _Lane(
        stream,
        _described(scratch, [written.keys, written.queries], case.is_gluon),
        _described(scratch, [read.keys, read.queries]),
        partials.unbind(),
    )


def gradients(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    grad: Tensor,
    limit: Tensor,
    delta: Tensor,
    grad_q: Tensor,
    grad_k: Tensor,
    grad_v: Tensor,
    blocks: BlockSparse,
    scale: float,
) -> None:
    """Write the gradients of q, k and v, all (batch, tokens, heads of q, head_dim), contiguous.

    `limit` and `delta` as `kernels.prepare_backward` makes them: (batch, heads, tokens).
    """
    (batch, tokens, heads, head_dim), group = q.shape, q.shape[2] // k.shape[2]
    most = SCRATCH_BYTES // (2 * BLOCK * BLOCK * q.element_size())
    q, k, v, grad = (x.flatten(0, 1).flatten(1) for x in (q, k, v, grad))
    case = _cases(
        blocks, most, _has_gluon(q.device), q.dtype, q.device, batch, tokens, heads, group,
        head_dim, scale, (k.stride(0), v.stride(0)),
    )  # fmt: skip
    inputs = _inputs(case, q, k, v, grad)
    keys = _described(k, [case.query_tiles.keys, head_dim])
    lists, firsts = case.lists, range(0, batch * heads, case.together)
    side = _side_stream(q.device) if q.is_cuda and len(firsts) > 1 else None
    lanes = [_lane(case, stream) for stream in ((None, side) if side else (None,))]
    if side is not None:
        side.wait_stream(torch.cuda.current_stream())
    for i, first in enumerate(firsts):
        lane = lanes[i % len(lanes)]
        with torch.cuda.stream(lane.stream):
            for chunk, key_grad, query_grad in case.launches:
                key_grad(
                    *inputs, limit, delta, lane.written, grad_k, grad_v, *lane.partials,
                    chunk.offsets, chunk.queries, first,
                )  # fmt: skip
                query_grad(lane.read, keys, grad_q, lists.offsets, lists.keys, lists.tiles, first)
    if side is not None:
        # Now all that was used here may be freed as if the current stream alone had used it.
        # `record_stream` would hold the scratch back, and the next layer would take another one.
        torch.cuda.current_stream().wait_stream(side)


def _inputs(case: _Case, q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> tuple[Any, ...]:
    """q, k, v and dO as key_grad reads them: k and v as they are in Triton, see `kernels._tile`."""
    tiles, dims, is_gluon = case.key_tiles, case.head_dim, case.is_gluon
    queries, grads = (_described(x, [tiles.queries, dims], is_gluon) for x in (q, grad))
    if is_gluon:
        k, v = (_described(x, [tiles.keys, dims], True) for x in (k, v))
    return queries, k, v, grads
