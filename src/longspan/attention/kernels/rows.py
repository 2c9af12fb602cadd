"""Triton kernels that work row by row, before and after those of the backward pass."""

from __future__ import annotations

import triton
import triton.language as tl

from longspan.attention.kernels.loops import SHAPES, pointers

# mypy: ignore-errors


@triton.jit(do_not_specialize=SHAPES)
def backward_preprocess(
    out, do, lse, delta, safe_lse, out_strides, do_strides, lse_stride, delta_stride, tokens,
    heads,
    HEAD_DIM: tl.constexpr, TILE_D: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """delta = rowsum(dO ∘ O); safe_lse = the log-sum-exp, but +inf for queries that see no key."""
    batch, head = tl.program_id(1) // heads, tl.program_id(1) % heads
    row = tl.program_id(0) * TILE + tl.arange(0, TILE)
    valid = row < tokens
    in_bounds = valid[:, None] & (tl.arange(0, TILE_D) < HEAD_DIM)[None, :]
    out_rows = pointers(out, out_strides, batch, row, head, TILE_D)
    out_tile = tl.load(out_rows, mask=in_bounds, other=0.0).to(tl.float32)
    do_rows = pointers(do, do_strides, batch, row, head, TILE_D)
    do_tile = tl.load(do_rows, mask=in_bounds, other=0.0).to(tl.float32)
    lse_i = tl.load(lse + tl.program_id(1).to(tl.int64) * lse_stride + row, mask=valid)
    offset = tl.program_id(1).to(tl.int64) * delta_stride + row
    tl.store(delta + offset, tl.sum(out_tile * do_tile, 1), mask=valid)
    tl.store(safe_lse + offset, tl.where(lse_i == float("-inf"), float("inf"), lse_i), mask=valid)


@triton.jit
def scaled_copy(x, out, count, scale, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + i, i < count) * scale
    tl.store(out + i, value.to(out.dtype.element_ty), i < count)
