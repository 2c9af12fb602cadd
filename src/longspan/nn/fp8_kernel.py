"""Matrices rounded to fp8, and their transposes, by a Triton kernel."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# mypy: ignore-errors

BLOCK = 128
WARPS = 8
TYPES = {torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}


def transpose(x: Tensor, width: int) -> Tensor:
    """The transpose of x (rows, columns), dense and of one byte per element: (columns, width).

    Its last columns are zeros if x has fewer rows than `width`.
    """
    assert x.element_size() == 1
    out = x.new_empty(x.shape[1], width)
    _launch(x.view(torch.uint8), out.view(torch.uint8))
    return out


def round_weight(x: Tensor, scale: Tensor, dtype: torch.dtype, transposes: bool) -> Tensor:
    """Dense x (rows, columns) or its transpose, times `scale` () in e4m3, rounded to `dtype`
    before.
    """
    out = x.new_empty(x.shape[::-1] if transposes else x.shape, dtype=torch.float8_e4m3fn)
    _launch(x, out, scale, TYPES[dtype], tl.float8e4nv, transposes=transposes)
    return out


def _launch(
    x: Tensor, out: Tensor, scale: Tensor | None = None, *types: tl.dtype, transposes: bool = True
) -> None:
    (rows, columns), (first, second) = x.shape, types or (None, None)
    width = out.shape[1] if transposes else rows
    assert x.is_contiguous()
    grid = triton.cdiv(width, BLOCK), triton.cdiv(columns, BLOCK)
    _round_and_transpose[grid](
        x, scale, out, rows, columns, width, first, second, transposes, BLOCK, num_warps=WARPS
    )


@triton.jit
def _round_and_transpose(
    x, scale, out, rows, columns, width,
    FIRST: tl.constexpr, SECOND: tl.constexpr, TRANSPOSES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    column = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    at = row[:, None] * columns + column[None, :]
    is_inside = (row < rows)[:, None] & (column < columns)[None, :]
    tile = tl.load(x + at, is_inside, 0)
    if FIRST is not None:
        tile = (tile.to(FIRST).to(tl.float32) * tl.load(scale)).to(SECOND)
    if TRANSPOSES:
        at = column[:, None] * width + row[None, :]
        is_inside = (column < columns)[:, None] & (row < width)[None, :]
        tl.store(out + at, tl.trans(tile), is_inside)
    else:
        tl.store(out + at, tile, is_inside)
