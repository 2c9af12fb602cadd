"""Triton kernels of one branch, reading and writing (batch, tokens, heads, head_dim) in place.

Rows. Head h of branch (w, r) keeps the positions p = ρ + r·t with ρ = h mod r. Here `t` is the row:
a segment is w/r consecutive rows, and a tile of rows is a strided read, done by the copy engine
through a descriptor of (batch, rows, rate, heads, dims).

Each pair once. In a nested pattern two positions of one branch that share a segment of the branch
inside it have met there already. The branch then visits only pairs of *different* inner segments
(CROSS, with `inner` rows each), and how often a pair counts enters as a bias: with c(p) the number
of rates r_j, from this branch outwards, whose residue h mod r_j position p keeps, the pair (p, k)
counts min(c(p), c(k)) times, since an outer branch keeps only positions that the inner ones keep.

Joined in place. Branches run from the sparsest to the densest. Each takes up the running result of
its rows (float32, normalised, with a base-2 log-sum-exp), adds its own pairs and puts it back; the
densest, LAST, writes the output. Gradients are chained in the same way. No atomics: the same input
gives the same bits.

Ids. With IDS a query sees a key only where their 64-bit ids are equal: documents and padding.

Lists. With LISTED the rows of a segment fall into blocks of `block` rows, and only listed pairs of
blocks are visited: row i of a CSR matrix (`offsets`, `blocks`) names the other side's blocks. Under
causality the lists leave out a block's pairing with itself, which is masked.
"""

from __future__ import annotations

import triton
import triton.language as tl

# mypy: ignore-errors


@triton.jit
def _place(pid, head, tokens, rate, segment, inner, CROSS: tl.constexpr, TILE: tl.constexpr):
    """A program's tile: its first row, its run [start, end), and its segment [outer, outer_end).

    A run is a segment or, under CROSS, the inner segment whose own pairs are not visited.
    """
    rows = tl.cdiv(tokens - head % rate, rate)
    length = inner if CROSS else segment
    tiles = tl.cdiv(length, TILE)
    start = pid // tiles * length
    outer = start // segment * segment
    first = start + pid % tiles * TILE
    return first, start, tl.minimum(start + length, rows), outer, tl.minimum(outer + segment, rows)


@triton.jit
def _pointers(base, strides, batch, position, head, DIMS: tl.constexpr):
    """Where rows of a (batch, tokens, heads, dims) tensor lie: (rows, DIMS)."""
    rows = base + batch.to(tl.int64) * strides[0] + head.to(tl.int64) * strides[2]
    return rows + position.to(tl.int64)[:, None] * strides[1] + tl.arange(0, DIMS)[None, :]


@triton.jit
def _tile(x, batch, row, rho, head, TILE: tl.constexpr, DIMS: tl.constexpr):
    """TILE rows of a descriptor as (TILE, DIMS).

    For the operand that changes within a loop. The one that stays is read by plain loads: from a
    descriptor Triton 3.6 would keep it in registers, and the second tile would then read garbage.
    """
    return x.load([batch, row, rho, head, 0]).reshape(TILE, DIMS)


@triton.jit
def _listed(i, origin, blocks, block, LISTED: tl.constexpr):
    """The row that step i of a loop begins at: itself, or as the list of blocks says."""
    if LISTED:
        i = origin + tl.load(blocks + i // block) * block + i % block
    return i


@triton.jit
def _levels(row, shift, RATIOS: tl.constexpr):
    """log2 of the number of branches, from this one outwards, that keep each row."""
    count = tl.full(row.shape, 1.0, tl.float32)
    for j in tl.static_range(len(RATIOS)):
        count += tl.where((row + shift) % RATIOS[j] == 0, 1.0, 0.0)
    return tl.log2(count)


@triton.jit
def _scores(
    a, b, row_a, row_b, id_a, id_b, level_a, level_b, valid_b, scale,
    BIASED: tl.constexpr, IDS: tl.constexpr, EDGE: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """Base-2 scores of the rows `a` (a, dims) with the rows `b`: (a, b); unseen pairs are -inf.

    CAUSAL is 1 where `a` are queries, 2 where `b` are, 0 for none.
    """
    x = tl.dot(a, tl.trans(b), input_precision="ieee") * scale
    if BIASED:
        x += tl.minimum(level_a[:, None], level_b[None, :])
    if EDGE:
        seen = valid_b[None, :]
        if CAUSAL == 1:
            seen = seen & (row_b[None, :] <= row_a[:, None])
        if CAUSAL == 2:
            seen = seen & (row_b[None, :] >= row_a[:, None])
        x = tl.where(seen, x, float("-inf"))
    if IDS:
        x = tl.where(id_a[:, None] == id_b[None, :], x, float("-inf"))
    return x


@triton.jit
def _keys_of(
    first, start, end, outer, offsets, block,
    CROSS: tl.constexpr, CAUSAL: tl.constexpr, LISTED: tl.constexpr,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr,
):  # fmt: skip
    """What a tile of queries visits: steps [begin, middle), then rows [edge, stop) with masks.

    And where its list begins.
    """
    if CROSS:
        stop = start
    elif CAUSAL:
        stop = tl.minimum(first + TILE_M, end)
    else:
        stop = end
    if LISTED:
        own = (first - outer) // block
        listed = tl.load(offsets + own)
        begin, middle = 0, (tl.load(offsets + own + 1) - listed).to(tl.int32) * block
        edge = outer + own * block if CAUSAL else stop
    else:
        whole = first if CAUSAL and not CROSS else stop
        begin, middle = outer, outer + (whole - outer) // TILE_N * TILE_N
        edge, listed = middle, 0
    return begin, middle, edge, stop, listed


@triton.jit
def _take_in(
    acc, total, top, queries, row, q_id, q_level, k_level, k, v, k_ids, blocks, block,
    batch, rho, head, rate, origin, start, stop, end, scale,
    LISTED: tl.constexpr, BIASED: tl.constexpr, IDS: tl.constexpr, EDGE: tl.constexpr,
    CAUSAL: tl.constexpr, TILE_N: tl.constexpr, DIMS: tl.constexpr,
):  # fmt: skip
    """Online softmax over the keys of the steps [start, stop) that lie below `end`."""
    for i in tl.range(start, stop, TILE_N):
        n = _listed(i, origin, blocks, block, LISTED)
        col = n + tl.arange(0, TILE_N)
        valid = col < end
        keys = _tile(k, batch, n, rho, head, TILE_N, DIMS)
        k_id = tl.load(k_ids + col.to(tl.int64) * rate, mask=valid) if IDS else col
        x = _scores(
            queries, keys, row, col, q_id, k_id, q_level, k_level, valid, scale,
            BIASED, IDS, EDGE, CAUSAL,
        )  # fmt: skip
        new_top = tl.maximum(top, tl.max(x, 1))
        safe = tl.where(new_top == float("-inf"), 0.0, new_top) if IDS else new_top
        p = tl.exp2(x - safe[:, None])
        decay = tl.exp2(top - safe)
        total = total * decay + tl.sum(p, 1)
        values = _tile(v, batch, n, rho, head, TILE_N, DIMS)
        acc = tl.dot(p.to(values.dtype), values, acc * decay[:, None], input_precision="ieee")
        top = new_top
    return acc, total, top


@triton.jit
def forward(
    q, k, v, out, partial, lse, q_ids, k_ids, offsets, blocks,
    q_strides, out_strides, partial_strides, lse_strides, id_stride,
    tokens, heads, first_head, group, rate, segment, inner, partial_rate, block, scale,
    RATIOS: tl.constexpr, CROSS: tl.constexpr, CAUSAL: tl.constexpr, FIRST: tl.constexpr,
    LAST: tl.constexpr, EVEN: tl.constexpr, LISTED: tl.constexpr, IDS: tl.constexpr,
    HEAD_DIM: tl.constexpr, DIMS: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr,
):  # fmt: skip
    """A tile of queries of one branch: its share joined to `partial`, or to `out` by the LAST."""
    batch, head = tl.program_id(1) // heads, tl.program_id(1) % heads
    pid = tl.num_programs(0) - 1 - tl.program_id(0)  # the longest rows first
    first, start, end, outer, outer_end = _place(
        pid, first_head + head, tokens, rate, segment, inner, CROSS, TILE_M
    )
    if first >= end or (CROSS and CAUSAL and start == outer):
        return
    rho = (first_head + head) % rate
    shift = (rho - first_head - head) // rate
    row = first + tl.arange(0, TILE_M)
    valid = row < end
    position = rho + row * rate
    inside = valid[:, None] & (tl.arange(0, DIMS) < HEAD_DIM)[None, :]
    lse_rows = (
        lse + batch.to(tl.int64) * lse_strides[0] + head.to(tl.int64) * lse_strides[1] + position
    )
    partial_rows = _pointers(partial, partial_strides, batch, position // partial_rate, head, DIMS)
    ids = batch.to(tl.int64) * id_stride

    q_rows = _pointers(q, q_strides, batch, position, head, DIMS)
    queries = tl.load(q_rows, mask=inside, other=0.0)
    q_id = tl.load(q_ids + ids + position, mask=valid) if IDS else row
    if FIRST:
        top = tl.full([TILE_M], float("-inf"), tl.float32)
        total = tl.zeros([TILE_M], tl.float32)
        acc = tl.zeros([TILE_M, DIMS], tl.float32)
    else:
        top = tl.load(lse_rows, mask=valid, other=float("-inf"))
        known = top > float("-inf")
        total = tl.where(known, 1.0, 0.0)
        acc = tl.load(partial_rows, mask=inside & known[:, None], other=0.0)
    BIASED: tl.constexpr = len(RATIOS) > 0
    q_level = _levels(row, shift, RATIOS)
    k_level = _levels(tl.arange(0, TILE_N), shift, RATIOS)  # tiles begin at multiples of the ratios

    DIAGONAL: tl.constexpr = CAUSAL and not CROSS
    begin, middle, edge, stop, listed = _keys_of(
        first, start, end, outer, offsets, block, CROSS, CAUSAL, LISTED, TILE_M, TILE_N
    )
    acc, total, top = _take_in(
        acc, total, top, queries, row, q_id, q_level, k_level, k, v, k_ids + ids + rho,
        blocks + listed, block, batch, rho, head // group, rate, outer, begin, middle, outer_end,
        scale, LISTED, BIASED, IDS, LISTED and not CAUSAL, 0, TILE_N, DIMS,
    )  # fmt: skip
    if DIAGONAL or not EVEN:
        acc, total, top = _take_in(
            acc, total, top, queries, row, q_id, q_level, k_level, k, v, k_ids + ids + rho, blocks,
            block, batch, rho, head // group, rate, outer, edge, stop, stop, scale,
            False, BIASED, IDS, True, 1 if DIAGONAL else 0, TILE_N, DIMS,
        )  # fmt: skip
    if CROSS and not CAUSAL:
        acc, total, top = _take_in(
            acc, total, top, queries, row, q_id, q_level, k_level, k, v, k_ids + ids + rho, blocks,
            block, batch, rho, head // group, rate, outer, start + inner, outer_end, outer_end,
            scale, False, BIASED, IDS, True, 0, TILE_N, DIMS,
        )  # fmt: skip

    acc = acc / tl.where(total > 0, total, 1.0)[:, None]
    tl.store(lse_rows, top + tl.log2(total), mask=valid)
    if LAST:
        out_rows = _pointers(out, out_strides, batch, position, head, DIMS)
        tl.store(out_rows, acc.to(out.dtype.element_ty), mask=inside)
    else:
        tl.store(partial_rows, acc, mask=inside)


@triton.jit
def prepare_backward(
    out, grad, lse, delta, limit, out_strides, grad_strides, lse_strides, tokens, heads,
    HEAD_DIM: tl.constexpr, DIMS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """delta = rowsum(dO ∘ O); limit = the log-sum-exp, +inf for queries that see nothing."""
    batch, head = tl.program_id(1) // heads, tl.program_id(1) % heads
    row = tl.program_id(0) * TILE + tl.arange(0, TILE)
    valid = row < tokens
    inside = valid[:, None] & (tl.arange(0, DIMS) < HEAD_DIM)[None, :]
    o = tl.load(_pointers(out, out_strides, batch, row, head, DIMS), mask=inside, other=0.0)
    g = tl.load(_pointers(grad, grad_strides, batch, row, head, DIMS), mask=inside, other=0.0)
    place = batch.to(tl.int64) * lse_strides[0] + head.to(tl.int64) * lse_strides[1] + row
    tl.store(delta + place, tl.sum(o.to(tl.float32) * g.to(tl.float32), 1), mask=valid)
    x = tl.load(lse + place, mask=valid)
    tl.store(limit + place, tl.where(x == float("-inf"), float("inf"), x), mask=valid)


@triton.jit
def _put(
    acc, grad, partial, grad_strides, partial_strides, batch, position, head, row, shift, inside,
    partial_rate, RATIOS: tl.constexpr, FIRST: tl.constexpr, LAST: tl.constexpr,
    DIMS: tl.constexpr,
):  # fmt: skip
    """Join a tile's gradient to the sparser branches' share and store it.

    In a nested pattern (RATIOS) those have written the rows they keep, else all of them.
    """
    partial_rows = _pointers(partial, partial_strides, batch, position // partial_rate, head, DIMS)
    if not FIRST:
        known = inside
        if len(RATIOS) > 0:
            known = known & ((row + shift) % RATIOS[0] == 0)[:, None]
        acc += tl.load(partial_rows, mask=known, other=0.0)
    if LAST:
        rows = _pointers(grad, grad_strides, batch, position, head, DIMS)
        tl.store(rows, acc.to(grad.dtype.element_ty), mask=inside)
    else:
        tl.store(partial_rows, acc, mask=inside)


@triton.jit
def _gather_query_grad(
    acc, queries, grads, row, q_id, q_level, limit, delta, k_level, k, v, k_ids, blocks, block,
    batch, rho, head, rate, origin, start, stop, end, scale,
    LISTED: tl.constexpr, BIASED: tl.constexpr, IDS: tl.constexpr, EDGE: tl.constexpr,
    CAUSAL: tl.constexpr, TILE_N: tl.constexpr, DIMS: tl.constexpr,
):  # fmt: skip
    """dQ = [P ∘ (dO Vᵀ − δ)] K over the keys of the steps [start, stop) that lie below `end`."""
    for i in tl.range(start, stop, TILE_N):
        n = _listed(i, origin, blocks, block, LISTED)
        col = n + tl.arange(0, TILE_N)
        valid = col < end
        keys = _tile(k, batch, n, rho, head, TILE_N, DIMS)
        values = _tile(v, batch, n, rho, head, TILE_N, DIMS)
        k_id = tl.load(k_ids + col.to(tl.int64) * rate, mask=valid) if IDS else col
        x = _scores(
            queries, keys, row, col, q_id, k_id, q_level, k_level, valid, scale,
            BIASED, IDS, EDGE, CAUSAL,
        )  # fmt: skip
        p = tl.exp2(x - limit[:, None])
        slope = tl.dot(grads, tl.trans(values), input_precision="ieee")
        change = p * (slope - delta[:, None])
        acc = tl.dot(change.to(keys.dtype), keys, acc, input_precision="ieee")
    return acc


@triton.jit
def query_grad(
    q, k, v, grad, limit, delta, grad_q, partial, q_ids, k_ids, offsets, blocks,
    q_strides, grad_strides, grad_q_strides, partial_strides, lse_strides, id_stride,
    tokens, heads, first_head, group, rate, segment, inner, partial_rate, block, scale,
    natural_scale,
    RATIOS: tl.constexpr, CROSS: tl.constexpr, CAUSAL: tl.constexpr, FIRST: tl.constexpr,
    LAST: tl.constexpr, EVEN: tl.constexpr, LISTED: tl.constexpr, IDS: tl.constexpr,
    HEAD_DIM: tl.constexpr, DIMS: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr,
):  # fmt: skip
    """The gradient of a tile of queries of one branch."""
    batch, head = tl.program_id(1) // heads, tl.program_id(1) % heads
    pid = tl.num_programs(0) - 1 - tl.program_id(0)
    first, start, end, outer, outer_end = _place(
        pid, first_head + head, tokens, rate, segment, inner, CROSS, TILE_M
    )
    if first >= end:
        return
    rho = (first_head + head) % rate
    shift = (rho - first_head - head) // rate
    row = first + tl.arange(0, TILE_M)
    valid = row < end
    position = rho + row * rate
    inside = valid[:, None] & (tl.arange(0, DIMS) < HEAD_DIM)[None, :]
    lse_place = batch.to(tl.int64) * lse_strides[0] + head.to(tl.int64) * lse_strides[1] + position
    ids = batch.to(tl.int64) * id_stride

    q_rows = _pointers(q, q_strides, batch, position, head, DIMS)
    queries = tl.load(q_rows, mask=inside, other=0.0)
    grad_rows = _pointers(grad, grad_strides, batch, position, head, DIMS)
    grads = tl.load(grad_rows, mask=inside, other=0.0)
    tops = tl.load(limit + lse_place, mask=valid, other=float("inf"))
    means = tl.load(delta + lse_place, mask=valid, other=0.0)
    q_id = tl.load(q_ids + ids + position, mask=valid) if IDS else row
    BIASED: tl.constexpr = len(RATIOS) > 0
    q_level = _levels(row, shift, RATIOS)
    k_level = _levels(tl.arange(0, TILE_N), shift, RATIOS)
    acc = tl.zeros([TILE_M, DIMS], tl.float32)

    DIAGONAL: tl.constexpr = CAUSAL and not CROSS
    begin, middle, edge, stop, listed = _keys_of(
        first, start, end, outer, offsets, block, CROSS, CAUSAL, LISTED, TILE_M, TILE_N
    )
    acc = _gather_query_grad(
        acc, queries, grads, row, q_id, q_level, tops, means, k_level, k, v, k_ids + ids + rho,
        blocks + listed, block, batch, rho, head // group, rate, outer, begin, middle, outer_end,
        scale, LISTED, BIASED, IDS, LISTED and not CAUSAL, 0, TILE_N, DIMS,
    )  # fmt: skip
    if DIAGONAL or not EVEN:
        acc = _gather_query_grad(
            acc, queries, grads, row, q_id, q_level, tops, means, k_level, k, v, k_ids + ids + rho,
            blocks, block, batch, rho, head // group, rate, outer, edge, stop, stop, scale,
            False, BIASED, IDS, True, 1 if DIAGONAL else 0, TILE_N, DIMS,
        )  # fmt: skip
    if CROSS and not CAUSAL:
        acc = _gather_query_grad(
            acc, queries, grads, row, q_id, q_level, tops, means, k_level, k, v, k_ids + ids + rho,
            blocks, block, batch, rho, head // group, rate, outer, start + inner, outer_end,
            outer_end, scale, False, BIASED, IDS, True, 0, TILE_N, DIMS,
        )  # fmt: skip
    _put(
        acc * natural_scale, grad_q, partial, grad_q_strides, partial_strides, batch, position,
        head, row, shift, inside, partial_rate, RATIOS, FIRST, LAST, DIMS,
    )  # fmt: skip


@triton.jit
def _gather_key_grad(
    acc_k, acc_v, keys, values, col, k_id, k_level, q_level, q, grad, limit, delta, q_ids, blocks,
    block, batch, rho, head, rate, origin, start, stop, end, scale,
    LISTED: tl.constexpr, BIASED: tl.constexpr, IDS: tl.constexpr, EDGE: tl.constexpr,
    CAUSAL: tl.constexpr, TILE_M: tl.constexpr, DIMS: tl.constexpr,
):  # fmt: skip
    """dV = Pᵀ dO and dK = [P ∘ (dO Vᵀ − δ)]ᵀ Q over the queries of [start, stop) below `end`."""
    for i in tl.range(start, stop, TILE_M):
        m = _listed(i, origin, blocks, block, LISTED)
        row = m + tl.arange(0, TILE_M)
        valid = row < end
        place = row * rate
        queries = _tile(q, batch, m, rho, head, TILE_M, DIMS)
        grads = _tile(grad, batch, m, rho, head, TILE_M, DIMS)
        if EDGE:
            tops = tl.load(limit + place, mask=valid, other=float("inf"))
            means = tl.load(delta + place, mask=valid, other=0.0)
        else:
            tops = tl.load(limit + place)
            means = tl.load(delta + place)
        q_id = tl.load(q_ids + place, mask=valid) if IDS else row
        x = _scores(
            keys, queries, col, row, k_id, q_id, k_level, q_level, valid, scale,
            BIASED, IDS, EDGE, CAUSAL,
        )  # fmt: skip
        p = tl.exp2(x - tops[None, :])
        acc_v = tl.dot(p.to(grads.dtype), grads, acc_v, input_precision="ieee")
        slope = tl.dot(values, tl.trans(grads), input_precision="ieee")
        change = p * (slope - means[None, :])
        acc_k = tl.dot(change.to(queries.dtype), queries, acc_k, input_precision="ieee")
    return acc_k, acc_v


@triton.jit
def key_grad(
    q, k, v, grad, limit, delta, grad_k, grad_v, partial_k, partial_v, q_ids, k_ids, offsets,
    blocks, k_strides, v_strides, grad_k_strides, partial_strides, lse_strides, id_stride,
    tokens, heads, first_head, group, rate, segment, inner, partial_rate, block, scale,
    natural_scale,
    RATIOS: tl.constexpr, CROSS: tl.constexpr, CAUSAL: tl.constexpr, FIRST: tl.constexpr,
    LAST: tl.constexpr, EVEN: tl.constexpr, LISTED: tl.constexpr, IDS: tl.constexpr,
    HEAD_DIM: tl.constexpr, DIMS: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr,
):  # fmt: skip
    """The gradients of a tile of keys and values of one branch, per query head."""
    batch, head = tl.program_id(1) // heads, tl.program_id(1) % heads
    first, start, end, outer, outer_end = _place(
        tl.program_id(0), first_head + head, tokens, rate, segment, inner, CROSS, TILE_N
    )
    if first >= end:
        return
    rho = (first_head + head) % rate
    shift = (rho - first_head - head) // rate
    col = first + tl.arange(0, TILE_N)
    valid = col < end
    position = rho + col * rate
    inside = valid[:, None] & (tl.arange(0, DIMS) < HEAD_DIM)[None, :]
    lse_place = batch.to(tl.int64) * lse_strides[0] + head.to(tl.int64) * lse_strides[1] + rho
    ids = batch.to(tl.int64) * id_stride

    k_rows = _pointers(k, k_strides, batch, position, head // group, DIMS)
    keys = tl.load(k_rows, mask=inside, other=0.0)
    v_rows = _pointers(v, v_strides, batch, position, head // group, DIMS)
    values = tl.load(v_rows, mask=inside, other=0.0)
    k_id = tl.load(k_ids + ids + position, mask=valid) if IDS else col
    BIASED: tl.constexpr = len(RATIOS) > 0
    k_level = _levels(col, shift, RATIOS)
    q_level = _levels(tl.arange(0, TILE_M), shift, RATIOS)
    acc_k = tl.zeros([TILE_N, DIMS], tl.float32)
    acc_v = tl.zeros([TILE_N, DIMS], tl.float32)

    begin = outer
    if CROSS:
        begin = tl.minimum(start + inner, outer_end)
    elif CAUSAL:
        begin = outer + (first - outer) // TILE_M * TILE_M
        after = first + TILE_N - outer
        STEP = block if LISTED else TILE_M
        middle = tl.minimum(outer + tl.cdiv(after, STEP) * STEP, outer_end)
        acc_k, acc_v = _gather_key_grad(
            acc_k, acc_v, keys, values, col, k_id, k_level, q_level, q, grad, limit + lse_place,
            delta + lse_place, q_ids + ids + rho, blocks, block, batch, rho, head, rate, outer,
            begin, middle, middle, scale, False, BIASED, IDS, True, 2, TILE_M, DIMS,
        )  # fmt: skip
        begin = middle
    if LISTED:
        own = (first - outer) // block
        listed = tl.load(offsets + own)
        blocks += listed
        begin, last = 0, (tl.load(offsets + own + 1) - listed).to(tl.int32) * block
    else:
        last = begin + (outer_end - begin) // TILE_M * TILE_M
    acc_k, acc_v = _gather_key_grad(
        acc_k, acc_v, keys, values, col, k_id, k_level, q_level, q, grad, limit + lse_place,
        delta + lse_place, q_ids + ids + rho, blocks, block, batch, rho, head, rate, outer,
        begin, last, outer_end, scale, LISTED, BIASED, IDS, LISTED, 0, TILE_M, DIMS,
    )  # fmt: skip
    if not LISTED and not EVEN:
        acc_k, acc_v = _gather_key_grad(
            acc_k, acc_v, keys, values, col, k_id, k_level, q_level, q, grad, limit + lse_place,
            delta + lse_place, q_ids + ids + rho, blocks, block, batch, rho, head, rate, outer,
            last, outer_end, outer_end, scale, False, BIASED, IDS, True, 0, TILE_M, DIMS,
        )  # fmt: skip
    if CROSS and not CAUSAL:
        acc_k, acc_v = _gather_key_grad(
            acc_k, acc_v, keys, values, col, k_id, k_level, q_level, q, grad, limit + lse_place,
            delta + lse_place, q_ids + ids + rho, blocks, block, batch, rho, head, rate, outer,
            outer, start, start, scale, False, BIASED, IDS, True, 0, TILE_M, DIMS,
        )  # fmt: skip
    _put(
        acc_k * natural_scale, grad_k, partial_k, grad_k_strides, partial_strides, batch, position,
        head, col, shift, inside, partial_rate, RATIOS, FIRST, LAST, DIMS,
    )  # fmt: skip
    _put(
        acc_v, grad_v, partial_v, grad_k_strides, partial_strides, batch, position,
        head, col, shift, inside, partial_rate, RATIOS, FIRST, LAST, DIMS,
    )  # fmt: skip
