"""`branch.forward` in Gluon, for compute capability 9.0: causal, whole segments, 16 bits.

The same rows, pairs, counts and partials as there. A tile of rows is a block of a matrix (rows,
rate · token stride), at the column of its residue and head.

The softmax of a tile overlaps the product of the tile before with its values; four programs of
four warps share a multiprocessor.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from longspan.attention.kernels.gluon_parts import (
    add_periodic,
    counts_of_pairs,
    counts_of_rows,
    place,
    thread_barrier,
)

# mypy: ignore-errors


@gluon.jit
def _load_keys(x, row, column, ready, tiles, j, pred):
    """Start to copy the tile j of keys or values into its buffer."""
    bar = ready.index(j % 2)
    mbarrier.expect(bar, x.block_type.nbytes, pred=pred)
    tma.async_copy_global_to_shared(x, [row, column], bar, tiles.index(j % 2), pred=pred)


@gluon.jit
def _softmax(
    qk, l_i, m_i, row, n, q_log_count, k_log_count, is_sparse, shift, scale_log2,
    DIAGONAL: gl.constexpr, RATIOS: gl.constexpr, TILE: gl.constexpr,
):  # fmt: skip
    """P of a tile of scores, and what earlier results are multiplied by."""
    if DIAGONAL:
        col = n + gl.arange(0, TILE, layout=gl.SliceLayout(0, qk.type.layout))
        qk = gl.where(row[:, None] >= col[None, :], qk, float("-inf"))
    m_new = gl.maximum(m_i, gl.max(qk, 1) * scale_log2)  # up to the counts, which are small
    if len(RATIOS) > 0:
        counts = counts_of_pairs(
            q_log_count, k_log_count, is_sparse, n, shift, RATIOS, TILE
        )  # fmt: skip
        m_rows = gl.convert_layout(m_new, q_log_count.type.layout, assert_trivial=True)
        p = gl.exp2(add_periodic(qk * scale_log2, counts - m_rows[:, None][:, :, None]))
    else:
        p = gl.exp2(qk * scale_log2 - m_new[:, None])
    alpha = gl.exp2(m_i - m_new)
    return p, l_i * alpha + gl.sum(p, 1), m_new, alpha


@gluon.jit
def _forward_step(
    acc, p_operand, l_i, m_i, q_operand, k_tiles, v_tiles, k_ready, v_ready, k, v, j, steps,
    k_origin, k_column, v_origin, v_column, begin, row, q_log_count, k_log_count, is_sparse, shift,
    scale_log2,
    DIAGONAL: gl.constexpr, RATIOS: gl.constexpr, TILE: gl.constexpr,
    SCORES: gl.constexpr, RESULT: gl.constexpr, OPERAND: gl.constexpr,
):  # fmt: skip
    """The scores of tile j, whose softmax overlaps the product of P and V of tile j − 1."""
    thread_barrier()  # every warp has finished with the scores of j − 1 and the values of j − 2
    n = begin + j * TILE
    _load_keys(v, v_origin + n, v_column, v_ready, v_tiles, j, True)
    _load_keys(k, k_origin + n + TILE, k_column, k_ready, k_tiles, j + 1, j + 1 < steps)
    zero = gl.zeros([TILE, TILE], gl.float32, layout=SCORES)
    mbarrier.wait(k_ready.index(j % 2), j // 2 % 2)
    k_tile = k_tiles.index(j % 2).permute([1, 0])
    qk = warpgroup_mma(q_operand, k_tile, zero, use_acc=False, is_async=True)
    mbarrier.wait(v_ready.index((j - 1) % 2), (j - 1) // 2 % 2)
    acc = warpgroup_mma(p_operand, v_tiles.index((j - 1) % 2), acc, is_async=True)
    qk = warpgroup_mma_wait(1, deps=[qk])
    p, l_i, m_i, alpha = _softmax(
        qk, l_i, m_i, row, n, q_log_count, k_log_count, is_sparse, shift, scale_log2, DIAGONAL,
        RATIOS, TILE,
    )  # fmt: skip
    acc = warpgroup_mma_wait(0, deps=[acc])
    alpha = gl.convert_layout(alpha, gl.SliceLayout(1, RESULT))
    acc = warpgroup_mma_init(acc * alpha[:, None])
    return acc, gl.convert_layout(p.to(k.dtype), OPERAND), l_i, m_i


@gluon.jit
def forward(
    q, k, v, out, partial, lse, q_strides, k_strides, v_strides, out_strides, partial_strides,
    lse_stride, tokens, heads, first_head, group, rate, segment, inner, partial_rate, scale_log2,
    RATIOS: gl.constexpr, SKIP_INNER: gl.constexpr, FIRST: gl.constexpr, LAST: gl.constexpr,
    HEAD_DIM: gl.constexpr, TILE: gl.constexpr,
):  # fmt: skip
    """One tile of queries of one branch, merged into `partial` or, if LAST, into `out`."""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    RESULT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, RESULT, 2)
    LANES: gl.constexpr = HEAD_DIM // 8
    OUT: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [4, 1], [1, 0])
    DIAGONAL: gl.constexpr = not SKIP_INNER
    batch, head = gl.program_id(1) // heads, gl.program_id(1) % heads
    length = inner if SKIP_INNER else segment
    tiles = length // TILE
    pid = gl.num_programs(0) - 1 - gl.program_id(0)  # the longest rows first
    start = pid // tiles * length
    begin = start // segment * segment
    first = start + pid % tiles * TILE
    stop = start if SKIP_INNER else first + TILE
    steps = (stop - begin) // TILE
    if steps > 0:
        rho = (first_head + head) % rate
        shift = (rho - first_head - head) // rate
        q_origin, q_column = place(q_strides, batch, rho, head, rate)
        k_origin, k_column = place(k_strides, batch, rho, head // group, rate)
        v_origin, v_column = place(v_strides, batch, rho, head // group, rate)

        q_tile = gl.allocate_shared_memory(q.dtype, q.block_shape, q.layout)
        k_tiles = gl.allocate_shared_memory(k.dtype, [2, TILE, HEAD_DIM], k.layout)
        v_tiles = gl.allocate_shared_memory(v.dtype, [2, TILE, HEAD_DIM], v.layout)
        q_ready = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
        k_ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
        v_ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
        mbarrier.init(q_ready.index(0), count=1)
        for i in gl.static_range(2):
            mbarrier.init(k_ready.index(i), count=1)
            mbarrier.init(v_ready.index(i), count=1)
        fence_async_shared()
        mbarrier.expect(q_ready.index(0), q.block_type.nbytes)
        tma.async_copy_global_to_shared(q, [q_origin + first, q_column], q_ready.index(0), q_tile)
        _load_keys(k, k_origin + begin, k_column, k_ready, k_tiles, 0, True)
        _load_keys(v, v_origin + begin, v_column, v_ready, v_tiles, 0, True)
        _load_keys(k, k_origin + begin + TILE, k_column, k_ready, k_tiles, 1, steps > 1)

        ROWS: gl.constexpr = gl.SliceLayout(1, SCORES)
        row = first + gl.arange(0, TILE, layout=ROWS)
        q_log_count, k_log_count, is_sparse = counts_of_rows(first, shift, SCORES, RATIOS, TILE)
        lse_rows = lse + gl.program_id(1).to(gl.int64) * lse_stride + rho + row * rate
        result_row = first + gl.arange(0, TILE, layout=gl.SliceLayout(1, RESULT))
        partial_row = (rho + result_row * rate) // partial_rate
        dims = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, RESULT))
        base = partial + batch.to(gl.int64) * partial_strides[0]
        base += head.to(gl.int64) * partial_strides[2]
        partial_rows = base + partial_row.to(gl.int64)[:, None] * partial_strides[1] + dims[None, :]
        if FIRST:
            m_i = gl.full([TILE], float("-inf"), gl.float32, layout=ROWS)
            l_i = gl.zeros([TILE], gl.float32, layout=ROWS)
            acc = gl.zeros([TILE, HEAD_DIM], gl.float32, layout=RESULT)
        else:
            m_i = gl.load(lse_rows)
            has_partial = m_i > float("-inf")
            l_i = gl.where(has_partial, 1.0, 0.0)
            mask = gl.convert_layout(has_partial, gl.SliceLayout(1, RESULT))[:, None]
            acc = gl.load(partial_rows, mask=mask & (dims >= 0)[None, :], other=0.0)

        zero = gl.zeros([TILE, TILE], gl.float32, layout=SCORES)
        mbarrier.wait(q_ready.index(0), 0)
        q_operand = q_tile
        if HEAD_DIM == 64:  # in registers, of which there are enough
            q_operand = q_tile.load(gl.DotOperandLayout(0, SCORES, 2))
        mbarrier.wait(k_ready.index(0), 0)
        qk = warpgroup_mma(q_operand, k_tiles.index(0).permute([1, 0]), zero, use_acc=False)
        p, l_i, m_i, alpha = _softmax(
            qk, l_i, m_i, row, begin, q_log_count, k_log_count, is_sparse, shift, scale_log2,
            DIAGONAL, RATIOS, TILE,
        )  # fmt: skip
        p_operand = gl.convert_layout(p.to(k.dtype), OPERAND)
        alpha = gl.convert_layout(alpha, gl.SliceLayout(1, RESULT))
        acc = warpgroup_mma_init(acc * alpha[:, None])
        for j in range(1, steps - 1 if DIAGONAL else steps):
            acc, p_operand, l_i, m_i = _forward_step(
                acc, p_operand, l_i, m_i, q_operand, k_tiles, v_tiles, k_ready, v_ready, k, v, j,
                steps, k_origin, k_column, v_origin, v_column, begin, row, q_log_count, k_log_count,
                is_sparse, shift, scale_log2, False, RATIOS, TILE, SCORES, RESULT, OPERAND,
            )  # fmt: skip
        if DIAGONAL and steps > 1:
            acc, p_operand, l_i, m_i = _forward_step(
                acc, p_operand, l_i, m_i, q_operand, k_tiles, v_tiles, k_ready, v_ready, k, v,
                steps - 1, steps, k_origin, k_column, v_origin, v_column, begin, row, q_log_count,
                k_log_count, is_sparse, shift, scale_log2, True, RATIOS, TILE, SCORES, RESULT,
                OPERAND,
            )  # fmt: skip
        last = steps - 1
        mbarrier.wait(v_ready.index(last % 2), last // 2 % 2)
        acc = warpgroup_mma(p_operand, v_tiles.index(last % 2), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc])

        gl.store(lse_rows, m_i + gl.log2(l_i))
        acc = acc / gl.convert_layout(l_i, gl.SliceLayout(1, RESULT))[:, None]
        if LAST:
            value = gl.convert_layout(acc.to(out.dtype.element_ty), OUT)
            position = gl.convert_layout(rho + result_row * rate, gl.SliceLayout(1, OUT)).to(
                gl.int64
            )
            dims = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, OUT))
            rows = out + batch.to(gl.int64) * out_strides[0] + head.to(gl.int64) * out_strides[2]
            gl.store(rows + position[:, None] * out_strides[1] + dims[None, :], value)
        else:
            gl.store(partial_rows, acc)
