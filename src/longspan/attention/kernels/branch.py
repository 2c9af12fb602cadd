"""Triton kernels of one branch, reading and writing (batch, tokens, heads, head_dim) in place.

Names follow the FlashAttention papers: m_i and l_i are the running maximum and sum of a softmax
row, lse = m_i + log2 l_i, P = exp2(S − lse), δ = rowsum(dO ∘ O), dS = P ∘ (dO Vᵀ − δ).

Rows. Head h of branch (w, r) keeps the positions p = ρ + r·t with ρ = h mod r. Here `t` is the row:
a segment is w/r consecutive rows, and a tile of rows is a strided read, done by the copy engine
through a descriptor of (batch, rows, rate, heads, dims).

Each pair once. In a nested pattern, a pair of positions that shares a segment of the next inner
branch has been visited there. With SKIP_INNER a branch visits only pairs of *different* inner
segments (of `inner` rows each). How often a pair counts enters as a bias: with c(p) the number of
rates r_j, from this branch outwards, whose residue h mod r_j position p keeps, the pair (p, k)
counts min(c(p), c(k)) times, since an outer branch keeps only positions that the inner ones keep.

Merged in place. Branches run from the sparsest to the densest. Each loads the running result of its
rows (float32, normalised, with a base-2 log-sum-exp), adds its pairs and stores it again; the
densest, LAST, writes the output. Gradients are accumulated in the same way. There are no atomics:
the same input gives the same bits.

Documents. With HAS_DOCUMENTS each program takes one tile of one document, from the table `work`:
rows, segments and residues are counted from the document's first token, `base`. Its row t is row
(base + ρ) // r + t of a descriptor, at residue (base + ρ) mod r. No pair of two documents is
visited.

Ids. With HAS_IDS a query sees a key only if their 64-bit ids are equal: padding.

Block sparsity. With BLOCK_SPARSE the rows of a segment form blocks of `block_size` rows, and only
the pairs of blocks in a CSR matrix (`offsets`, `indices`) are visited. Under causality the matrix
leaves out the diagonal blocks, which are visited with a mask.
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
def _tile_bounds(
    pid, head, tokens, rate, segment, inner, SKIP_INNER: tl.constexpr, TILE: tl.constexpr
):
    """A program's tile: its first row, its run [start, end), and its segment [outer, outer_end).

    A run is a segment or, with SKIP_INNER, an inner segment, whose own pairs are not visited.
    """
    rows = tl.cdiv(tokens - head % rate, rate)
    length = inner if SKIP_INNER else segment
    tiles = tl.cdiv(length, TILE)
    start = pid // tiles * length
    outer = start // segment * segment
    first = start + pid % tiles * TILE
    return first, start, tl.minimum(start + length, rows), outer, tl.minimum(outer + segment, rows)


@triton.jit
def _work_item(work, tokens, HAS_DOCUMENTS: tl.constexpr, REVERSED: tl.constexpr):
    """A program's tile number, its document's first token, length and first partial row."""
    if HAS_DOCUMENTS:
        item = work + 4 * tl.program_id(0)
        return tl.load(item), tl.load(item + 1), tl.load(item + 2), tl.load(item + 3)
    pid = tl.num_programs(0) - 1 - tl.program_id(0) if REVERSED else tl.program_id(0)
    return pid, 0, tokens, 0


@triton.jit
def _log_counts(row, shift, RATIOS: tl.constexpr):
    """log2 of the number of branches, from this one outwards, that keep each row."""
    count = tl.full(row.shape, 1.0, tl.float32)
    for j in tl.static_range(len(RATIOS)):
        count += tl.where((row + shift) % RATIOS[j] == 0, 1.0, 0.0)
    return tl.log2(count)


@triton.jit
def _key_range(
    first, start, end, outer, offsets, block_size,
    SKIP_INNER: tl.constexpr, CAUSAL: tl.constexpr, BLOCK_SPARSE: tl.constexpr,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr,
):  # fmt: skip
    """The keys of a tile of queries: steps [begin, middle), then rows [edge, stop) with masks.

    And the first entry of its block index.
    """
    if SKIP_INNER:
        stop = start
    elif CAUSAL:
        stop = tl.minimum(first + TILE_M, end)
    else:
        stop = end
    if BLOCK_SPARSE:
        block_row = (first - outer) // block_size
        first_index = tl.load(offsets + block_row)
        count = (tl.load(offsets + block_row + 1) - first_index).to(tl.int32)
        begin, middle = 0, count * block_size
        edge = outer + block_row * block_size if CAUSAL else stop
    else:
        whole = first if CAUSAL and not SKIP_INNER else stop
        begin, middle = outer, outer + (whole - outer) // TILE_N * TILE_N
        edge, first_index = middle, 0
    return begin, middle, edge, stop, first_index


@triton.jit(do_not_specialize=SHAPES)
def forward(
    q, k, v, out, partial, lse, q_ids, k_ids, offsets, indices, work,
    q_strides, out_strides, partial_strides, lse_stride, id_stride,
    tokens, heads, first_head, group, rate, segment, inner, partial_rate, block_size, scale_log2,
    RATIOS: tl.constexpr, SKIP_INNER: tl.constexpr, CAUSAL: tl.constexpr, FIRST: tl.constexpr,
    LAST: tl.constexpr, EVEN: tl.constexpr, BLOCK_SPARSE: tl.constexpr, HAS_IDS: tl.constexpr,
    HAS_DOCUMENTS: tl.constexpr, HEAD_DIM: tl.constexpr, TILE_D: tl.constexpr,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr,
):  # fmt: skip
    """One tile of queries of one branch, merged into `partial` or, if LAST, into `out`."""
    batch, head = tl.program_id(1) // heads, tl.program_id(1) % heads
    # The longest rows first.
    pid, base, tokens, partial_base = _work_item(work, tokens, HAS_DOCUMENTS, True)
    first, start, end, outer, outer_end = _tile_bounds(
        pid, first_head + head, tokens, rate, segment, inner, SKIP_INNER, TILE_M
    )
    if first >= end or (SKIP_INNER and CAUSAL and start == outer):
        return
    rho = (first_head + head) % rate
    shift = (rho - first_head - head) // rate
    row0 = (base + rho) // rate if HAS_DOCUMENTS else 0
    rho_0 = (base + rho) % rate if HAS_DOCUMENTS else rho
    row = first + tl.arange(0, TILE_M)
    valid = row < end
    position = base + rho + row * rate
    partial_row = partial_base + (rho + row * rate) // partial_rate
    in_bounds = valid[:, None] & (tl.arange(0, TILE_D) < HEAD_DIM)[None, :]
    lse_rows = lse + tl.program_id(1).to(tl.int64) * lse_stride + position
    partial_rows = pointers(partial, partial_strides, batch, partial_row, head, TILE_D)
    ids = batch.to(tl.int64) * id_stride + base + rho

    q_rows = pointers(q, q_strides, batch, position, head, TILE_D)
    q_tile = tl.load(q_rows, mask=in_bounds, other=0.0)
    q_id = tl.load(q_ids + ids + row * rate, mask=valid) if HAS_IDS else row
    if FIRST:
        m_i = tl.full([TILE_M], float("-inf"), tl.float32)
        l_i = tl.zeros([TILE_M], tl.float32)
        acc = tl.zeros([TILE_M, TILE_D], tl.float32)
    else:
        m_i = tl.load(lse_rows, mask=valid, other=float("-inf"))
        has_partial = m_i > float("-inf")
        l_i = tl.where(has_partial, 1.0, 0.0)
        acc = tl.load(partial_rows, mask=in_bounds & has_partial[:, None], other=0.0)
    BIASED: tl.constexpr = len(RATIOS) > 0
    q_log_count = _log_counts(row, shift, RATIOS)
    # Tiles begin at multiples of the ratios.
    k_log_count = _log_counts(tl.arange(0, TILE_N), shift, RATIOS)

    DIAGONAL: tl.constexpr = CAUSAL and not SKIP_INNER
    begin, middle, edge, stop, first_index = _key_range(
        first, start, end, outer, offsets, block_size, SKIP_INNER, CAUSAL, BLOCK_SPARSE, TILE_M,
        TILE_N,
    )  # fmt: skip
    acc, l_i, m_i = forward_inner(
        acc, l_i, m_i, q_tile, row, q_id, q_log_count, k_log_count, k, v, k_ids + ids,
        indices + first_index, block_size, batch, row0, rho_0, head // group, rate, outer, begin,
        middle, outer_end, 0, scale_log2, BLOCK_SPARSE, BIASED, HAS_IDS,
        BLOCK_SPARSE and not CAUSAL, 0, 0, TILE_N, TILE_D,
    )  # fmt: skip
    if DIAGONAL or not EVEN:
        acc, l_i, m_i = forward_inner(
            acc, l_i, m_i, q_tile, row, q_id, q_log_count, k_log_count, k, v, k_ids + ids,
            indices, block_size, batch, row0, rho_0, head // group, rate, outer, edge, stop, stop,
            0, scale_log2, False, BIASED, HAS_IDS, True, 1 if DIAGONAL else 0, 0, TILE_N, TILE_D,
        )  # fmt: skip
    if SKIP_INNER and not CAUSAL:
        acc, l_i, m_i = forward_inner(
            acc, l_i, m_i, q_tile, row, q_id, q_log_count, k_log_count, k, v, k_ids + ids,
            indices, block_size, batch, row0, rho_0, head // group, rate, outer, start + inner,
            outer_end, outer_end, 0, scale_log2, False, BIASED, HAS_IDS, True, 0, 0, TILE_N,
            TILE_D,
        )  # fmt: skip

    acc = acc / tl.where(l_i > 0, l_i, 1.0)[:, None]
    tl.store(lse_rows, m_i + tl.log2(l_i), mask=valid)
    if LAST:
        out_rows = pointers(out, out_strides, batch, position, head, TILE_D)
        tl.store(out_rows, acc.to(out.dtype.element_ty), mask=in_bounds)
    else:
        tl.store(partial_rows, acc, mask=in_bounds)


@triton.jit
def _accumulate(
    acc, grad, partial, grad_strides, partial_strides, batch, position, partial_row, head, row,
    shift, in_bounds, FIRST: tl.constexpr, LAST: tl.constexpr, PARTIAL_RATIO: tl.constexpr,
    TILE_D: tl.constexpr,
):  # fmt: skip
    """Add the sparser branches' partial to a tile's gradient and store it.

    In a nested pattern they have written only the rows they keep, else all rows.
    """
    partial_rows = pointers(partial, partial_strides, batch, partial_row, head, TILE_D)
    if not FIRST:
        has_partial = in_bounds & ((row + shift) % PARTIAL_RATIO == 0)[:, None]
        acc += tl.load(partial_rows, mask=has_partial, other=0.0)
    if LAST:
        rows = pointers(grad, grad_strides, batch, position, head, TILE_D)
        tl.store(rows, acc.to(grad.dtype.element_ty), mask=in_bounds)
    else:
        tl.store(partial_rows, acc, mask=in_bounds)


@triton.jit(do_not_specialize=SHAPES)
def backward_dq(
    q, k, v, do, lse, delta, dq, partial, q_ids, k_ids, offsets, indices, work,
    q_strides, do_strides, dq_strides, partial_strides, delta_stride, id_stride,
    tokens, heads, first_head, group, rate, segment, inner, partial_rate, block_size, scale_log2,
    softmax_scale,
    RATIOS: tl.constexpr, SKIP_INNER: tl.constexpr, CAUSAL: tl.constexpr, FIRST: tl.constexpr,
    LAST: tl.constexpr, EVEN: tl.constexpr, BLOCK_SPARSE: tl.constexpr, HAS_IDS: tl.constexpr,
    HAS_DOCUMENTS: tl.constexpr, HEAD_DIM: tl.constexpr, TILE_D: tl.constexpr,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, PARTIAL_RATIO: tl.constexpr,
):  # fmt: skip
    """dQ of one tile of queries. `lse` is `safe_lse` of `rows.backward_preprocess`."""
    batch, head = tl.program_id(1) // heads, tl.program_id(1) % heads
    pid, base, tokens, partial_base = _work_item(work, tokens, HAS_DOCUMENTS, True)
    first, start, end, outer, outer_end = _tile_bounds(
        pid, first_head + head, tokens, rate, segment, inner, SKIP_INNER, TILE_M
    )
    if first >= end:
        return
    rho = (first_head + head) % rate
    shift = (rho - first_head - head) // rate
    row0 = (base + rho) // rate if HAS_DOCUMENTS else 0
    rho_0 = (base + rho) % rate if HAS_DOCUMENTS else rho
    row = first + tl.arange(0, TILE_M)
    valid = row < end
    position = base + rho + row * rate
    partial_row = partial_base + (rho + row * rate) // partial_rate
    in_bounds = valid[:, None] & (tl.arange(0, TILE_D) < HEAD_DIM)[None, :]
    lse_offset = tl.program_id(1).to(tl.int64) * delta_stride + position
    ids = batch.to(tl.int64) * id_stride + base + rho

    q_rows = pointers(q, q_strides, batch, position, head, TILE_D)
    q_tile = tl.load(q_rows, mask=in_bounds, other=0.0)
    do_rows = pointers(do, do_strides, batch, position, head, TILE_D)
    do_tile = tl.load(do_rows, mask=in_bounds, other=0.0)
    lse_i = tl.load(lse + lse_offset, mask=valid, other=float("inf"))
    delta_i = tl.load(delta + lse_offset, mask=valid, other=0.0)
    q_id = tl.load(q_ids + ids + row * rate, mask=valid) if HAS_IDS else row
    BIASED: tl.constexpr = len(RATIOS) > 0
    q_log_count = _log_counts(row, shift, RATIOS)
    k_log_count = _log_counts(tl.arange(0, TILE_N), shift, RATIOS)
    acc = tl.zeros([TILE_M, TILE_D], tl.float32)

    DIAGONAL: tl.constexpr = CAUSAL and not SKIP_INNER
    begin, middle, edge, stop, first_index = _key_range(
        first, start, end, outer, offsets, block_size, SKIP_INNER, CAUSAL, BLOCK_SPARSE, TILE_M,
        TILE_N,
    )  # fmt: skip
    acc = dq_inner(
        acc, q_tile, do_tile, row, q_id, q_log_count, lse_i, delta_i, k_log_count, k, v,
        k_ids + ids, indices + first_index, block_size, batch, row0, rho_0, head // group, rate,
        outer, begin, middle, outer_end, 0, scale_log2, BLOCK_SPARSE, BIASED, HAS_IDS,
        BLOCK_SPARSE and not CAUSAL, 0, 0, TILE_N, TILE_D,
    )  # fmt: skip
    if DIAGONAL or not EVEN:
        acc = dq_inner(
            acc, q_tile, do_tile, row, q_id, q_log_count, lse_i, delta_i, k_log_count, k, v,
            k_ids + ids, indices, block_size, batch, row0, rho_0, head // group, rate, outer, edge,
            stop, stop, 0, scale_log2, False, BIASED, HAS_IDS, True, 1 if DIAGONAL else 0, 0,
            TILE_N, TILE_D,
        )  # fmt: skip
    if SKIP_INNER and not CAUSAL:
        acc = dq_inner(
            acc, q_tile, do_tile, row, q_id, q_log_count, lse_i, delta_i, k_log_count, k, v,
            k_ids + ids, indices, block_size, batch, row0, rho_0, head // group, rate, outer,
            start + inner, outer_end, outer_end, 0, scale_log2, False, BIASED, HAS_IDS, True, 0,
            0, TILE_N, TILE_D,
        )  # fmt: skip
    _accumulate(
        acc * softmax_scale, dq, partial, dq_strides, partial_strides, batch, position,
        partial_row, head, row, shift, in_bounds, FIRST, LAST, PARTIAL_RATIO, TILE_D,
    )  # fmt: skip


@triton.jit(do_not_specialize=SHAPES)
def backward_dkdv(
    q, k, v, do, lse, delta, dk, dv, partial_k, partial_v, q_ids, k_ids, offsets,
    indices, work, k_strides, v_strides, dk_strides, partial_strides, delta_stride, id_stride,
    tokens, heads, first_head, group, rate, segment, inner, partial_rate, block_size, scale_log2,
    softmax_scale,
    RATIOS: tl.constexpr, SKIP_INNER: tl.constexpr, CAUSAL: tl.constexpr, FIRST: tl.constexpr,
    LAST: tl.constexpr, EVEN: tl.constexpr, BLOCK_SPARSE: tl.constexpr, HAS_IDS: tl.constexpr,
    HAS_DOCUMENTS: tl.constexpr, HEAD_DIM: tl.constexpr, TILE_D: tl.constexpr,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, PARTIAL_RATIO: tl.constexpr,
):  # fmt: skip
    """dK and dV of one tile of keys of one branch, per query head. `lse` as in `backward_dq`."""
    batch, head = tl.program_id(1) // heads, tl.program_id(1) % heads
    pid, base, tokens, partial_base = _work_item(work, tokens, HAS_DOCUMENTS, False)
    first, start, end, outer, outer_end = _tile_bounds(
        pid, first_head + head, tokens, rate, segment, inner, SKIP_INNER, TILE_N
    )
    if first >= end:
        return
    rho = (first_head + head) % rate
    shift = (rho - first_head - head) // rate
    row0 = (base + rho) // rate if HAS_DOCUMENTS else 0
    rho_0 = (base + rho) % rate if HAS_DOCUMENTS else rho
    col = first + tl.arange(0, TILE_N)
    valid = col < end
    position = base + rho + col * rate
    partial_row = partial_base + (rho + col * rate) // partial_rate
    in_bounds = valid[:, None] & (tl.arange(0, TILE_D) < HEAD_DIM)[None, :]
    lse_offset = tl.program_id(1).to(tl.int64) * delta_stride + base + rho
    ids = batch.to(tl.int64) * id_stride + base + rho

    k_rows = pointers(k, k_strides, batch, position, head // group, TILE_D)
    k_tile = tl.load(k_rows, mask=in_bounds, other=0.0)
    v_rows = pointers(v, v_strides, batch, position, head // group, TILE_D)
    v_tile = tl.load(v_rows, mask=in_bounds, other=0.0)
    k_id = tl.load(k_ids + ids + col * rate, mask=valid) if HAS_IDS else col
    BIASED: tl.constexpr = len(RATIOS) > 0
    k_log_count = _log_counts(col, shift, RATIOS)
    q_log_count = _log_counts(tl.arange(0, TILE_M), shift, RATIOS)
    dk_acc = tl.zeros([TILE_N, TILE_D], tl.float32)
    dv_acc = tl.zeros([TILE_N, TILE_D], tl.float32)

    begin = outer
    if SKIP_INNER:
        begin = tl.minimum(start + inner, outer_end)
    elif CAUSAL:
        begin = outer + (first - outer) // TILE_M * TILE_M
        after = first + TILE_N - outer
        STEP = block_size if BLOCK_SPARSE else TILE_M
        middle = tl.minimum(outer + tl.cdiv(after, STEP) * STEP, outer_end)
        dk_acc, dv_acc = dkdv_inner(
            dk_acc, dv_acc, k_tile, v_tile, col, k_id, k_log_count, q_log_count, q, do,
            lse + lse_offset, delta + lse_offset, q_ids + ids, indices, block_size, batch,
            row0, rho_0, head, rate, outer, begin, middle, middle, 0, scale_log2, False, BIASED,
            HAS_IDS, True, 2, 0, TILE_M, TILE_D,
        )  # fmt: skip
        begin = middle
    if BLOCK_SPARSE:
        block_row = (first - outer) // block_size
        first_index = tl.load(offsets + block_row)
        indices += first_index
        begin, last = 0, (tl.load(offsets + block_row + 1) - first_index).to(tl.int32) * block_size
    else:
        last = begin + (outer_end - begin) // TILE_M * TILE_M
    dk_acc, dv_acc = dkdv_inner(
        dk_acc, dv_acc, k_tile, v_tile, col, k_id, k_log_count, q_log_count, q, do,
        lse + lse_offset, delta + lse_offset, q_ids + ids, indices, block_size, batch, row0,
        rho_0, head, rate, outer, begin, last, outer_end, 0, scale_log2, BLOCK_SPARSE, BIASED,
        HAS_IDS, BLOCK_SPARSE, 0, 0, TILE_M, TILE_D,
    )  # fmt: skip
    if not BLOCK_SPARSE and not EVEN:
        dk_acc, dv_acc = dkdv_inner(
            dk_acc, dv_acc, k_tile, v_tile, col, k_id, k_log_count, q_log_count, q, do,
            lse + lse_offset, delta + lse_offset, q_ids + ids, indices, block_size, batch,
            row0, rho_0, head, rate, outer, last, outer_end, outer_end, 0, scale_log2, False,
            BIASED, HAS_IDS, True, 0, 0, TILE_M, TILE_D,
        )  # fmt: skip
    if SKIP_INNER and not CAUSAL:
        dk_acc, dv_acc = dkdv_inner(
            dk_acc, dv_acc, k_tile, v_tile, col, k_id, k_log_count, q_log_count, q, do,
            lse + lse_offset, delta + lse_offset, q_ids + ids, indices, block_size, batch,
            row0, rho_0, head, rate, outer, outer, start, start, 0, scale_log2, False, BIASED,
            HAS_IDS, True, 0, 0, TILE_M, TILE_D,
        )  # fmt: skip
    _accumulate(
        dk_acc * softmax_scale, dk, partial_k, dk_strides, partial_strides, batch, position,
        partial_row, head, col, shift, in_bounds, FIRST, LAST, PARTIAL_RATIO, TILE_D,
    )  # fmt: skip
    _accumulate(
        dv_acc, dv, partial_v, dk_strides, partial_strides, batch, position,
        partial_row, head, col, shift, in_bounds, FIRST, LAST, PARTIAL_RATIO, TILE_D,
    )  # fmt: skip
