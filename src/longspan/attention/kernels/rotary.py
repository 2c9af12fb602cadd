"""RoPE of queries and keys that lie in one tensor with the values, in place."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# mypy: ignore-errors

ROWS = 64
"""Heads of tokens that one program rotates."""


def rotate(packed: Tensor, table: Tensor, rotated: int) -> None:
    """Rotate the first `rotated` heads of packed (batch, tokens, heads, head_dim).

    table: float32 (2, tokens, 1, head_dim / 2), cosines and sines.
    """
    _launch(packed, packed, table, rotated, 0, 1.0, is_back=False)


def rotate_back(
    packed: Tensor, dq_sum: Tensor | None, table: Tensor, rotated: int, scale: float
) -> None:
    """The gradient of `rotate`, given that of what it wrote in `packed`.

    With `dq_sum`, a float32 (batch, tokens, query heads, head_dim), that of queries is
    scale · dq_sum, and `packed` has none.
    """
    sums, queries = (packed, 0) if dq_sum is None else (dq_sum, dq_sum.shape[2])
    _launch(packed, sums, table, rotated, queries, scale, is_back=True)


def _launch(
    packed: Tensor, sums: Tensor, table: Tensor, rotated: int, queries: int, scale: float,
    *, is_back: bool,
) -> None:  # fmt: skip
    batch, tokens, heads, head_dim = packed.shape
    rows = batch * tokens * rotated
    constants = {"HALF": head_dim // 2, "TILE": triton.next_power_of_2(head_dim // 2)}
    scalars = rows, tokens, rotated, heads, queries, scale
    with torch.cuda.device_of(packed):  # where Triton launches
        _rotate[(triton.cdiv(rows, ROWS),)](
            packed, sums, table, *scalars, **constants, ROWS=ROWS, BACK=is_back, num_warps=4
        )


@triton.jit
def _rotate(
    packed, sums, table, rows, tokens, rotated, heads, queries, scale,
    HALF: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr, BACK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    token, head = row // rotated, row % rotated
    pair = tl.arange(0, TILE)
    mask = (row < rows)[:, None] & (pair < HALF)[None, :]
    angle = (token % tokens)[:, None] * HALF + pair[None, :]
    cos = tl.load(table + angle, mask=mask, other=0.0)
    sin = tl.load(table + tokens.to(tl.int64) * HALF + angle, mask=mask, other=0.0)
    place = packed + (token * heads + head)[:, None] * (2 * HALF) + pair[None, :]
    if BACK:
        sin = -sin
        is_sum = (head < queries)[:, None]
        of_sum = sums + (token * queries + head)[:, None] * (2 * HALF) + pair[None, :]
        a = tl.load(of_sum, mask=mask & is_sum, other=0.0).to(tl.float32) * scale
        b = tl.load(of_sum + HALF, mask=mask & is_sum, other=0.0).to(tl.float32) * scale
        a += tl.load(place, mask=mask & ~is_sum, other=0.0).to(tl.float32)
        b += tl.load(place + HALF, mask=mask & ~is_sum, other=0.0).to(tl.float32)
    else:
        a = tl.load(place, mask=mask, other=0.0).to(tl.float32)
        b = tl.load(place + HALF, mask=mask, other=0.0).to(tl.float32)
    tl.store(place, (a * cos - b * sin).to(packed.dtype.element_ty), mask=mask)
    tl.store(place + HALF, (b * cos + a * sin).to(packed.dtype.element_ty), mask=mask)
