"""`branch.backward_dkdv` in Gluon, for compute capability 9.0: causal, whole segments, 16 bits.

The same rows, pairs, counts and partials as there. A tile of rows is a block of a matrix (rows,
rate · token stride), at the column of its residue and head.

A program has two tiles of keys. Two groups of four warps each compute dK and dV of one of them,
step by step over the queries, and a warp of its own loads those: while one group computes
exponentials, the other multiplies. A third group multiplies dS of both with the keys; the copy
engine adds the result to dQ in global memory. Where registers do not allow a third group, which is
with head_dim 128 and with counts of a long period, the two take turns to do that, step by step.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from longspan.attention.kernels.gluon_parts import (
    add_periodic,
    async_add_shared_to_global,
    counts_of_pairs,
    counts_of_rows,
    period_of,
    place,
    thread_barrier,
)

# mypy: ignore-errors


REGISTERS = gl.constexpr(240)
"""Per thread of the groups that take turns; the loader leaves them its own."""
REGISTERS_BESIDE_DQ = gl.constexpr(208)
"""The same with a group for dQ, which has DQ_REGISTERS."""
DQ_REGISTERS = gl.constexpr(72)
LOADER_REGISTERS = gl.constexpr(24)
LONGEST_PERIOD = gl.constexpr(16)
"""Of counts that leave registers for a group of dQ: with 64, a third more time was measured."""


@gluon.jit
def _load(keys, ring, inputs, begin, steps, rate, TILE: gl.constexpr, STAGES: gl.constexpr):
    """Copy the keys and values, and q, dO, lse and delta of each step into a ring of buffers: the
    work of one warp.
    """
    k_tiles, v_tiles, keys_ready = keys
    q_tiles, do_tiles, lse_tiles, delta_tiles, ready, free = ring
    (
        q, k, v, do, lse, delta, q_origin, q_column, k_row, k_column, v_row, v_column, do_origin,
        do_column,
    ) = inputs  # fmt: skip
    bar = keys_ready.index(0)
    mbarrier.expect(bar, 4 * k.block_type.nbytes)
    for i in gl.static_range(2):
        tma.async_copy_global_to_shared(k, [k_row + i * TILE, k_column], bar, k_tiles.index(i))
        tma.async_copy_global_to_shared(v, [v_row + i * TILE, v_column], bar, v_tiles.index(i))
    i = gl.arange(0, TILE, layout=gl.BlockedLayout([1], [32], [1], [0]))
    for j in range(steps):
        buffer = j % STAGES
        row = begin + j * TILE
        lse_i = gl.load(lse + (row + i) * rate)
        delta_i = gl.load(delta + (row + i) * rate)
        mbarrier.wait(free.index(buffer), j // STAGES % 2 ^ 1)
        bar = ready.index(buffer)
        mbarrier.expect(bar, 2 * q.block_type.nbytes)
        tma.async_copy_global_to_shared(q, [q_origin + row, q_column], bar, q_tiles.index(buffer))
        tma.async_copy_global_to_shared(
            do, [do_origin + row, do_column], bar, do_tiles.index(buffer)
        )
        lse_tiles.index(buffer).store(lse_i)
        delta_tiles.index(buffer).store(delta_i)
        thread_barrier()
        mbarrier.arrive(bar, count=1)


@gluon.jit
def _step(
    dk_acc, dv_acc, operands, k_tiles, ring, exchange, dq, j, begin, dq_origin, counts_of, shift,
    scale_log2,
    INDEX: gl.constexpr, DIAGONAL: gl.constexpr, RATIOS: gl.constexpr, HAS_DQ_GROUP: gl.constexpr,
    HEAD_DIM: gl.constexpr, TILE: gl.constexpr, STAGES: gl.constexpr, SCORES: gl.constexpr,
    GRADS: gl.constexpr,
):  # fmt: skip
    """Step j of a tile of keys, that of group INDEX; without a group for dQ it is this one's turn
    with it in every second step.
    """
    k_operand, v_operand, col = operands
    q_tiles, do_tiles, lse_tiles, delta_tiles, ready, free = ring
    ds_tiles, ds_ready, ds_free, dq_tile = exchange
    k_log_count, q_log_count, is_sparse = counts_of
    dq_row, dq_column = dq_origin
    ROW: gl.constexpr = gl.SliceLayout(0, SCORES)
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, GRADS, 2)
    buffer, m = j % STAGES, begin + j * TILE
    turn, round_of_turn = j % 2, j // 2 % 2
    zero = gl.zeros([TILE, TILE], gl.float32, layout=SCORES)
    q_tile, do_tile = q_tiles.index(buffer), do_tiles.index(buffer)
    mbarrier.wait(ready.index(buffer), j // STAGES % 2)
    # Before the products, beside which shared memory takes hundreds of clocks to answer.
    lse_i = lse_tiles.index(buffer).load(ROW)
    if HAS_DQ_GROUP:
        delta_i = delta_tiles.index(buffer).load(ROW)
    qk = warpgroup_mma(k_operand, q_tile.permute([1, 0]), zero, use_acc=False, is_async=True)
    dp = warpgroup_mma(v_operand, do_tile.permute([1, 0]), zero, use_acc=False, is_async=True)
    qk = warpgroup_mma_wait(1, deps=[qk])
    qk = qk * scale_log2
    if len(RATIOS) > 0:
        counts = counts_of_pairs(k_log_count, q_log_count, is_sparse, m, shift, RATIOS, TILE)
        qk = add_periodic(qk, counts)
    if DIAGONAL:
        row = m + gl.arange(0, TILE, layout=ROW)
        qk = gl.where(row[None, :] >= col[:, None], qk, float("-inf"))
    p = gl.exp2(qk - lse_i[None, :])
    p_operand = gl.convert_layout(p.to(ds_tiles.dtype), OPERAND)
    dv_acc = warpgroup_mma(p_operand, do_tile, dv_acc, is_async=True)
    if not HAS_DQ_GROUP:  # registers are full
        delta_i = delta_tiles.index(buffer).load(ROW)
    dp = warpgroup_mma_wait(1, deps=[dp])
    ds_value = (p * (dp - delta_i[None, :])).to(ds_tiles.dtype)
    if HAS_DQ_GROUP:
        mbarrier.wait(ds_free.index(turn), round_of_turn ^ 1)
    elif turn != INDEX:
        mbarrier.wait(ds_free.index(turn), round_of_turn ^ 1)
        tma.store_wait(0)  # what this group added to dQ in the step before has left its buffer
    ds_tiles.index(2 * turn + INDEX).store(ds_value)
    fence_async_shared()
    thread_barrier()
    if HAS_DQ_GROUP:
        mbarrier.arrive(ds_ready.index(turn), count=1)
    dk_acc = warpgroup_mma(gl.convert_layout(ds_value, OPERAND), q_tile, dk_acc, is_async=True)
    if not HAS_DQ_GROUP:  # noqa: SIM102  decided when it is compiled
        if turn != INDEX:
            mbarrier.arrive(ds_ready.index(turn), count=1)
    dk_acc, dv_acc = warpgroup_mma_wait(0, deps=[dk_acc, dv_acc])
    thread_barrier()
    mbarrier.arrive(free.index(buffer), count=1)
    if not HAS_DQ_GROUP:  # noqa: SIM102
        if turn == INDEX:
            IS_ALONE: gl.constexpr = DIAGONAL and INDEX == 0  # the other group's keys come later
            zero_dq = gl.zeros([TILE, HEAD_DIM], gl.float32, layout=GRADS)
            own = ds_tiles.index(2 * turn + INDEX).permute([1, 0])
            dq_value = warpgroup_mma(
                own, k_tiles.index(INDEX), zero_dq, use_acc=False, is_async=True
            )
            mbarrier.wait(ds_ready.index(turn), round_of_turn)
            if not IS_ALONE:
                other = ds_tiles.index(2 * turn + 1 - INDEX).permute([1, 0])
                dq_value = warpgroup_mma(other, k_tiles.index(1 - INDEX), dq_value, is_async=True)
            dq_value = warpgroup_mma_wait(0, deps=[dq_value])
            dq_tile.store(dq_value)
            fence_async_shared()
            thread_barrier()
            async_add_shared_to_global(dq, [dq_row + m, dq_column], dq_tile)
            mbarrier.arrive(ds_free.index(turn), count=1)
    return dk_acc, dv_acc


@gluon.jit
def _dq_step(
    k_tiles, exchange, dq, j, begin, dq_origin,
    IS_ALONE: gl.constexpr, HEAD_DIM: gl.constexpr, TILE: gl.constexpr,
):  # fmt: skip
    """Add dS of step j times the keys to dQ, of both groups, or if IS_ALONE of the first."""
    ds_tiles, ds_ready, ds_free, dq_tile = exchange
    GRADS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    turn = j % 2
    mbarrier.wait(ds_ready.index(turn), j // 2 % 2)
    zero = gl.zeros([TILE, HEAD_DIM], gl.float32, layout=GRADS)
    ds = ds_tiles.index(2 * turn).permute([1, 0])
    value = warpgroup_mma(ds, k_tiles.index(0), zero, use_acc=False, is_async=True)
    if not IS_ALONE:
        ds = ds_tiles.index(2 * turn + 1).permute([1, 0])
        value = warpgroup_mma(ds, k_tiles.index(1), value, is_async=True)
    value = warpgroup_mma_wait(0, deps=[value])
    tma.store_wait(0)  # what was added in the step before has left its buffer
    thread_barrier()
    mbarrier.arrive(ds_free.index(turn), count=1)
    dq_tile.store(value)
    fence_async_shared()
    thread_barrier()
    dq_row, dq_column = dq_origin
    async_add_shared_to_global(dq, [dq_row + begin + j * TILE, dq_column], dq_tile)


@gluon.jit
def _sum_dq(
    keys, exchange, dq, begin, steps, dq_origin,
    SKIP_INNER: gl.constexpr, HEAD_DIM: gl.constexpr, TILE: gl.constexpr,
):  # fmt: skip
    """dQ over all steps: the work of four warps."""
    k_tiles, _, keys_ready = keys
    mbarrier.wait(keys_ready.index(0), 0)
    if not SKIP_INNER:
        _dq_step(k_tiles, exchange, dq, 0, begin, dq_origin, True, HEAD_DIM, TILE)
    for j in range(0 if SKIP_INNER else 1, steps):
        _dq_step(k_tiles, exchange, dq, j, begin, dq_origin, False, HEAD_DIM, TILE)
    tma.store_wait(0)


@gluon.jit
def _consume(
    shared,
    INDEX: gl.constexpr, RATIOS: gl.constexpr, SKIP_INNER: gl.constexpr, FIRST: gl.constexpr,
    LAST: gl.constexpr, HEAD_DIM: gl.constexpr, TILE: gl.constexpr, STAGES: gl.constexpr,
    PARTIAL_RATIO: gl.constexpr, HAS_DQ_GROUP: gl.constexpr,
):  # fmt: skip
    """The gradients of TILE keys over all steps: the work of four warps."""
    (
        keys, ring, exchange, dq, results, rows, begin, steps, dq_origin, scale_log2, softmax_scale,
    ) = shared  # fmt: skip
    k_tiles, v_tiles, keys_ready = keys
    dk, dv, partial_k, partial_v, dk_strides, partial_strides = results
    batch, head, first, rho, shift, rate, partial_rate = rows
    first += INDEX * TILE
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    GRADS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    LANES: gl.constexpr = HEAD_DIM // 8  # of a warp, for one row of 16-byte stores
    OUT: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [4, 1], [1, 0])
    dk_acc = gl.zeros([TILE, HEAD_DIM], gl.float32, layout=GRADS)
    dv_acc = gl.zeros([TILE, HEAD_DIM], gl.float32, layout=GRADS)
    col = first + gl.arange(0, TILE, layout=gl.SliceLayout(1, SCORES))
    counts_of = counts_of_rows(first, shift, SCORES, RATIOS, TILE)
    mbarrier.wait(keys_ready.index(0), 0)
    k_operand, v_operand = k_tiles.index(INDEX), v_tiles.index(INDEX)
    if HEAD_DIM == 64:  # in registers, of which there are enough: every step reads them
        KEYS: gl.constexpr = gl.DotOperandLayout(0, SCORES, 2)
        k_operand, v_operand = k_operand.load(KEYS), v_operand.load(KEYS)
    operands = k_operand, v_operand, col
    done: gl.constexpr = 0 if SKIP_INNER else INDEX + 1
    if not SKIP_INNER and INDEX == 1:  # its keys are not seen by the queries of the first step
        mbarrier.wait(ring[4].index(0), 0)
        thread_barrier()
        mbarrier.arrive(exchange[1].index(0), count=1)
        mbarrier.arrive(ring[5].index(0), count=1)
    if not SKIP_INNER:
        dk_acc, dv_acc = _step(
            dk_acc, dv_acc, operands, k_tiles, ring, exchange, dq, INDEX, begin, dq_origin,
            counts_of, shift, scale_log2, INDEX, True, RATIOS, HAS_DQ_GROUP, HEAD_DIM, TILE, STAGES,
            SCORES, GRADS,
        )  # fmt: skip
    for j in range(done, steps):
        dk_acc, dv_acc = _step(
            dk_acc, dv_acc, operands, k_tiles, ring, exchange, dq, j, begin, dq_origin, counts_of,
            shift, scale_log2, INDEX, False, RATIOS, HAS_DQ_GROUP, HEAD_DIM, TILE, STAGES, SCORES,
            GRADS,
        )  # fmt: skip

    row = first + gl.arange(0, TILE, layout=gl.SliceLayout(1, GRADS))
    position = rho + row * rate
    partial_row = position // partial_rate
    has_partial = (row + shift) % PARTIAL_RATIO == 0
    _accumulate(
        dk_acc * softmax_scale, dk, partial_k, dk_strides, partial_strides, batch, position,
        partial_row, head, has_partial, OUT, GRADS, FIRST, LAST, HEAD_DIM,
    )  # fmt: skip
    _accumulate(
        dv_acc, dv, partial_v, dk_strides, partial_strides, batch, position, partial_row, head,
        has_partial, OUT, GRADS, FIRST, LAST, HEAD_DIM,
    )  # fmt: skip
    tma.store_wait(0)


@gluon.jit
def _accumulate(
    acc, grad, partial, grad_strides, partial_strides, batch, position, partial_row, head,
    has_partial, OUT: gl.constexpr, LAYOUT: gl.constexpr, FIRST: gl.constexpr, LAST: gl.constexpr,
    HEAD_DIM: gl.constexpr,
):  # fmt: skip
    """Add the sparser branches' partial to a tile's gradient and store it."""
    dims = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, LAYOUT))
    rows = (
        partial + batch.to(gl.int64) * partial_strides[0] + head.to(gl.int64) * partial_strides[2]
    )
    partial_rows = rows + partial_row.to(gl.int64)[:, None] * partial_strides[1] + dims[None, :]
    if not FIRST:
        acc += gl.load(partial_rows, mask=has_partial[:, None] & (dims >= 0)[None, :], other=0.0)
    if LAST:
        value = gl.convert_layout(acc.to(grad.dtype.element_ty), OUT)
        place = gl.convert_layout(position, gl.SliceLayout(1, OUT)).to(gl.int64)
        dims = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, OUT))
        rows = grad + batch.to(gl.int64) * grad_strides[0] + head.to(gl.int64) * grad_strides[2]
        gl.store(rows + place[:, None] * grad_strides[1] + dims[None, :], value)
    else:
        gl.store(partial_rows, acc)


@gluon.jit
def backward(
    q, k, v, do, dq, lse, delta, dk, dv, partial_k, partial_v, q_strides, k_strides, v_strides,
    do_strides, dk_strides, partial_strides, delta_stride, tokens, heads, first_head, group, rate,
    segment, inner, partial_rate, scale_log2, softmax_scale,
    RATIOS: gl.constexpr, SKIP_INNER: gl.constexpr, FIRST: gl.constexpr, LAST: gl.constexpr,
    HEAD_DIM: gl.constexpr, TILE: gl.constexpr, STAGES: gl.constexpr, PARTIAL_RATIO: gl.constexpr,
):  # fmt: skip
    """dK and dV of two tiles of keys of one branch, per query head; what they give dQ is added.

    q, k, v, do and dq are descriptors of matrices (rows, rate · token stride), dq in float32 and
    not yet scaled.
    """
    SHORT: gl.constexpr = period_of(RATIOS, TILE) <= LONGEST_PERIOD
    HAS_DQ_GROUP: gl.constexpr = HEAD_DIM == 64 and SHORT
    batch, head = gl.program_id(1) // heads, gl.program_id(1) % heads
    length = inner if SKIP_INNER else segment
    tiles = length // (2 * TILE)
    pid = gl.program_id(0)
    start = pid // tiles * length
    outer = start // segment * segment
    first = start + pid % tiles * 2 * TILE
    rho = (first_head + head) % rate
    shift = (rho - first_head - head) // rate
    q_origin, q_column = place(q_strides, batch, rho, head, rate)
    do_origin, do_column = place(do_strides, batch, rho, head, rate)
    k_origin, k_column = place(k_strides, batch, rho, head // group, rate)
    v_origin, v_column = place(v_strides, batch, rho, head // group, rate)
    dq_origin = batch * (tokens // rate), (rho * heads + head) * HEAD_DIM
    lse += gl.program_id(1).to(gl.int64) * delta_stride + rho
    delta += gl.program_id(1).to(gl.int64) * delta_stride + rho
    begin = start + inner if SKIP_INNER else first
    steps = (outer + segment - begin) // TILE

    k_tiles = gl.allocate_shared_memory(k.dtype, [2, TILE, HEAD_DIM], k.layout)
    v_tiles = gl.allocate_shared_memory(v.dtype, [2, TILE, HEAD_DIM], v.layout)
    q_tiles = gl.allocate_shared_memory(q.dtype, [STAGES, TILE, HEAD_DIM], q.layout)
    do_tiles = gl.allocate_shared_memory(q.dtype, [STAGES, TILE, HEAD_DIM], q.layout)
    DS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([TILE, TILE], gl.float16)
    ds_tiles = gl.allocate_shared_memory(q.dtype, [4, TILE, TILE], DS)
    dq_tile = gl.allocate_shared_memory(gl.float32, dq.block_shape, dq.layout)
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    lse_tiles = gl.allocate_shared_memory(gl.float32, [STAGES, TILE], PLAIN)
    delta_tiles = gl.allocate_shared_memory(gl.float32, [STAGES, TILE], PLAIN)
    keys_ready = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    ds_ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    ds_free = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    mbarrier.init(keys_ready.index(0), count=1)
    for i in gl.static_range(2):
        mbarrier.init(ds_ready.index(i), count=2 if HAS_DQ_GROUP else 1)
        mbarrier.init(ds_free.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(ready.index(i), count=2)
        mbarrier.init(free.index(i), count=2)
    fence_async_shared()
    keys = k_tiles, v_tiles, keys_ready
    ring = q_tiles, do_tiles, lse_tiles, delta_tiles, ready, free
    exchange = ds_tiles, ds_ready, ds_free, dq_tile
    results = dk, dv, partial_k, partial_v, dk_strides, partial_strides
    rows = batch, head, first, rho, shift, rate, partial_rate
    inputs = (
        q, k, v, do, lse, delta, q_origin, q_column, k_origin + first, k_column, v_origin + first,
        v_column, do_origin, do_column,
    )  # fmt: skip
    shared = (
        keys, ring, exchange, dq, results, rows, begin, steps, dq_origin, scale_log2, softmax_scale,
    )  # fmt: skip
    if HAS_DQ_GROUP:
        gl.warp_specialize(
            [
                (_consume, (
                    shared, 0, RATIOS, SKIP_INNER, FIRST, LAST, HEAD_DIM, TILE, STAGES,
                    PARTIAL_RATIO, True,
                )),
                (_consume, (
                    shared, 1, RATIOS, SKIP_INNER, FIRST, LAST, HEAD_DIM, TILE, STAGES,
                    PARTIAL_RATIO, True,
                )),
                (_sum_dq, (
                    keys, exchange, dq, begin, steps, dq_origin, SKIP_INNER, HEAD_DIM, TILE,
                )),
                (_load, (keys, ring, inputs, begin, steps, rate, TILE, STAGES)),
            ],
            [4, 4, 1],
            [REGISTERS_BESIDE_DQ, DQ_REGISTERS, LOADER_REGISTERS],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_consume, (
                    shared, 0, RATIOS, SKIP_INNER, FIRST, LAST, HEAD_DIM, TILE, STAGES,
                    PARTIAL_RATIO, False,
                )),
                (_consume, (
                    shared, 1, RATIOS, SKIP_INNER, FIRST, LAST, HEAD_DIM, TILE, STAGES,
                    PARTIAL_RATIO, False,
                )),
                (_load, (keys, ring, inputs, begin, steps, rate, TILE, STAGES)),
            ],
            [4, 1],
            [REGISTERS, LOADER_REGISTERS],
        )  # fmt: skip
