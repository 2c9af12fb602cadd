"""Launches the Triton kernels: the schedule of branches, tile sizes, and bounded buffers."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from longspan.attention.kernels import block_sparse
from longspan.attention.kernels import branch as branch_kernels
from longspan.attention.kernels.block_sparse import LOG2_E
from longspan.attention.kernels.call import Call
from longspan.attention.kernels.documents import DocumentGroup
from longspan.attention.kernels.inputs import kernel_input, padded_dim, preprocess, scaled_copy
from longspan.attention.kernels.launch import Launch, launch_all, tiles_of_rows
from longspan.attention.kernels.rotary import rotate_back
from longspan.attention.pattern import Pattern

_calls = lru_cache(maxsize=64)(Call)


@lru_cache(maxsize=512)
def _launches(
    call: Call,
    name: str,
    tokens: int,
    strides: tuple[tuple[int, ...], ...],
    descriptor_strides: tuple[tuple[int, ...], ...],
    row_strides: tuple[int, int],
) -> list[Launch]:
    """The launches of one kernel over a slab of `tokens`, one per branch.

    `strides` are those of the tensors that the kernel addresses by pointers, in its order;
    `descriptor_strides` those it reads through descriptors, which a launch makes once;
    `row_strides` those between the rows of the log-sum-exp and between those of the ids.
    """
    block_size = 1 if call.blocks is None else call.blocks.block_size
    tiles, tile, step = call.tiles(name)
    scales = (call.scale * LOG2_E,) if name == "forward" else (call.scale * LOG2_E, call.scale)
    launches = []
    for branch in call.schedule.branches:
        length = branch.inner or branch.segment
        rows = -(-tokens // branch.rate)
        scalars = (
            *strides, *row_strides, tokens, call.heads, call.first_head, call.group, branch.rate,
            branch.segment, branch.inner, call.schedule.partial_rate, block_size, *scales,
        )  # fmt: skip
        constants = {
            "RATIOS": branch.ratios,
            "SKIP_INNER": branch.inner > 0,
            "CAUSAL": call.is_causal,
            "FIRST": branch.is_first,
            "LAST": branch.is_last,
            "EVEN": not call.has_documents
            and tokens % (branch.segment * branch.rate) == 0
            and length % step == 0,
            "BLOCK_SPARSE": call.blocks is not None,
            "HAS_IDS": call.has_ids,
            "HAS_DOCUMENTS": call.has_documents,
            "HEAD_DIM": call.head_dim,
            "TILE_D": padded_dim(call.head_dim),
            "TILE_M": tiles.queries,
            "TILE_N": tiles.keys,
        }
        if name != "forward":
            constants["PARTIAL_RATIO"] = branch.partial_ratio
        programs = -(-rows // length) * -(-length // tile)
        grid = (None if call.has_documents else programs, call.batch * call.heads)
        kernel = getattr(branch_kernels, name)
        describe = tiles_of_rows(branch.rate, step, padded_dim(call.head_dim))
        launches.append(Launch(kernel, grid, scalars, constants, tiles, describe))
    return launches


def _call_of(
    q: Tensor, k: Tensor, ids: tuple[Tensor, Tensor] | None, pattern: Pattern, is_causal: bool,
    scale: float, has_documents: bool = False,
) -> Call:  # fmt: skip
    batch, tokens, heads, head_dim = q.shape
    return _calls(
        batch, tokens, heads, heads // k.shape[2], head_dim, q.dtype, q.device, pattern, is_causal,
        ids is not None, has_documents, scale,
    )  # fmt: skip


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ids: tuple[Tensor, Tensor] | None,
    pattern: Pattern,
    is_causal: bool,
    scale: float,
    starts: tuple[int, ...] = (),
) -> tuple[Tensor, Tensor]:
    """The output and its base-2 log-sum-exp (batch, heads, tokens).

    q (batch, tokens, heads, head_dim); k, v the same with a divisor of q's heads; `ids`: int64
    (batch, tokens) of queries and of keys; `starts`: where documents begin, if the batch is one.
    """
    call = _call_of(q, k, ids, pattern, is_causal, scale, bool(starts))
    out = call.new_result()
    shape = (call.batch, call.heads, call.tokens)
    lse = torch.full(shape, -torch.inf, dtype=torch.float32, device=q.device)
    q, k, v = (kernel_input(x, call.unit) for x in (q, k, v))
    with torch.cuda.device_of(q):  # type: ignore[no-untyped-call]  # where Triton launches
        for group in call.groups(starts) if starts else ():
            _forward_slab(call, q, k, v, out, lse, *(ids or (lse, lse)), group)
        for slab in () if starts else call.slabs:
            padded = call.padded(slab)
            _forward_slab(
                call, _rows(q, padded), _rows(k, padded), _rows(v, padded), _rows(out, slab),
                _rows(lse, slab, 2), *_slab_ids(ids, slab, lse),
            )  # fmt: skip
    return out, lse


def _rows(x: Tensor, rows: slice, dim: int = 1) -> Tensor:
    """A slab of `x`: `x` itself if there is only one, since a view costs as much as a launch."""
    start, stop = rows.start, rows.stop
    return x if stop - start == x.shape[dim] else x.narrow(dim, start, stop - start)


def _slab_ids(
    ids: tuple[Tensor, Tensor] | None, slab: slice, unused: Tensor
) -> tuple[Tensor, Tensor]:
    return (unused, unused) if ids is None else (_rows(ids[0], slab), _rows(ids[1], slab))


def _forward_slab(
    call: Call, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, q_ids: Tensor,
    k_ids: Tensor, group: DocumentGroup | None = None,
) -> None:  # fmt: skip
    tokens = out.shape[1]
    if call.whole_segments is not None:
        call.whole_segments.forward(q, k, v, out, lse)
        return
    partial = call.new_partial(tokens, group)
    strides = q.stride()[:3], out.stride()[:3], _partial_strides(partial)
    row_strides = lse.stride(1), q_ids.stride(0) if call.has_ids else 0
    work, described = call.work("forward", group, lse), (k.stride(), v.stride())
    launches = _launches(call, "forward", tokens, strides, described, row_strides)
    pointers = [
        (
            q, launch.descriptor(0, k), launch.descriptor(1, v), out, partial, lse, q_ids, k_ids,
            *call.block_index(branch, lse, by_key=False), table,
        )
        for branch, launch, table in zip(call.schedule.branches, launches, work, strict=True)
    ]  # fmt: skip
    launch_all(launches, pointers)
    if not call.schedule.is_nested:
        _tokens_of(out, group).copy_(partial)


def _partial_strides(partial: Tensor) -> tuple[int, ...]:
    """Without that of a batch of one, which differs from one group of documents to the next."""
    batch, *others = partial.stride()[:3]
    return batch if len(partial) > 1 else 0, *others


def _tokens_of(x: Tensor, group: DocumentGroup | None) -> Tensor:
    """The tokens of a group of documents."""
    return x if group is None else x[:, group.begins[0] : group.end]


def backward(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    ids: tuple[Tensor, Tensor] | None,
    pattern: Pattern,
    is_causal: bool,
    scale: float,
    starts: tuple[int, ...] = (),
    into: tuple[Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v, given that of the output, `do`, and the results of `forward`.

    `into`: tensors that they are written to, of zeros if there are rows that no branch keeps.
    """
    call = _call_of(q, k, ids, pattern, is_causal, scale, bool(starts))
    dq = call.new_result() if into is None else into[0]
    if into is None or call.group > 1:
        dk, dv = call.new_result(), call.new_result()
    else:
        dk, dv = into[1:]
    q, k, v, do = (kernel_input(x, call.unit) for x in (q, k, v, do))
    with torch.cuda.device_of(q):  # type: ignore[no-untyped-call]
        delta, safe_lse = preprocess(do, out, lse)
        if call.has_block_sparse_backward:
            assert call.blocks is not None
            block_sparse.backward(q, k, v, do, safe_lse, delta, dq, dk, dv, call.blocks, call.scale)
        else:
            for group in call.groups(starts) if starts else ():
                inputs = _Inputs(q, k, v, do, safe_lse, delta, *(ids or (lse, lse)))
                _dq_slab(call, inputs, dq, group)
                _dkdv_slab(call, inputs, dk, dv, group)
            for slab in () if starts else call.slabs:
                padded = call.padded(slab)
                inputs = _Inputs(
                    _rows(q, padded), _rows(k, padded), _rows(v, padded), _rows(do, padded),
                    _rows(safe_lse, slab, 2), _rows(delta, slab, 2), *_slab_ids(ids, slab, lse),
                )  # fmt: skip
                _backward_slab(call, inputs, _rows(dq, slab), _rows(dk, slab), _rows(dv, slab))
    if call.group > 1:
        grouped = (call.batch, call.tokens, -1, call.group, call.head_dim)
        of_k, of_v = (None, None) if into is None else into[1:]
        dk = torch.sum(dk.view(grouped), 3, out=of_k)
        dv = torch.sum(dv.view(grouped), 3, out=of_v)
    return dq, dk, dv


class _Inputs(NamedTuple):
    """The inputs of the backward kernels over one slab."""

    q: Tensor
    k: Tensor
    v: Tensor
    do: Tensor
    lse: Tensor
    delta: Tensor
    q_ids: Tensor
    k_ids: Tensor


def _backward_slab(call: Call, inputs: _Inputs, dq: Tensor, dk: Tensor, dv: Tensor) -> None:
    if call.whole_segments is None or torch.are_deterministic_algorithms_enabled():
        _dq_slab(call, inputs, dq)
        _dkdv_slab(call, inputs, dk, dv)
        return
    q, k, v, do, lse, delta, *_ = inputs
    scaled_copy(call.whole_segments.backward(do, q, k, v, lse, delta, dk, dv), call.scale, dq)


def backward_packed(
    do: Tensor, packed: Tensor, out: Tensor, lse: Tensor, heads: int, pattern: Pattern,
    scale: float, table: Tensor,
) -> Tensor:  # fmt: skip
    """The gradient of queries, keys and values before RoPE, as heads of one tensor.

    packed (batch, tokens, heads + 2 · kv_heads, head_dim) has them after RoPE by `table`; causal
    attention of them gave `out` and `lse`.
    """
    q, k, v = parts_of(packed, heads)
    call = _call_of(q, k, None, pattern, True, scale)
    new = torch.empty_like if call.schedule.writes_every_row() else torch.zeros_like
    grads, rotated = new(packed), heads + k.shape[2]
    dq, dk, dv = parts_of(grads, heads)
    is_one_sum = call.whole_segments is not None and call.group == 1 and len(call.slabs) == 1
    if not is_one_sum or torch.are_deterministic_algorithms_enabled():
        backward(do, q, k, v, out, lse, None, pattern, True, scale, into=(dq, dk, dv))
        rotate_back(grads, None, table, rotated, 1.0)
        return grads
    assert call.whole_segments is not None
    with torch.cuda.device_of(q):  # type: ignore[no-untyped-call]
        do = kernel_input(do, call.unit)
        delta, safe_lse = preprocess(do, out, lse)
        dq_sum = call.whole_segments.backward(do, q, k, v, safe_lse, delta, dk, dv)
    rotate_back(grads, dq_sum, table, rotated, scale)
    return grads


def parts_of(packed: Tensor, heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries of so many heads, keys and values of packed (batch, tokens, all heads, head_dim)."""
    kv_heads = (packed.shape[2] - heads) // 2
    q, k, v = torch.split(packed, [heads, kv_heads, kv_heads], dim=2)
    return q, k, v


def _dq_slab(call: Call, inputs: _Inputs, dq: Tensor, group: DocumentGroup | None = None) -> None:
    q, k, v, do, lse, delta, q_ids, k_ids = inputs
    tokens = dq.shape[1]
    partial = call.new_partial(tokens, group)
    strides = (
        q.stride()[:3], do.stride()[:3], dq.stride()[:3], _partial_strides(partial),
    )  # fmt: skip
    row_strides = lse.stride(1), q_ids.stride(0) if call.has_ids else 0
    work, described = call.work("backward_dq", group, lse), (k.stride(), v.stride())
    launches = _launches(call, "backward_dq", tokens, strides, described, row_strides)
    pointers = [
        (
            q, launch.descriptor(0, k), launch.descriptor(1, v), do, lse, delta, dq, partial,
            q_ids, k_ids, *call.block_index(branch, lse, by_key=False), table,
        )
        for branch, launch, table in zip(call.schedule.branches, launches, work, strict=True)
    ]  # fmt: skip
    launch_all(launches, pointers)
    if not call.schedule.is_nested:
        _tokens_of(dq, group).copy_(partial)


def _dkdv_slab(
    call: Call, inputs: _Inputs, dk: Tensor, dv: Tensor, group: DocumentGroup | None = None
) -> None:
    q, k, v, do, lse, delta, q_ids, k_ids = inputs
    tokens = dk.shape[1]
    partial_k, partial_v = call.new_partial(tokens, group), call.new_partial(tokens, group)
    strides = (
        k.stride()[:3], v.stride()[:3], dk.stride()[:3], _partial_strides(partial_k),
    )  # fmt: skip
    row_strides = lse.stride(1), q_ids.stride(0) if call.has_ids else 0
    described = q.stride(), do.stride()
    work = call.work("backward_dkdv", group, lse)
    launches = _launches(call, "backward_dkdv", tokens, strides, described, row_strides)
    pointers = [
        (
            launch.descriptor(0, q), k, v, launch.descriptor(1, do), lse, delta, dk, dv, partial_k,
            partial_v, q_ids, k_ids, *call.block_index(branch, lse, by_key=True), table,
        )
        for branch, launch, table in zip(call.schedule.branches, launches, work, strict=True)
    ]  # fmt: skip
    launch_all(launches, pointers)
    if not call.schedule.is_nested:
        _tokens_of(dk, group).copy_(partial_k)
        _tokens_of(dv, group).copy_(partial_v)
