"""The loops of the attention kernels: a tile of queries over keys, and a tile of keys over queries.

See `branch` for the names, rows, ids and block sparsity, and `window_kernels` for windows.
"""

from __future__ import annotations

import triton
import triton.language as tl

# mypy: ignore-errors

SHAPES = ("lse_stride", "id_stride")
"""Arguments that differ from one input to the next. Triton would compile a kernel again whenever
one of them becomes 1 or a multiple of 16, or ceases to be. Strides are always multiples of 16."""


@triton.jit
def pointers(base, strides, batch, position, head, TILE_D: tl.constexpr):
    """Pointers to rows of a (batch, tokens, heads, dims) tensor: (rows, TILE_D)."""
    rows = base + batch.to(tl.int64) * strides[0] + head.to(tl.int64) * strides[2]
    return rows + position.to(tl.int64)[:, None] * strides[1] + tl.arange(0, TILE_D)[None, :]


@triton.jit
def load_tile(desc, batch, row, rho, head, TILE: tl.constexpr, TILE_D: tl.constexpr):
    """TILE rows of a descriptor as (TILE, TILE_D).

    For the operand that changes within a loop. The constant one is read by plain loads: Triton 3.6
    would keep it in registers if loaded from a descriptor, and the second tile would read garbage.
    """
    return desc.load([batch, row, rho, head, 0]).reshape(TILE, TILE_D)


@triton.jit
def step_row(i, origin, indices, block_size, BLOCK_SPARSE: tl.constexpr):
    """The first row of step i of a loop: i itself, or as the block index says."""
    if BLOCK_SPARSE:
        i = origin + tl.load(indices + i // block_size) * block_size + i % block_size
    return i


@triton.jit
def scores(
    a, b, row_a, row_b, id_a, id_b, log_count_a, log_count_b, valid_b, span, scale_log2,
    BIASED: tl.constexpr, HAS_IDS: tl.constexpr, EDGE: tl.constexpr, CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
):  # fmt: skip
    """Base-2 scores of the rows `a` (a, dims) with the rows `b`: (a, b); unseen pairs are -inf.

    CAUSAL is 1 if `a` are queries, 2 if `b` are, 0 without causality. WINDOW is 1 if only pairs
    whose rows are at most `span` apart are seen, 2 if only the others are.
    """
    qk = tl.dot(a, tl.trans(b), input_precision="ieee") * scale_log2
    if BIASED:
        qk += tl.minimum(log_count_a[:, None], log_count_b[None, :])
    if EDGE:
        seen = valid_b[None, :]
        if CAUSAL == 1:
            seen = seen & (row_b[None, :] <= row_a[:, None])
        if CAUSAL == 2:
            seen = seen & (row_b[None, :] >= row_a[:, None])
        if WINDOW == 1:
            seen = seen & (tl.abs(row_a[:, None] - row_b[None, :]) <= span)
        if WINDOW == 2:
            seen = seen & (tl.abs(row_a[:, None] - row_b[None, :]) > span)
        qk = tl.where(seen, qk, float("-inf"))
    if HAS_IDS:
        qk = tl.where(id_a[:, None] == id_b[None, :], qk, float("-inf"))
    return qk


@triton.jit
def forward_inner(
    acc, l_i, m_i, q_tile, row, q_id, q_log_count, k_log_count, k, v, k_ids, indices, block_size,
    batch, row0, rho, head, rate, origin, start, stop, end, span, scale_log2,
    BLOCK_SPARSE: tl.constexpr, BIASED: tl.constexpr, HAS_IDS: tl.constexpr, EDGE: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, TILE_N: tl.constexpr, TILE_D: tl.constexpr,
):  # fmt: skip
    """Online softmax over the keys of the steps [start, stop) that are below `end`."""
    for i in tl.range(start, stop, TILE_N):
        n = step_row(i, origin, indices, block_size, BLOCK_SPARSE)
        col = n + tl.arange(0, TILE_N)
        valid = col < end
        k_tile = load_tile(k, batch, row0 + n, rho, head, TILE_N, TILE_D)
        k_id = tl.load(k_ids + col.to(tl.int64) * rate, mask=valid) if HAS_IDS else col
        qk = scores(
            q_tile, k_tile, row, col, q_id, k_id, q_log_count, k_log_count, valid, span,
            scale_log2, BIASED, HAS_IDS, EDGE, CAUSAL, WINDOW,
        )  # fmt: skip
        m_new = tl.maximum(m_i, tl.max(qk, 1))
        # A row may see nothing so far.
        UNSEEN: tl.constexpr = HAS_IDS or WINDOW > 0
        m_safe = tl.where(m_new == float("-inf"), 0.0, m_new) if UNSEEN else m_new
        p = tl.exp2(qk - m_safe[:, None])
        alpha = tl.exp2(m_i - m_safe)
        l_i = l_i * alpha + tl.sum(p, 1)
        v_tile = load_tile(v, batch, row0 + n, rho, head, TILE_N, TILE_D)
        acc = tl.dot(p.to(v_tile.dtype), v_tile, acc * alpha[:, None], input_precision="ieee")
        m_i = m_new
    return acc, l_i, m_i


@triton.jit
def dq_inner(
    acc, q_tile, do_tile, row, q_id, q_log_count, lse_i, delta_i, k_log_count, k, v, k_ids, indices,
    block_size, batch, row0, rho, head, rate, origin, start, stop, end, span, scale_log2,
    BLOCK_SPARSE: tl.constexpr, BIASED: tl.constexpr, HAS_IDS: tl.constexpr, EDGE: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, TILE_N: tl.constexpr, TILE_D: tl.constexpr,
):  # fmt: skip
    """dQ = dS K over the keys of the steps [start, stop) that are below `end`."""
    for i in tl.range(start, stop, TILE_N):
        n = step_row(i, origin, indices, block_size, BLOCK_SPARSE)
        col = n + tl.arange(0, TILE_N)
        valid = col < end
        k_tile = load_tile(k, batch, row0 + n, rho, head, TILE_N, TILE_D)
        v_tile = load_tile(v, batch, row0 + n, rho, head, TILE_N, TILE_D)
        k_id = tl.load(k_ids + col.to(tl.int64) * rate, mask=valid) if HAS_IDS else col
        qk = scores(
            q_tile, k_tile, row, col, q_id, k_id, q_log_count, k_log_count, valid, span,
            scale_log2, BIASED, HAS_IDS, EDGE, CAUSAL, WINDOW,
        )  # fmt: skip
        p = tl.exp2(qk - lse_i[:, None])
        dp = tl.dot(do_tile, tl.trans(v_tile), input_precision="ieee")
        ds = p * (dp - delta_i[:, None])
        acc = tl.dot(ds.to(k_tile.dtype), k_tile, acc, input_precision="ieee")
    return acc


@triton.jit
def dkdv_inner(
    dk_acc, dv_acc, k_tile, v_tile, col, k_id, k_log_count, q_log_count, q, do, lse, delta, q_ids,
    indices, block_size, batch, row0, rho, head, rate, origin, start, stop, end, span, scale_log2,
    BLOCK_SPARSE: tl.constexpr, BIASED: tl.constexpr, HAS_IDS: tl.constexpr, EDGE: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, TILE_M: tl.constexpr, TILE_D: tl.constexpr,
):  # fmt: skip
    """dV = Pᵀ dO and dK = dSᵀ Q over the queries of the steps [start, stop) below `end`."""
    for i in tl.range(start, stop, TILE_M):
        m = step_row(i, origin, indices, block_size, BLOCK_SPARSE)
        row = m + tl.arange(0, TILE_M)
        valid = row < end
        position = row * rate
        q_tile = load_tile(q, batch, row0 + m, rho, head, TILE_M, TILE_D)
        do_tile = load_tile(do, batch, row0 + m, rho, head, TILE_M, TILE_D)
        if EDGE:
            lse_i = tl.load(lse + position, mask=valid, other=float("inf"))
            delta_i = tl.load(delta + position, mask=valid, other=0.0)
        else:
            lse_i = tl.load(lse + position)
            delta_i = tl.load(delta + position)
        q_id = tl.load(q_ids + position, mask=valid) if HAS_IDS else row
        qk = scores(
            k_tile, q_tile, col, row, k_id, q_id, k_log_count, q_log_count, valid, span,
            scale_log2, BIASED, HAS_IDS, EDGE, CAUSAL, WINDOW,
        )  # fmt: skip
        p = tl.exp2(qk - lse_i[None, :])
        dv_acc = tl.dot(p.to(do_tile.dtype), do_tile, dv_acc, input_precision="ieee")
        dp = tl.dot(v_tile, tl.trans(do_tile), input_precision="ieee")
        ds = p * (dp - delta_i[None, :])
        dk_acc = tl.dot(ds.to(q_tile.dtype), q_tile, dk_acc, input_precision="ieee")
    return dk_acc, dv_acc
