"""Triton kernels of `listed`: a causal backward pass over pairs of blocks of 128, by lists.

Tensors lie as (batch · tokens, heads · head_dim). A launch takes several heads of several batch
rows, counted together from `first`; program 1 of the grid is one of them. `ds` is the scratch: a
tile of (128 keys, 128 queries) of dSᵀ per listed pair, `tiles` of them per head.
"""

from __future__ import annotations

import triton
import triton.language as tl

# mypy: ignore-errors


@triton.jit
def _gather_key_grad(
    acc_k, acc_v, keys, values, col, q, grad, limit, delta, ds, queries, slot, side, origin, column,
    begin, stop, scale, DIAGONAL: tl.constexpr, TILE_M: tl.constexpr,
):  # fmt: skip
    """dV = Pᵀ dO and dK = dSᵀ Q over the steps [begin, stop) of a key block's list."""
    for i in tl.range(begin, stop, TILE_M):
        part = i // TILE_M % (128 // TILE_M) * TILE_M  # the compiler sees what divides it
        m = tl.load(queries + i // 128) * 128 + part
        row = m + tl.arange(0, TILE_M)
        q_tile = q.load([origin + m, column])
        grads = grad.load([origin + m, column])
        tops = tl.load(limit + row)
        means = tl.load(delta + row)
        x = tl.dot(keys, tl.trans(q_tile)) * scale
        if DIAGONAL:
            x = tl.where(row[None, :] >= col[:, None], x, float("-inf"))
        p = tl.exp2(x - tops[None, :])
        acc_v = tl.dot(p.to(grads.dtype), grads, acc_v)
        slope = tl.dot(values, tl.trans(grads))
        change = (p * (slope - means[None, :])).to(q_tile.dtype)
        ds.store([(slot + i // 128) * 128 + side, part], change)
        acc_k = tl.dot(change, q_tile, acc_k)
    return acc_k, acc_v


@triton.jit
def _put(acc, grad, partial, place, part, known, FIRST: tl.constexpr, LAST: tl.constexpr):
    """Join a tile's gradient to the earlier chunks' share and store it."""
    if not FIRST:
        acc += tl.load(partial + part, mask=known, other=0.0)
    if LAST:
        tl.store(grad + place, acc.to(grad.dtype.element_ty))
    else:
        tl.store(partial + part, acc)


@triton.jit(do_not_specialize=["first", "begin", "tiles"])
def key_grad(
    q, k, v, grad, limit, delta, ds, grad_k, grad_v, partial_k, partial_v, offsets, queries, first,
    tokens, heads, group, begin, tiles, scale, natural_scale, k_stride, v_stride,
    FIRST: tl.constexpr, LAST: tl.constexpr, HEAD_DIM: tl.constexpr, TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
):  # fmt: skip
    """The gradients of a tile of keys and values from a chunk of the queries, per query head.

    The chunk's queries begin at block `begin`; a key block that lies in it has itself first in its
    list. `partial`: float32 (heads of the launch, tokens, head_dim), of the chunks before.
    """
    local = tl.program_id(1)
    batch, head = (first + local) // heads, (first + local) % heads
    origin = batch * tokens
    n = tl.program_id(0) * TILE_N
    own, side = n // 128, n % 128
    col = n + tl.arange(0, TILE_N)
    dims = tl.arange(0, HEAD_DIM)[None, :]
    row = (origin + col).to(tl.int64)[:, None]
    keys = tl.load(k + row * k_stride + head // group * HEAD_DIM + dims)
    values = tl.load(v + row * v_stride + head // group * HEAD_DIM + dims)
    limit += (first + local).to(tl.int64) * tokens
    delta += (first + local).to(tl.int64) * tokens
    acc_k = tl.zeros([TILE_N, HEAD_DIM], tl.float32)
    acc_v = tl.zeros([TILE_N, HEAD_DIM], tl.float32)

    start = tl.load(offsets + own)
    stop = (tl.load(offsets + own + 1) - start) * 128
    slot = local * tiles + start
    queries += start
    diagonal = tl.where(own >= begin, 128, 0)  # no `if`: ptxas would serialise every product
    acc_k, acc_v = _gather_key_grad(
        acc_k, acc_v, keys, values, col, q, grad, limit, delta, ds, queries, slot, side, origin,
        head * HEAD_DIM, 0, diagonal, scale, True, TILE_M,
    )  # fmt: skip
    acc_k, acc_v = _gather_key_grad(
        acc_k, acc_v, keys, values, col, q, grad, limit, delta, ds, queries, slot, side, origin,
        head * HEAD_DIM, diagonal, stop, scale, False, TILE_M,
    )  # fmt: skip

    place = row * heads * HEAD_DIM + head * HEAD_DIM + dims
    part = (local * tokens + col).to(tl.int64)[:, None] * HEAD_DIM + dims
    known = (col < begin * 128)[:, None]
    _put(acc_k * natural_scale, grad_k, partial_k, place, part, known, FIRST, LAST)
    _put(acc_v, grad_v, partial_v, place, part, known, FIRST, LAST)


@triton.jit(do_not_specialize=["first", "end", "tiles"])
def query_grad(
    ds, k, grad_q, offsets, keys, slots, first, tokens, heads, group, end, tiles, natural_scale,
    HEAD_DIM: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr,
):  # fmt: skip
    """dQ = dS K of a tile of queries, of a chunk that ends at block `end`."""
    local = tl.program_id(1)
    batch, head = (first + local) // heads, (first + local) % heads
    origin = batch * tokens
    m = end * 128 - (tl.program_id(0) + 1) * TILE_M  # the longest lists first
    own, side = m // 128, m % 128
    start = tl.load(offsets + own)
    stop = (tl.load(offsets + own + 1) - start).to(tl.int32) * 128
    keys += start
    slots += start
    acc = tl.zeros([TILE_M, HEAD_DIM], tl.float32)
    for i in tl.range(0, stop, TILE_N):
        part = i // TILE_N % (128 // TILE_N) * TILE_N
        n = tl.load(keys + i // 128) * 128 + part
        slot = local * tiles + tl.load(slots + i // 128)
        change = ds.load([slot * 128 + part, side])
        k_tile = k.load([origin + n, head // group * HEAD_DIM])
        acc = tl.dot(tl.trans(change), k_tile, acc)
    row = (origin + m + tl.arange(0, TILE_M)).to(tl.int64)[:, None]
    place = row * heads * HEAD_DIM + head * HEAD_DIM + tl.arange(0, HEAD_DIM)[None, :]
    tl.store(grad_q + place, (acc * natural_scale).to(grad_q.dtype.element_ty))
