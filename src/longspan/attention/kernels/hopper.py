"""`backward_dkdv` of `block_sparse_kernels` in Gluon, for compute capability 9.0.

Triton's version runs the products and exponentials of a step one after the other. Here the
exponentials overlap the product dO Vᵀ, and dK overlaps the beginning of the next step.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from longspan.attention.kernels.gluon_parts import thread_barrier

# mypy: ignore-errors


@gluon.jit
def _query_row(queries, j, end, TILE_M: gl.constexpr):
    """The first query of step j of a key block."""
    STEPS: gl.constexpr = 128 // TILE_M
    return gl.load(queries + j // STEPS, mask=j < end, other=0) * 128 + j % STEPS * TILE_M


@gluon.jit
def _load_async(
    q, do, lse, delta, m, origin, column, ready, q_tiles, do_tiles, lse_delta, buffer, pred,
    TILE_M: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Start to copy q, dO, lse and delta of a step into a buffer."""
    bar = ready.index(buffer)
    mbarrier.expect(bar, 2 * q.block_type.nbytes, pred=pred)
    tma.async_copy_global_to_shared(q, [origin + m, column], bar, q_tiles.index(buffer), pred=pred)
    tma.async_copy_global_to_shared(
        do, [origin + m, column], bar, do_tiles.index(buffer), pred=pred
    )
    i = gl.arange(0, TILE_M, layout=gl.BlockedLayout([1], [32], [WARPS], [0]))
    mask = (i >= 0) & pred
    async_copy.async_copy_global_to_shared(lse_delta.index(2 * buffer), lse + m + i, mask=mask)
    delta_tile = lse_delta.index(2 * buffer + 1)
    async_copy.async_copy_global_to_shared(delta_tile, delta + m + i, mask=mask)
    async_copy.commit_group()


@gluon.jit
def _store_ds(ds_value, ds, ds_tile, row, column):
    tma.store_wait(0)
    thread_barrier()
    ds_tile.store(ds_value)
    fence_async_shared()
    tma.async_copy_shared_to_global(ds, [row, column], ds_tile)


@gluon.jit
def _step(
    dk_acc, dv_acc, k_tile, v_tile, q_tiles, do_tiles, lse_delta, ready, ds_tile, q, do, lse, delta,
    ds, queries, slot, block_offset, j, end, m, m_next, col, origin, column, scale_log2,
    DIAGONAL: gl.constexpr, TILE_M: gl.constexpr, TILE_N: gl.constexpr, WARPS: gl.constexpr,
    SCORES: gl.constexpr, OPERAND: gl.constexpr,
):  # fmt: skip
    """Step j of a key block, while the copies for the next step run; returns the row of j + 2."""
    STEPS: gl.constexpr = 128 // TILE_M
    ROW: gl.constexpr = gl.SliceLayout(0, SCORES)
    buffer = j % 2
    m_after = _query_row(queries, j + 2, end, TILE_M)
    mbarrier.wait(ready.index(buffer), j // 2 % 2)
    q_tile, do_tile = q_tiles.index(buffer), do_tiles.index(buffer)
    zero = gl.zeros([TILE_N, TILE_M], gl.float32, layout=SCORES)
    qk = warpgroup_mma(k_tile, q_tile.permute([1, 0]), zero, use_acc=False, is_async=True)
    dp = warpgroup_mma(v_tile, do_tile.permute([1, 0]), zero, use_acc=False, is_async=True)
    qk, dk_acc, dv_acc = warpgroup_mma_wait(1, deps=[qk, dk_acc, dv_acc])
    async_copy.wait_group(0)
    thread_barrier()  # every warp has finished with the other buffer
    _load_async(
        q, do, lse, delta, m_next, origin, column, ready, q_tiles, do_tiles, lse_delta,
        1 - buffer, j + 1 < end, TILE_M, WARPS,
    )  # fmt: skip
    lse_i = lse_delta.index(2 * buffer).load(ROW)
    qk = qk * scale_log2
    if DIAGONAL:
        row = m + gl.arange(0, TILE_M, layout=ROW)
        qk = gl.where(row[None, :] >= col[:, None], qk, float("-inf"))
    p = gl.exp2(qk - lse_i[None, :])
    p_operand = gl.convert_layout(p.to(q.dtype), OPERAND)
    dv_acc = warpgroup_mma(p_operand, do_tile, dv_acc, is_async=True)
    dp = warpgroup_mma_wait(1, deps=[dp])
    delta_i = lse_delta.index(2 * buffer + 1).load(ROW)
    ds_value = (p * (dp - delta_i[None, :])).to(q.dtype)
    _store_ds(ds_value, ds, ds_tile, (slot + j // STEPS) * 128 + block_offset, j % STEPS * TILE_M)
    dk_acc = warpgroup_mma(gl.convert_layout(ds_value, OPERAND), q_tile, dk_acc, is_async=True)
    # Wait for dV here: it holds registers that the next step needs.
    dv_acc = warpgroup_mma_init(warpgroup_mma_wait(1, deps=[dv_acc]))
    return dk_acc, dv_acc, m_after


@gluon.jit
def _accumulate(
    acc, grad, partial, offset, partial_offset, has_partial, OUT: gl.constexpr,
    FIRST: gl.constexpr, LAST: gl.constexpr,
):  # fmt: skip
    """Add the earlier chunks' partial to a tile's gradient and store it."""
    if not FIRST:
        acc += gl.load(partial + partial_offset, mask=has_partial, other=0.0)
    if LAST:
        gl.store(grad + offset, gl.convert_layout(acc.to(grad.dtype.element_ty), OUT))
    else:
        gl.store(partial + partial_offset, acc)


@gluon.jit(do_not_specialize=["first", "heads", "group", "begin", "tiles"])
def backward_dkdv(
    q, k, v, do, lse, delta, ds, dk, dv, partial_k, partial_v, offsets, queries, first,
    tokens, heads, group, begin, tiles, scale_log2, softmax_scale,
    FIRST: gl.constexpr, LAST: gl.constexpr, HEAD_DIM: gl.constexpr, TILE_M: gl.constexpr,
    TILE_N: gl.constexpr,
):  # fmt: skip
    """Like `block_sparse_kernels.backward_dkdv`, but k and v are descriptors."""
    WARPS: gl.constexpr = gl.num_warps()
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, TILE_M, 16])
    GRADS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, HEAD_DIM, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, GRADS, 2)
    LANES: gl.constexpr = HEAD_DIM // 8  # of a warp, for one row of 16-byte stores
    OUT: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [WARPS, 1], [1, 0])
    STEPS: gl.constexpr = 128 // TILE_M
    local = gl.program_id(1)
    batch, head = (first + local) // heads, (first + local) % heads
    origin, column = batch * tokens, head * HEAD_DIM
    n = gl.program_id(0) * TILE_N
    block, block_offset = n // 128, n % 128
    lse += (first + local).to(gl.int64) * tokens
    delta += (first + local).to(gl.int64) * tokens
    start = gl.load(offsets + block)
    end = (gl.load(offsets + block + 1) - start) * STEPS
    slot = local * tiles + start
    queries += start
    diagonal = gl.where(block >= begin, STEPS, 0)

    k_tile = gl.allocate_shared_memory(k.dtype, k.block_shape, k.layout)
    v_tile = gl.allocate_shared_memory(v.dtype, v.block_shape, v.layout)
    q_tiles = gl.allocate_shared_memory(q.dtype, [2, TILE_M, HEAD_DIM], q.layout)
    do_tiles = gl.allocate_shared_memory(q.dtype, [2, TILE_M, HEAD_DIM], q.layout)
    ds_tile = gl.allocate_shared_memory(ds.dtype, ds.block_shape, ds.layout)
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    lse_delta = gl.allocate_shared_memory(gl.float32, [4, TILE_M], PLAIN)
    ready = gl.allocate_shared_memory(gl.int64, [3, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(3):
        mbarrier.init(ready.index(i), count=1)
    fence_async_shared()
    mbarrier.expect(ready.index(2), 2 * k.block_type.nbytes)
    k_offset = [origin + n, head // group * HEAD_DIM]
    tma.async_copy_global_to_shared(k, k_offset, ready.index(2), k_tile)
    tma.async_copy_global_to_shared(v, k_offset, ready.index(2), v_tile)
    m, m_next = _query_row(queries, 0, end, TILE_M), _query_row(queries, 1, end, TILE_M)
    _load_async(
        q, do, lse, delta, m, origin, column, ready, q_tiles, do_tiles, lse_delta, 0, end > 0,
        TILE_M, WARPS,
    )  # fmt: skip
    dk_acc = warpgroup_mma_init(gl.zeros([TILE_N, HEAD_DIM], gl.float32, layout=GRADS))
    dv_acc = warpgroup_mma_init(gl.zeros([TILE_N, HEAD_DIM], gl.float32, layout=GRADS))
    mbarrier.wait(ready.index(2), 0)
    col = n + gl.arange(0, TILE_N, layout=gl.SliceLayout(1, SCORES))
    for j in range(diagonal):
        dk_acc, dv_acc, m_after = _step(
            dk_acc, dv_acc, k_tile, v_tile, q_tiles, do_tiles, lse_delta, ready, ds_tile, q, do,
            lse, delta, ds, queries, slot, block_offset, j, end, m, m_next, col, origin, column,
            scale_log2, True, TILE_M, TILE_N, WARPS, SCORES, OPERAND,
        )  # fmt: skip
        m, m_next = m_next, m_after
    for j in range(diagonal, end):
        dk_acc, dv_acc, m_after = _step(
            dk_acc, dv_acc, k_tile, v_tile, q_tiles, do_tiles, lse_delta, ready, ds_tile, q, do,
            lse, delta, ds, queries, slot, block_offset, j, end, m, m_next, col, origin, column,
            scale_log2, False, TILE_M, TILE_N, WARPS, SCORES, OPERAND,
        )  # fmt: skip
        m, m_next = m_next, m_after
    dk_acc, dv_acc = warpgroup_mma_wait(0, deps=[dk_acc, dv_acc])
    tma.store_wait(0)

    rows = (origin + n + gl.arange(0, TILE_N, layout=gl.SliceLayout(1, OUT))).to(gl.int64)
    dims = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, OUT))
    offset = rows[:, None] * heads * HEAD_DIM + column + dims[None, :]
    rows = n + gl.arange(0, TILE_N, layout=gl.SliceLayout(1, GRADS))
    dims = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, GRADS))
    partial_offset = (local * tokens + rows).to(gl.int64)[:, None] * HEAD_DIM + dims[None, :]
    has_partial = (rows < begin * 128)[:, None]
    dk_acc = dk_acc * softmax_scale
    _accumulate(dk_acc, dk, partial_k, offset, partial_offset, has_partial, OUT, FIRST, LAST)
    _accumulate(dv_acc, dv, partial_v, offset, partial_offset, has_partial, OUT, FIRST, LAST)
