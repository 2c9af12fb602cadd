"""Triton kernels of a sliding window with sinks and dilation; they share the loops of `branch`.

Rows. With dilation d the positions p = ρ + d·t of a document are the rows t of its residue ρ: a
window is `window` consecutive rows of the query's own residue. A program takes a tile of one
residue of one document from the table `work`; `span` = window − 1.

Sinks. The first `sinks` positions of a document are rows of all residues. A tile of queries visits
the sinks of each residue that are outside of its windows, after the window. A tile of sinks is seen
by all later queries: `backward_sinks` splits these into chunks, whose sums `backward_dkdv` adds, so
that there are no atomics.

Queries and keys may be different rows of memory. `query`, `key` and `sink` are where position 0 of
a document would be in the queries, in the keys, and in the keys for its sinks.
"""

from __future__ import annotations

import triton
import triton.language as tl

from longspan.attention.kernels.loops import (
    SHAPES,
    dkdv_inner,
    dq_inner,
    forward_inner,
    pointers,
)

# mypy: ignore-errors


@triton.jit
def _item(work, COLUMNS: tl.constexpr):
    """The numbers of a program's tile."""
    item = work + COLUMNS * tl.program_id(0)
    return (
        tl.load(item), tl.load(item + 1), tl.load(item + 2), tl.load(item + 3), tl.load(item + 4),
        tl.load(item + 5), tl.load(item + 6), tl.load(item + 7), tl.load(item + 8),
    )  # fmt: skip


@triton.jit
def _key_range(
    first, end, first_key, span, CAUSAL: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr
):
    """Keys of a tile of queries: [left, begin) and [middle, stop) with masks, the rest without."""
    left = tl.maximum(first_key, first - span)
    inner = tl.maximum(first_key, first + TILE_M - 1 - span)
    begin = left + tl.cdiv(inner - left, TILE_N) * TILE_N
    after = 0 if CAUSAL else span
    middle = begin + tl.maximum(tl.minimum(first + after + 1, end) - begin, 0) // TILE_N * TILE_N
    return left, begin, middle, tl.minimum(first + TILE_M + after, end)


@triton.jit
def _sinks_of(
    sigma, rho, first, stop, sinks, rate, span, CAUSAL: tl.constexpr, TILE_M: tl.constexpr
):
    """The sinks of residue `sigma` for queries of `rho`: how many rows, the rows by which they are
    later than those of the queries, and the span of windows that have them already.
    """  # fmt: skip
    rows = tl.cdiv(tl.minimum(sinks, stop) - sigma, rate)
    late = tl.where(sigma > rho, 1, 0)
    if CAUSAL:  # the last query of the tile sees these
        rows = tl.minimum(rows, first + TILE_M - tl.where(sigma == rho, 1 + span, late))
    return rows, late, tl.where(sigma == rho, span, -1)


@triton.jit(do_not_specialize=SHAPES)
def forward(
    q, k, v, out, lse, k_ids, work, q_strides, out_strides, lse_stride, id_stride,
    heads, group, rate, span, sinks, scale_log2,
    CAUSAL: tl.constexpr, HAS_SINKS: tl.constexpr, HAS_IDS: tl.constexpr, HEAD_DIM: tl.constexpr,
    TILE_D: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr,
):  # fmt: skip
    """The output and log-sum-exp of one tile of queries."""
    batch, head = tl.program_id(1) // heads, tl.program_id(1) % heads
    first, rho, end, first_key, query, key_row, key_rho, sink, stop = _item(work, 9)
    row = first + tl.arange(0, TILE_M)
    valid = row < end
    position = query + rho + row * rate
    in_bounds = valid[:, None] & (tl.arange(0, TILE_D) < HEAD_DIM)[None, :]
    q_tile = tl.load(pointers(q, q_strides, batch, position, head, TILE_D), in_bounds, other=0.0)
    q_id = tl.zeros([TILE_M], tl.int64)  # keys of another id are padding
    k_ids += batch.to(tl.int64) * id_stride
    near_ids = k_ids + key_row * rate + key_rho
    m_i = tl.full([TILE_M], float("-inf"), tl.float32)
    l_i = tl.zeros([TILE_M], tl.float32)
    acc = tl.zeros([TILE_M, TILE_D], tl.float32)
    MASK: tl.constexpr = 1 if CAUSAL else 0

    left, begin, middle, last = _key_range(first, end, first_key, span, CAUSAL, TILE_M, TILE_N)
    acc, l_i, m_i = forward_inner(
        acc, l_i, m_i, q_tile, row, q_id, 0, 0, k, v, near_ids, work, 1, batch, key_row, key_rho,
        head // group, rate, 0, left, begin, last, span, scale_log2, False, False, HAS_IDS, True,
        MASK, 1, TILE_N, TILE_D,
    )  # fmt: skip
    acc, l_i, m_i = forward_inner(
        acc, l_i, m_i, q_tile, row, q_id, 0, 0, k, v, near_ids, work, 1, batch, key_row, key_rho,
        head // group, rate, 0, begin, middle, last, span, scale_log2, False, False, HAS_IDS, False,
        0, 0, TILE_N, TILE_D,
    )  # fmt: skip
    acc, l_i, m_i = forward_inner(
        acc, l_i, m_i, q_tile, row, q_id, 0, 0, k, v, near_ids, work, 1, batch, key_row, key_rho,
        head // group, rate, 0, middle, last, last, span, scale_log2, False, False, HAS_IDS, True,
        MASK, 1, TILE_N, TILE_D,
    )  # fmt: skip
    if HAS_SINKS:
        for sigma in tl.range(0, tl.minimum(rate, sinks)):
            rows, late, skipped = _sinks_of(
                sigma, rho, first, stop, sinks, rate, span, CAUSAL, TILE_M
            )
            acc, l_i, m_i = forward_inner(
                acc, l_i, m_i, q_tile, row - late, q_id, 0, 0, k, v, k_ids + sink + sigma, work, 1,
                batch, (sink + sigma) // rate, (sink + sigma) % rate, head // group, rate, 0, 0,
                rows, rows, skipped, scale_log2, False, False, HAS_IDS, True, MASK, 2, TILE_N,
                TILE_D,
            )  # fmt: skip

    acc = acc / tl.where(l_i > 0, l_i, 1.0)[:, None]
    lse_rows = lse + tl.program_id(1).to(tl.int64) * lse_stride + position
    tl.store(lse_rows, m_i + tl.log2(l_i), mask=valid)
    out_rows = pointers(out, out_strides, batch, position, head, TILE_D)
    tl.store(out_rows, acc.to(out.dtype.element_ty), mask=in_bounds)


@triton.jit(do_not_specialize=SHAPES)
def backward_dq(
    q, k, v, do, lse, delta, dq, k_ids, work, q_strides, do_strides, dq_strides, delta_stride,
    id_stride, heads, group, rate, span, sinks, scale_log2, softmax_scale,
    CAUSAL: tl.constexpr, HAS_SINKS: tl.constexpr, HAS_IDS: tl.constexpr, HEAD_DIM: tl.constexpr,
    TILE_D: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr,
):  # fmt: skip
    """dQ of one tile of queries. `lse` is `safe_lse` of `rows.backward_preprocess`."""
    batch, head = tl.program_id(1) // heads, tl.program_id(1) % heads
    first, rho, end, first_key, query, key_row, key_rho, sink, stop = _item(work, 9)
    row = first + tl.arange(0, TILE_M)
    valid = row < end
    position = query + rho + row * rate
    in_bounds = valid[:, None] & (tl.arange(0, TILE_D) < HEAD_DIM)[None, :]
    q_tile = tl.load(pointers(q, q_strides, batch, position, head, TILE_D), in_bounds, other=0.0)
    do_rows = pointers(do, do_strides, batch, position, head, TILE_D)
    do_tile = tl.load(do_rows, mask=in_bounds, other=0.0)
    lse_offset = tl.program_id(1).to(tl.int64) * delta_stride + position
    lse_i = tl.load(lse + lse_offset, mask=valid, other=float("inf"))
    delta_i = tl.load(delta + lse_offset, mask=valid, other=0.0)
    q_id = tl.zeros([TILE_M], tl.int64)
    k_ids += batch.to(tl.int64) * id_stride
    near_ids = k_ids + key_row * rate + key_rho
    acc = tl.zeros([TILE_M, TILE_D], tl.float32)
    MASK: tl.constexpr = 1 if CAUSAL else 0

    left, begin, middle, last = _key_range(first, end, first_key, span, CAUSAL, TILE_M, TILE_N)
    acc = dq_inner(
        acc, q_tile, do_tile, row, q_id, 0, lse_i, delta_i, 0, k, v, near_ids, work, 1, batch,
        key_row, key_rho, head // group, rate, 0, left, begin, last, span, scale_log2, False, False,
        HAS_IDS, True, MASK, 1, TILE_N, TILE_D,
    )  # fmt: skip
    acc = dq_inner(
        acc, q_tile, do_tile, row, q_id, 0, lse_i, delta_i, 0, k, v, near_ids, work, 1, batch,
        key_row, key_rho, head // group, rate, 0, begin, middle, last, span, scale_log2, False,
        False, HAS_IDS, False, 0, 0, TILE_N, TILE_D,
    )  # fmt: skip
    acc = dq_inner(
        acc, q_tile, do_tile, row, q_id, 0, lse_i, delta_i, 0, k, v, near_ids, work, 1, batch,
        key_row, key_rho, head // group, rate, 0, middle, last, last, span, scale_log2, False,
        False, HAS_IDS, True, MASK, 1, TILE_N, TILE_D,
    )  # fmt: skip
    if HAS_SINKS:
        for sigma in tl.range(0, tl.minimum(rate, sinks)):
            rows, late, skipped = _sinks_of(
                sigma, rho, first, stop, sinks, rate, span, CAUSAL, TILE_M
            )
            acc = dq_inner(
                acc, q_tile, do_tile, row - late, q_id, 0, lse_i, delta_i, 0, k, v,
                k_ids + sink + sigma, work, 1, batch, (sink + sigma) // rate, (sink + sigma) % rate,
                head // group, rate, 0, 0, rows, rows, skipped, scale_log2, False, False, HAS_IDS,
                True, MASK, 2, TILE_N, TILE_D,
            )  # fmt: skip
    dq_rows = pointers(dq, dq_strides, batch, position, head, TILE_D)
    tl.store(dq_rows, (acc * softmax_scale).to(dq.dtype.element_ty), mask=in_bounds)


@triton.jit
def _load_keys(
    k, v, k_ids, k_strides, v_strides, id_stride, batch, head, position, valid,
    HAS_IDS: tl.constexpr, HEAD_DIM: tl.constexpr, TILE_D: tl.constexpr,
):  # fmt: skip
    """Keys, values and ids of a tile."""
    in_bounds = valid[:, None] & (tl.arange(0, TILE_D) < HEAD_DIM)[None, :]
    k_tile = tl.load(pointers(k, k_strides, batch, position, head, TILE_D), in_bounds, other=0.0)
    v_tile = tl.load(pointers(v, v_strides, batch, position, head, TILE_D), in_bounds, other=0.0)
    ids = k_ids + batch.to(tl.int64) * id_stride + position
    k_id = tl.load(ids, mask=valid) if HAS_IDS else position
    return k_tile, v_tile, k_id


@triton.jit
def _slot(slot, TILE_N: tl.constexpr, TILE_D: tl.constexpr):
    """Offsets of the sums of one chunk for one head: (TILE_N, TILE_D)."""
    index = tl.program_id(1).to(tl.int64) + slot * tl.num_programs(1)
    rows = index * TILE_N + tl.arange(0, TILE_N)
    return rows[:, None] * TILE_D + tl.arange(0, TILE_D)[None, :]


@triton.jit(do_not_specialize=SHAPES)
def backward_sinks(
    q, k, v, do, lse, delta, partial_k, partial_v, k_ids, work, k_strides, v_strides, delta_stride,
    id_stride, heads, group, rate, span, scale_log2,
    CAUSAL: tl.constexpr, HAS_IDS: tl.constexpr, HEAD_DIM: tl.constexpr, TILE_D: tl.constexpr,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr,
):  # fmt: skip
    """dK and dV of one tile of sinks from one chunk of the queries of one residue."""
    batch, head = tl.program_id(1) // heads, tl.program_id(1) % heads
    first, sigma, end, rho, begin, stop, query_row, query_rho, sink = _item(work, 9)
    col = first + tl.arange(0, TILE_N)
    valid = col < end
    k_tile, v_tile, k_id = _load_keys(
        k, v, k_ids, k_strides, v_strides, id_stride, batch, head // group,
        sink + sigma + col * rate, valid, HAS_IDS, HEAD_DIM, TILE_D,
    )  # fmt: skip
    lse_offset = tl.program_id(1).to(tl.int64) * delta_stride + query_row * rate + query_rho
    dk_acc = tl.zeros([TILE_N, TILE_D], tl.float32)
    dv_acc = tl.zeros([TILE_N, TILE_D], tl.float32)
    late = tl.where(sigma > rho, 1, 0)
    dk_acc, dv_acc = dkdv_inner(
        dk_acc, dv_acc, k_tile, v_tile, col + late, k_id, 0, 0, q, do, lse + lse_offset,
        delta + lse_offset, k_ids, work, 1, batch, query_row, query_rho, head, rate, 0, begin,
        stop, stop, tl.where(sigma == rho, span, -1), scale_log2, False, False, False, True,
        2 if CAUSAL else 0, 2, TILE_M, TILE_D,
    )  # fmt: skip
    seen = valid & (k_id == 0) if HAS_IDS else valid
    offset = _slot(tl.program_id(0), TILE_N, TILE_D)
    tl.store(partial_k + offset, tl.where(seen[:, None], dk_acc, 0.0))
    tl.store(partial_v + offset, tl.where(seen[:, None], dv_acc, 0.0))


@triton.jit(do_not_specialize=SHAPES)
def backward_dkdv(
    q, k, v, do, lse, delta, dk, dv, partial_k, partial_v, k_ids, work, k_strides, v_strides,
    dk_strides, delta_stride, id_stride, heads, group, rate, span, scale_log2, softmax_scale,
    CAUSAL: tl.constexpr, HAS_IDS: tl.constexpr, HEAD_DIM: tl.constexpr, TILE_D: tl.constexpr,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr,
):  # fmt: skip
    """dK and dV of one tile of keys from the windows they are in, and from `backward_sinks`."""
    batch, head = tl.program_id(1) // heads, tl.program_id(1) % heads
    first, end, key, first_query, end_query, query_row, query_rho, slot, slots = _item(work, 9)
    col = first + tl.arange(0, TILE_N)
    valid = col < end
    position = key + col * rate
    k_tile, v_tile, k_id = _load_keys(
        k, v, k_ids, k_strides, v_strides, id_stride, batch, head // group, position, valid,
        HAS_IDS, HEAD_DIM, TILE_D,
    )  # fmt: skip
    lse += tl.program_id(1).to(tl.int64) * delta_stride + query_row * rate + query_rho
    delta += tl.program_id(1).to(tl.int64) * delta_stride + query_row * rate + query_rho
    dk_acc = tl.zeros([TILE_N, TILE_D], tl.float32)
    dv_acc = tl.zeros([TILE_N, TILE_D], tl.float32)
    for i in tl.range(slot, slots):
        dk_acc += tl.load(partial_k + _slot(i, TILE_N, TILE_D))
        dv_acc += tl.load(partial_v + _slot(i, TILE_N, TILE_D))

    before = 0 if CAUSAL else span
    begin = tl.maximum(first_query, first - before)
    stop = tl.maximum(tl.minimum(first + TILE_N + span, end_query), begin)
    inner = tl.maximum(first + TILE_N - 1 - before, begin)
    middle = tl.minimum(begin + tl.cdiv(inner - begin, TILE_M) * TILE_M, stop)
    last = tl.maximum(tl.minimum(first + span + 1, end_query) - middle, 0) // TILE_M * TILE_M
    last += middle
    MASK: tl.constexpr = 2 if CAUSAL else 0
    dk_acc, dv_acc = dkdv_inner(
        dk_acc, dv_acc, k_tile, v_tile, col, k_id, 0, 0, q, do, lse, delta, k_ids, work, 1, batch,
        query_row, query_rho, head, rate, 0, begin, middle, stop, span, scale_log2, False, False,
        False, True, MASK, 1, TILE_M, TILE_D,
    )  # fmt: skip
    dk_acc, dv_acc = dkdv_inner(
        dk_acc, dv_acc, k_tile, v_tile, col, k_id, 0, 0, q, do, lse, delta, k_ids, work, 1, batch,
        query_row, query_rho, head, rate, 0, middle, last, stop, span, scale_log2, False, False,
        False, False, 0, 0, TILE_M, TILE_D,
    )  # fmt: skip
    dk_acc, dv_acc = dkdv_inner(
        dk_acc, dv_acc, k_tile, v_tile, col, k_id, 0, 0, q, do, lse, delta, k_ids, work, 1, batch,
        query_row, query_rho, head, rate, 0, last, stop, stop, span, scale_log2, False, False,
        False, True, MASK, 1, TILE_M, TILE_D,
    )  # fmt: skip
    in_bounds = valid[:, None] & (tl.arange(0, TILE_D) < HEAD_DIM)[None, :]
    if HAS_IDS:  # padding has no gradient
        dk_acc = tl.where((k_id == 0)[:, None], dk_acc, 0.0)
        dv_acc = tl.where((k_id == 0)[:, None], dv_acc, 0.0)
    dk_rows = pointers(dk, dk_strides, batch, position, head, TILE_D)
    tl.store(dk_rows, (dk_acc * softmax_scale).to(dk.dtype.element_ty), mask=in_bounds)
    dv_rows = pointers(dv, dk_strides, batch, position, head, TILE_D)
    tl.store(dv_rows, dv_acc.to(dv.dtype.element_ty), mask=in_bounds)
