"""A causal block-sparse backward pass that computes dS once for every pair.

The kernels of `branch` compute it twice, for dQ and for dK: 7 products per pair. Here backward_dkdv
stores the dS of each pair of blocks in a scratch buffer, and backward_dq is one product per pair, 5
in all. The scratch buffers stay within SCRATCH_BYTES:

- A few heads run at a time, as many as fill the GPU, on two streams, so that the tail of one
  kernel overlaps the other stream's kernels.
- If one head has too many pairs, its queries are processed in chunks. The gradients of its keys and
  values are accumulated over the chunks in float32; a query's gradient needs one chunk only.

There are no atomics: the same input gives the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from longspan.attention.kernels import block_sparse_kernels
from longspan.attention.kernels.block_index import (
    Chunk,
    ChunkedBlockIndex,
    chunked_block_index,
)
from longspan.attention.kernels.launch import Launch, Tiles, has_gluon
from longspan.attention.pattern import BlockSparse

LOG2_E = 1.4426950408889634
BLOCK = 128
SCRATCH_BYTES = 560 << 20
"""Of dS, on both streams together."""
FULL_BLOCKS = 512
"""Key blocks that fill the GPU; heads with fewer are launched together."""
MIN_TOKENS, MAX_TOKENS = 8192, 262144
"""Below, launches take the host longer; above, accumulating costs as much as a product saves."""


@lru_cache(maxsize=8)
def has_kernels(device: torch.device) -> bool:
    """Whether these kernels are tuned for the device; on a CPU Triton interprets them."""
    if device.type == "cpu":
        return True
    return torch.version.hip is None and torch.cuda.get_device_capability(device) == (9, 0)


@lru_cache(maxsize=8)
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _descriptor(x: Tensor, block: list[int], is_gluon: bool = False) -> Any:
    """A tensor descriptor of a matrix that is read or written block by block."""
    if is_gluon:
        from longspan.attention.kernels.gluon_parts import describe

        return describe(x, list(x.shape), list(x.stride()), block)
    return TensorDescriptor(x, list(x.shape), list(x.stride()), block)


@dataclass(frozen=True)
class _Call:
    """What the launches depend on; the scratch buffer of a stream holds `max_tiles` tiles."""

    blocks: BlockSparse
    max_tiles: int
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
    def index(self) -> ChunkedBlockIndex:
        count = self.tokens // BLOCK
        return chunked_block_index(self.blocks, count, self.max_tiles, self.device)

    @cached_property
    def heads_per_launch(self) -> int:
        """As many heads as fill the GPU and fit the scratch buffer, a divisor of all heads."""
        heads = self.batch * self.heads
        fit = self.max_tiles // self.index.max_tiles
        limit = min(fit, FULL_BLOCKS // (self.tokens // BLOCK), heads)
        return max(n for n in range(1, max(1, limit) + 1) if heads % n == 0)

    @cached_property
    def dkdv_tiles(self) -> Tiles:
        """The fastest of those tried on an H200, like `dq_tiles`."""
        return Tiles(64, 64, 4, 2, 168 if self.head_dim == 64 and not self.is_gluon else None)

    @cached_property
    def dq_tiles(self) -> Tiles:
        return Tiles(128, 128, 8, 7 if self.head_dim == 64 else 5)

    @cached_property
    def launches(self) -> list[tuple[Chunk, Launch, Launch]]:
        """backward_dkdv and backward_dq of each chunk."""
        return [(c, self._backward_dkdv(c), self._backward_dq(c)) for c in self.index.chunks]

    def _backward_dkdv(self, chunk: Chunk) -> Launch:
        kernel = block_sparse_kernels.backward_dkdv
        scalars: tuple[float, ...] = (
            self.tokens, self.heads, self.group, chunk.begin, self.index.max_tiles,
            self.scale * LOG2_E, self.scale,
        )  # fmt: skip
        if self.is_gluon:
            from longspan.attention.kernels import hopper

            kernel = hopper.backward_dkdv
        else:
            scalars += self.strides
        tiles = self.dkdv_tiles
        constants = {
            "FIRST": chunk.begin == 0,
            "LAST": chunk.end == self.tokens // BLOCK,
            "HEAD_DIM": self.head_dim,
            "TILE_M": tiles.queries,
            "TILE_N": tiles.keys,
        }
        grid = chunk.end * BLOCK // tiles.keys, self.heads_per_launch
        return Launch(kernel, grid, scalars, constants, tiles)

    def _backward_dq(self, chunk: Chunk) -> Launch:
        tiles = self.dq_tiles
        scalars = (
            self.tokens, self.heads, self.group, chunk.end, self.index.max_tiles, self.scale
        )  # fmt: skip
        constants = {"HEAD_DIM": self.head_dim, "TILE_M": tiles.queries, "TILE_N": tiles.keys}
        grid = (chunk.end - chunk.begin) * BLOCK // tiles.queries, self.heads_per_launch
        return Launch(block_sparse_kernels.backward_dq, grid, scalars, constants, tiles)


_calls = lru_cache(maxsize=16)(_Call)  # each holds an index of up to 33 MiB


class _StreamBuffers(NamedTuple):
    """A stream and its buffers; both descriptors are of the scratch buffer of dS."""

    stream: torch.cuda.Stream | None  # None: the current one
    written: Any  # by backward_dkdv
    read: Any  # by backward_dq
    partials: tuple[
        Tensor, ...
    ]  # dK, dV over chunks: float32 (heads of a launch, tokens, head_dim)


def _new_buffers(call: _Call, stream: torch.cuda.Stream | None) -> _StreamBuffers:
    rows = call.heads_per_launch * call.index.max_tiles * BLOCK
    scratch = torch.empty(rows, BLOCK, dtype=call.dtype, device=call.device)
    tokens = call.tokens if len(call.index.chunks) > 1 else 0
    shape = (2, call.heads_per_launch, tokens, call.head_dim)
    partials = torch.empty(shape, dtype=torch.float32, device=call.device)
    written, read = call.dkdv_tiles, call.dq_tiles
    return _StreamBuffers(
        stream,
        _descriptor(scratch, [written.keys, written.queries], call.is_gluon),
        _descriptor(scratch, [read.keys, read.queries]),
        partials.unbind(),
    )


def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    do: Tensor,
    lse: Tensor,
    delta: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    blocks: BlockSparse,
    scale: float,
) -> None:
    """Write the gradients dq, dk and dv, all (batch, tokens, heads of q, head_dim), contiguous.

    `lse` and `delta` are `safe_lse` and `delta` of `rows.backward_preprocess`.
    """
    (batch, tokens, heads, head_dim), group = q.shape, q.shape[2] // k.shape[2]
    max_tiles = SCRATCH_BYTES // (2 * BLOCK * BLOCK * q.element_size())
    q, k, v, do = (x.flatten(0, 1).flatten(1) for x in (q, k, v, do))
    call = _calls(
        blocks, max_tiles, has_gluon(q.device), q.dtype, q.device, batch, tokens, heads, group,
        head_dim, scale, (k.stride(0), v.stride(0)),
    )  # fmt: skip
    inputs = _dkdv_inputs(call, q, k, v, do)
    keys = _descriptor(k, [call.dq_tiles.keys, head_dim])
    index, firsts = call.index, range(0, batch * heads, call.heads_per_launch)
    side = _side_stream(q.device) if q.is_cuda and len(firsts) > 1 else None
    streams = [_new_buffers(call, stream) for stream in ((None, side) if side else (None,))]
    if side is not None:
        side.wait_stream(torch.cuda.current_stream())
    for i, first in enumerate(firsts):
        buffers = streams[i % len(streams)]
        with torch.cuda.stream(buffers.stream):
            for chunk, backward_dkdv, backward_dq in call.launches:
                backward_dkdv(
                    *inputs, lse, delta, buffers.written, dk, dv, *buffers.partials, chunk.offsets,
                    chunk.queries, first,
                )  # fmt: skip
                backward_dq(buffers.read, keys, dq, index.offsets, index.keys, index.tiles, first)
    if side is not None:
        # From here all buffers may be freed as if only the current stream had used them.
        # `record_stream` would delay the reuse of the scratch, and the next layer would allocate
        # another one.
        torch.cuda.current_stream().wait_stream(side)


def _dkdv_inputs(call: _Call, q: Tensor, k: Tensor, v: Tensor, do: Tensor) -> tuple[Any, ...]:
    """q, k, v and dO for backward_dkdv: in Triton k and v stay tensors, see `loops.load_tile`."""
    tiles, dims, is_gluon = call.dkdv_tiles, call.head_dim, call.is_gluon
    q_desc, do_desc = (_descriptor(x, [tiles.queries, dims], is_gluon) for x in (q, do))
    if is_gluon:
        k, v = (_descriptor(x, [tiles.keys, dims], True) for x in (k, v))
    return q_desc, k, v, do_desc
