"""key_grad of `listed_kernels` in Gluon, for compute capability 9.0.

What Triton makes of that one runs a step's products and exponentials one after the other. Here the
exponentials run beside the product dO Vᵀ, and dK beside the beginning of the next step.
"""

from __future__ import annotations

from torch import Tensor
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
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

# mypy: ignore-errors


def described(x: Tensor, block: list[int]) -> TensorDescriptor:
    """A matrix, read or written a block at a time."""
    layout = gl.NVMMASharedLayout.get_default_for(block, gl.float16)  # or bfloat16: the size counts
    return TensorDescriptor(x, list(x.shape), list(x.stride()), block, layout)


@gluon.jit
def _query(queries, j, end, TILE_M: gl.constexpr):
    """The first query of step j of a key block's list."""
    STEPS: gl.constexpr = 128 // TILE_M
    return gl.load(queries + j // STEPS, mask=j < end, other=0) * 128 + j % STEPS * TILE_M


@gluon.jit
def _fetch(q, grad, limit, delta, m, origin, column, ready, q_tiles, grad_tiles, numbers, buffer,
           wanted, TILE_M: gl.constexpr, WARPS: gl.constexpr):  # fmt: skip
    """Start the copies of the queries, dO, limit and delta of a step into a buffer."""
    bar = ready.index(buffer)
    mbarrier.expect(bar, 2 * q.block_type.nbytes, pred=wanted)
    tma.async_copy_global_to_shared(
        q, [origin + m, column], bar, q_tiles.index(buffer), pred=wanted
    )
    tma.async_copy_global_to_shared(
        grad, [origin + m, column], bar, grad_tiles.index(buffer), pred=wanted
    )
    i = gl.arange(0, TILE_M, layout=gl.BlockedLayout([1], [32], [WARPS], [0]))
    mask = (i >= 0) & wanted
    async_copy.async_copy_global_to_shared(numbers.index(2 * buffer), limit + m + i, mask=mask)
    async_copy.async_copy_global_to_shared(numbers.index(2 * buffer + 1), delta + m + i, mask=mask)
    async_copy.commit_group()


@gluon.jit
def _put_change(change, ds, ds_tile, row, column):
    tma.store_wait(0)
    gl.thread_barrier()
    ds_tile.store(change)
    fence_async_shared()
    tma.async_copy_shared_to_global(ds, [row, column], ds_tile)


@gluon.jit
def _step(
    acc_k, acc_v, keys, values, q_tiles, grad_tiles, numbers, ready, ds_tile, q, grad, limit, delta,
    ds, queries, slot, side, j, end, m, m_next, col, origin, column, scale,
    DIAGONAL: gl.constexpr, TILE_M: gl.constexpr, TILE_N: gl.constexpr, WARPS: gl.constexpr,
    SCORES: gl.constexpr, OPERAND: gl.constexpr,
):  # fmt: skip
    """Step j of a key block's list, beside the copies for the next; and the place of j + 2."""
    STEPS: gl.constexpr = 128 // TILE_M
    ROW: gl.constexpr = gl.SliceLayout(0, SCORES)
    buffer = j % 2
    m_after = _query(queries, j + 2, end, TILE_M)
    mbarrier.wait(ready.index(buffer), j // 2 % 2)
    q_tile, grads = q_tiles.index(buffer), grad_tiles.index(buffer)
    zero = gl.zeros([TILE_N, TILE_M], gl.float32, layout=SCORES)
    x = warpgroup_mma(keys, q_tile.permute([1, 0]), zero, use_acc=False, is_async=True)
    slope = warpgroup_mma(values, grads.permute([1, 0]), zero, use_acc=False, is_async=True)
    x, acc_k, acc_v = warpgroup_mma_wait(1, deps=[x, acc_k, acc_v])
    async_copy.wait_group(0)
    gl.thread_barrier()  # every warp is done with the other buffer
    _fetch(
        q, grad, limit, delta, m_next, origin, column, ready, q_tiles, grad_tiles, numbers,
        1 - buffer, j + 1 < end, TILE_M, WARPS,
    )  # fmt: skip
    tops = numbers.index(2 * buffer).load(ROW)
    x = x * scale
    if DIAGONAL:
        row = m + gl.arange(0, TILE_M, layout=ROW)
        x = gl.where(row[None, :] >= col[:, None], x, float("-inf"))
    p = gl.exp2(x - tops[None, :])
    acc_v = warpgroup_mma(gl.convert_layout(p.to(q.dtype), OPERAND), grads, acc_v, is_async=True)
    slope = warpgroup_mma_wait(1, deps=[slope])
    means = numbers.index(2 * buffer + 1).load(ROW)
    change = (p * (slope - means[None, :])).to(q.dtype)
    _put_change(change, ds, ds_tile, (slot + j // STEPS) * 128 + side, j % STEPS * TILE_M)
    acc_k = warpgroup_mma(gl.convert_layout(change, OPERAND), q_tile, acc_k, is_async=True)
    # dV is awaited here, since it holds registers that the next step needs
    acc_v = warpgroup_mma_init(warpgroup_mma_wait(1, deps=[acc_v]))
    return acc_k, acc_v, m_after


@gluon.jit
def _put(acc, grad, partial, place, part, known, OUT: gl.constexpr, FIRST: gl.constexpr,
         LAST: gl.constexpr):  # fmt: skip
    """Join a tile's gradient to the earlier chunks' share and store it."""
    if not FIRST:
        acc += gl.load(partial + part, mask=known, other=0.0)
    if LAST:
        gl.store(grad + place, gl.convert_layout(acc.to(grad.dtype.element_ty), OUT))
    else:
        gl.store(partial + part, acc)


@gluon.jit(do_not_specialize=["first", "begin", "tiles"])
def key_grad(
    q, k, v, grad, limit, delta, ds, grad_k, grad_v, partial_k, partial_v, offsets, queries, first,
    tokens, heads, group, begin, tiles, scale, natural_scale,
    FIRST: gl.constexpr, LAST: gl.constexpr, HEAD_DIM: gl.constexpr, TILE_M: gl.constexpr,
    TILE_N: gl.constexpr,
):  # fmt: skip
    """As `listed_kernels.key_grad`, but for k and v, which are descriptors here."""
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
    own, side = n // 128, n % 128
    limit += (first + local).to(gl.int64) * tokens
    delta += (first + local).to(gl.int64) * tokens
    start = gl.load(offsets + own)
    end = (gl.load(offsets + own + 1) - start) * STEPS
    slot = local * tiles + start
    queries += start
    diagonal = gl.where(own >= begin, STEPS, 0)

    keys = gl.allocate_shared_memory(k.dtype, k.block_shape, k.layout)
    values = gl.allocate_shared_memory(v.dtype, v.block_shape, v.layout)
    q_tiles = gl.allocate_shared_memory(q.dtype, [2, TILE_M, HEAD_DIM], q.layout)
    grad_tiles = gl.allocate_shared_memory(q.dtype, [2, TILE_M, HEAD_DIM], q.layout)
    ds_tile = gl.allocate_shared_memory(ds.dtype, ds.block_shape, ds.layout)
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    numbers = gl.allocate_shared_memory(gl.float32, [4, TILE_M], PLAIN)
    ready = gl.allocate_shared_memory(gl.int64, [3, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(3):
        mbarrier.init(ready.index(i), count=1)
    fence_async_shared()
    mbarrier.expect(ready.index(2), 2 * k.block_type.nbytes)
    k_place = [origin + n, head // group * HEAD_DIM]
    tma.async_copy_global_to_shared(k, k_place, ready.index(2), keys)
    tma.async_copy_global_to_shared(v, k_place, ready.index(2), values)
    m, m_next = _query(queries, 0, end, TILE_M), _query(queries, 1, end, TILE_M)
    _fetch(
        q, grad, limit, delta, m, origin, column, ready, q_tiles, grad_tiles, numbers, 0, end > 0,
        TILE_M, WARPS,
    )  # fmt: skip
    acc_k = warpgroup_mma_init(gl.zeros([TILE_N, HEAD_DIM], gl.float32, layout=GRADS))
    acc_v = warpgroup_mma_init(gl.zeros([TILE_N, HEAD_DIM], gl.float32, layout=GRADS))
    mbarrier.wait(ready.index(2), 0)
    col = n + gl.arange(0, TILE_N, layout=gl.SliceLayout(1, SCORES))
    for j in range(diagonal):
        acc_k, acc_v, m_after = _step(
            acc_k, acc_v, keys, values, q_tiles, grad_tiles, numbers, ready, ds_tile, q, grad,
            limit, delta, ds, queries, slot, side, j, end, m, m_next, col, origin, column, scale,
            True, TILE_M, TILE_N, WARPS, SCORES, OPERAND,
        )  # fmt: skip
        m, m_next = m_next, m_after
    for j in range(diagonal, end):
        acc_k, acc_v, m_after = _step(
            acc_k, acc_v, keys, values, q_tiles, grad_tiles, numbers, ready, ds_tile, q, grad,
            limit, delta, ds, queries, slot, side, j, end, m, m_next, col, origin, column, scale,
            False, TILE_M, TILE_N, WARPS, SCORES, OPERAND,
        )  # fmt: skip
        m, m_next = m_next, m_after
    acc_k, acc_v = warpgroup_mma_wait(0, deps=[acc_k, acc_v])
    tma.store_wait(0)

    rows = (origin + n + gl.arange(0, TILE_N, layout=gl.SliceLayout(1, OUT))).to(gl.int64)
    dims = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, OUT))
    place = rows[:, None] * heads * HEAD_DIM + column + dims[None, :]
    rows = n + gl.arange(0, TILE_N, layout=gl.SliceLayout(1, GRADS))
    dims = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, GRADS))
    part = (local * tokens + rows).to(gl.int64)[:, None] * HEAD_DIM + dims[None, :]
    known = (rows < begin * 128)[:, None]
    _put(acc_k * natural_scale, grad_k, partial_k, place, part, known, OUT, FIRST, LAST)
    _put(acc_v, grad_v, partial_v, place, part, known, OUT, FIRST, LAST)
