"""Triton kernels of `block_sparse`: a causal backward pass over the pairs of blocks in an index.

Blocks are 128 tokens. Tensors are (batch · tokens, heads · head_dim). A launch processes several
heads of several batch rows, counted together from `first`; program 1 of the grid is one of them.
`ds` is the scratch buffer: a tile (128 keys, 128 queries) of dSᵀ per pair, `tiles` of them a head.
Names are those of `branch`.
"""

from __future__ import annotations

import triton
import triton.language as tl

# mypy: ignore-errors


@triton.jit
def _dkdv_inner(
    dk_acc, dv_acc, k_tile, v_tile, col, q, do, lse, delta, ds, queries, slot, block_offset, origin,
    column, begin, stop, scale_log2, DIAGONAL: tl.constexpr, TILE_M: tl.constexpr,
):  # fmt: skip
    """dV = Pᵀ dO and dK = dSᵀ Q over the steps [begin, stop) of a key block's queries."""
    for i in tl.range(begin, stop, TILE_M):
        offset = i // TILE_M % (128 // TILE_M) * TILE_M  # a form whose divisors the compiler sees
        m = tl.load(queries + i // 128) * 128 + offset
        row = m + tl.arange(0, TILE_M)
        q_tile = q.load([origin + m, column])
        do_tile = do.load([origin + m, column])
        lse_i = tl.load(lse + row)
        delta_i = tl.load(delta + row)
        qk = tl.dot(k_tile, tl.trans(q_tile)) * scale_log2
        if DIAGONAL:
            qk = tl.where(row[None, :] >= col[:, None], qk, float("-inf"))
        p = tl.exp2(qk - lse_i[None, :])
        dv_acc = tl.dot(p.to(do_tile.dtype), do_tile, dv_acc)
        dp = tl.dot(v_tile, tl.trans(do_tile))
        ds_tile = (p * (dp - delta_i[None, :])).to(q_tile.dtype)
        ds.store([(slot + i // 128) * 128 + block_offset, offset], ds_tile)
        dk_acc = tl.dot(ds_tile, q_tile, dk_acc)
    return dk_acc, dv_acc


@triton.jit
def _accumulate(
    acc, grad, partial, offset, partial_offset, has_partial, FIRST: tl.constexpr, LAST: tl.constexpr
):
    """Add the earlier chunks' partial to a tile's gradient and store it."""
    if not FIRST:
        acc += tl.load(partial + partial_offset, mask=has_partial, other=0.0)
    if LAST:
        tl.store(grad + offset, acc.to(grad.dtype.element_ty))
    else:
        tl.store(partial + partial_offset, acc)


@triton.jit(do_not_specialize=["first", "heads", "group", "begin", "tiles"])
def backward_dkdv(
    q, k, v, do, lse, delta, ds, dk, dv, partial_k, partial_v, offsets, queries, first,
    tokens, heads, group, begin, tiles, scale_log2, softmax_scale, k_stride, v_stride,
    FIRST: tl.constexpr, LAST: tl.constexpr, HEAD_DIM: tl.constexpr, TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
):  # fmt: skip
    """dK and dV of a tile of keys from one chunk of the queries, per query head.

    The chunk begins at query block `begin`; a key block inside it comes first in its own list of
    query blocks. `partial`: float32 (heads of the launch, tokens, head_dim), from earlier chunks.
    """
    local = tl.program_id(1)
    batch, head = (first + local) // heads, (first + local) % heads
    origin = batch * tokens
    n = tl.program_id(0) * TILE_N
    block, block_offset = n // 128, n % 128
    col = n + tl.arange(0, TILE_N)
    dims = tl.arange(0, HEAD_DIM)[None, :]
    row = (origin + col).to(tl.int64)[:, None]
    k_tile = tl.load(k + row * k_stride + head // group * HEAD_DIM + dims)
    v_tile = tl.load(v + row * v_stride + head // group * HEAD_DIM + dims)
    lse += (first + local).to(tl.int64) * tokens
    delta += (first + local).to(tl.int64) * tokens
    dk_acc = tl.zeros([TILE_N, HEAD_DIM], tl.float32)
    dv_acc = tl.zeros([TILE_N, HEAD_DIM], tl.float32)

    start = tl.load(offsets + block)
    stop = (tl.load(offsets + block + 1) - start) * 128
    slot = local * tiles + start
    queries += start
    diagonal = tl.where(block >= begin, 128, 0)  # no `if`: ptxas would serialise every product
    dk_acc, dv_acc = _dkdv_inner(
        dk_acc, dv_acc, k_tile, v_tile, col, q, do, lse, delta, ds, queries, slot, block_offset,
        origin, head * HEAD_DIM, 0, diagonal, scale_log2, True, TILE_M,
    )  # fmt: skip
    dk_acc, dv_acc = _dkdv_inner(
        dk_acc, dv_acc, k_tile, v_tile, col, q, do, lse, delta, ds, queries, slot, block_offset,
        origin, head * HEAD_DIM, diagonal, stop, scale_log2, False, TILE_M,
    )  # fmt: skip

    offset = row * heads * HEAD_DIM + head * HEAD_DIM + dims
    partial_offset = (local * tokens + col).to(tl.int64)[:, None] * HEAD_DIM + dims
    has_partial = (col < begin * 128)[:, None]
    _accumulate(
        dk_acc * softmax_scale, dk, partial_k, offset, partial_offset, has_partial, FIRST, LAST
    )
    _accumulate(dv_acc, dv, partial_v, offset, partial_offset, has_partial, FIRST, LAST)


@triton.jit(do_not_specialize=["first", "heads", "group", "end", "tiles"])
def backward_dq(
    ds, k, dq, offsets, keys, slots, first, tokens, heads, group, end, tiles, softmax_scale,
    HEAD_DIM: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr,
):  # fmt: skip
    """dQ = dS K of a tile of queries, in a chunk that ends at block `end`."""
    local = tl.program_id(1)
    batch, head = (first + local) // heads, (first + local) % heads
    origin = batch * tokens
    m = end * 128 - (tl.program_id(0) + 1) * TILE_M  # the longest lists first
    block, block_offset = m // 128, m % 128
    start = tl.load(offsets + block)
    stop = (tl.load(offsets + block + 1) - start).to(tl.int32) * 128
    keys += start
    slots += start
    acc = tl.zeros([TILE_M, HEAD_DIM], tl.float32)
    for i in tl.range(0, stop, TILE_N):
        offset = i // TILE_N % (128 // TILE_N) * TILE_N
        n = tl.load(keys + i // 128) * 128 + offset
        slot = local * tiles + tl.load(slots + i // 128)
        ds_tile = ds.load([slot * 128 + offset, block_offset])
        k_tile = k.load([origin + n, head // group * HEAD_DIM])
        acc = tl.dot(tl.trans(ds_tile), k_tile, acc)
    row = (origin + m + tl.arange(0, TILE_M)).to(tl.int64)[:, None]
    out_offset = row * heads * HEAD_DIM + head * HEAD_DIM + tl.arange(0, HEAD_DIM)[None, :]
    tl.store(dq + out_offset, (acc * softmax_scale).to(dq.dtype.element_ty))
