"""Launches the kernels of a sliding window: the work tables, and the chunks of the sinks."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from longspan.attention.kernels import window_kernels
from longspan.attention.kernels.block_sparse import LOG2_E
from longspan.attention.kernels.inputs import kernel_input, padded_dim, preprocess, tiles_of
from longspan.attention.kernels.launch import Launch, launch_all, tiles_of_rows
from longspan.attention.kernels.spans import Span
from longspan.attention.merge import attend_with_sinks
from longspan.attention.window import Window

MIN_CHUNK = 1024
"""Rows of queries per chunk of `backward_sinks`, and at least as many as a window has."""
MAX_CHUNKS = 64
"""Per residue of a document: more would need more memory for their sums."""

Table = list[tuple[int, ...]]


def _rows(first: int, end: int, residue: int, dilation: int) -> tuple[int, int]:
    """The rows of a residue whose positions are in [first, end)."""
    return -((residue - first) // dilation), -((residue - end) // dilation)


def _residues(spans: tuple[Span, ...], pattern: Window) -> Iterator[tuple[Span, int]]:
    for span in spans:
        for residue in range(min(pattern.dilation, span.end)):
            yield span, residue


@lru_cache(maxsize=256)
def _query_table(
    spans: tuple[Span, ...], pattern: Window, tile: int, device: torch.device
) -> Tensor:
    """See `window_kernels.forward`: int32 (tiles, 9). The tiles with the most keys come first."""
    items: Table = []
    for span, rho in _residues(spans, pattern):
        d = pattern.dilation
        first, end = _rows(span.first, span.end, rho, d)
        first_key = _rows(span.first_key, span.end, rho, d)[0]
        key_row, key_rho = divmod(span.key + rho, d)
        fixed = rho, end, first_key, span.query, key_row, key_rho, span.sink, span.end
        items += ((row, *fixed) for row in range(first, end, tile))
    items.sort(key=lambda item: -min(item[0] - item[3], pattern.window))
    return _on_device(items, device)


class _Sinks(NamedTuple):
    """The chunks of `backward_sinks`, and those of each tile of sinks."""

    items: Table
    slots: dict[tuple[Span, int, int], tuple[int, int]]
    """By document, residue and first row of the tile."""


@lru_cache(maxsize=256)
def _sinks(spans: tuple[Span, ...], pattern: Window, tile: int, is_causal: bool) -> _Sinks:
    items: Table = []
    slots = {}
    d = pattern.dilation
    for span, sigma in _residues(spans, pattern):
        end = _rows(0, min(pattern.sinks, span.end), sigma, d)[1]
        for tile_row in range(0, end, tile):
            before = len(items)
            for rho in range(min(d, span.end)):
                first, stop = _rows(span.first, span.end, rho, d)
                if is_causal:  # queries before have the tile in their windows
                    first = max(first, tile_row + (pattern.window if rho == sigma else 0))
                chunk = max(MIN_CHUNK, pattern.window, -(-(stop - first) // MAX_CHUNKS))
                query_row, query_rho = divmod(span.query + rho, d)
                items += (
                    (
                        tile_row, sigma, end, rho, begin, min(begin + chunk, stop), query_row,
                        query_rho, span.sink,
                    )
                    for begin in range(first, stop, chunk)
                )  # fmt: skip
            slots[span, sigma, tile_row] = before, len(items)
    return _Sinks(items, slots)


@lru_cache(maxsize=256)
def _sink_table(
    spans: tuple[Span, ...], pattern: Window, tile: int, is_causal: bool, device: torch.device
) -> Tensor:
    """See `window_kernels.backward_sinks`: int32 (chunks, 9)."""
    return _on_device(_sinks(spans, pattern, tile, is_causal).items, device)


@lru_cache(maxsize=256)
def _key_table(
    spans: tuple[Span, ...], pattern: Window, tile: int, is_causal: bool, device: torch.device
) -> Tensor:
    """See `window_kernels.backward_dkdv`: int32 (tiles, 9)."""
    items: Table = []
    slots, d = _sinks(spans, pattern, tile, is_causal).slots, pattern.dilation
    for span, sigma in _residues(spans, pattern):
        first, end = _rows(span.first_key, span.end, sigma, d)
        queries = _rows(span.first, span.end, sigma, d)
        place = divmod(span.query + sigma, d)
        none = 0, 0
        is_apart = span.sink != span.key
        if is_apart:  # such sinks are in no window
            last = _rows(0, min(pattern.sinks, span.end), sigma, d)[1]
            items += (
                (row, last, span.sink + sigma, 0, 0, *place, *slots[span, sigma, row])
                for row in range(0, last, tile)
            )
        for row in range(first, end, tile):
            found = none if is_apart else slots.get((span, sigma, row), none)
            items.append((row, end, span.key + sigma, *queries, *place, *found))
    items.sort(key=lambda item: -min(item[4] - item[0], pattern.window))
    return _on_device(items, device)


def _on_device(items: Table, device: torch.device) -> Tensor:
    return torch.from_numpy(np.array(items, dtype=np.int32)).to(device, non_blocking=True)


class _Call(NamedTuple):
    """What the launches of one attention share."""

    batch: int
    heads: int
    group: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device
    pattern: Window
    is_causal: bool
    has_ids: bool
    scale: float


@lru_cache(maxsize=256)
def _launch(
    call: _Call,
    name: str,
    shapes: tuple[tuple[int, ...], ...],
    strides: tuple[tuple[int, ...], ...],
    row_strides: tuple[int, int],
) -> Launch:
    """One kernel. `shapes`: those of the tensors that it reads through descriptors, with strides;
    `strides`: of those that it addresses by pointers; `row_strides`: of the log-sum-exp, of ids.
    """  # fmt: skip
    is_by_key = name in ("backward_dkdv", "backward_sinks")
    tiles = tiles_of("backward_dkdv" if is_by_key else name, call.head_dim, call.dtype)
    pattern, scale_log2 = call.pattern, call.scale * LOG2_E
    scales = (scale_log2,) if name in ("forward", "backward_sinks") else (scale_log2, call.scale)
    sinks = () if is_by_key else (pattern.sinks,)
    dims = padded_dim(call.head_dim)
    scalars = (
        *strides, *row_strides, call.heads, call.group, pattern.dilation, pattern.window - 1,
        *sinks, *scales,
    )  # fmt: skip
    constants = {
        "CAUSAL": call.is_causal,
        **({} if is_by_key else {"HAS_SINKS": pattern.sinks > 0}),
        "HAS_IDS": call.has_ids,
        "HEAD_DIM": call.head_dim,
        "TILE_D": dims,
        "TILE_M": tiles.queries,
        "TILE_N": tiles.keys,
    }
    describe = tiles_of_rows(pattern.dilation, tiles.queries if is_by_key else tiles.keys, dims)
    grid, kernel = (None, call.batch * call.heads), getattr(window_kernels, name)
    return Launch(kernel, grid, scalars, constants, tiles, describe)


def _described(*tensors: Tensor) -> tuple[tuple[int, ...], ...]:
    return tuple((*x.shape, *x.stride()) for x in tensors)


def forward(
    q: Tensor, k: Tensor, v: Tensor, padding: Tensor | None, pattern: Window, is_causal: bool,
    scale: float, spans: tuple[Span, ...],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The output and its base-2 log-sum-exp (batch, heads, queries).

    q (batch, queries, heads, head_dim); k, v (batch, keys, kv_heads, head_dim); `padding`: int64
    (batch, keys), not 0 for keys that no query sees; `spans`: where documents are in q and in k.
    """
    batch, tokens, heads, _ = q.shape
    call = _call(q, k, padding, pattern, is_causal, scale)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty((batch, heads, tokens), dtype=torch.float32, device=q.device)
    q, k, v = (kernel_input(x, pattern.dilation) for x in (q, k, v))
    strides, row_strides = (q.stride()[:3], out.stride()[:3]), (lse.stride(1), _id_stride(padding))
    launch = _launch(call, "forward", _described(k, v), strides, row_strides)
    table = _query_table(spans, pattern, launch.tiles.queries, q.device)
    keys, values = launch.descriptor(0, k), launch.descriptor(1, v)
    with torch.cuda.device_of(q):  # type: ignore[no-untyped-call]  # where Triton launches
        launch_all([launch], [(q, keys, values, out, lse, _ids(padding, lse), table)])
    return out, lse


def backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, padding: Tensor | None,
    pattern: Window, is_causal: bool, scale: float, spans: tuple[Span, ...],
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of q, k and v, given that of the output, `do`, and the results of `forward`."""
    call = _call(q, k, padding, pattern, is_causal, scale)
    dq = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    shape = (*k.shape[:2], q.shape[2], q.shape[3])  # of each query head
    dk, dv = (torch.empty(shape, dtype=q.dtype, device=q.device) for _ in range(2))
    kv_heads = k.shape[2]
    q, k, v, do = (kernel_input(x, pattern.dilation) for x in (q, k, v, do))
    with torch.cuda.device_of(q):  # type: ignore[no-untyped-call]
        delta, safe_lse = preprocess(do, out, lse)
        row_strides, ids = (delta.stride(1), _id_stride(padding)), _ids(padding, lse)
        strides: tuple[tuple[int, ...], ...]
        strides = q.stride()[:3], do.stride()[:3], dq.stride()[:3]
        launch = _launch(call, "backward_dq", _described(k, v), strides, row_strides)
        table = _query_table(spans, pattern, launch.tiles.queries, q.device)
        keys, values = launch.descriptor(0, k), launch.descriptor(1, v)
        launch_all([launch], [(q, keys, values, do, safe_lse, delta, dq, ids, table)])

        described, strides = _described(q, do), (k.stride()[:3], v.stride()[:3])
        tile = tiles_of("backward_dkdv", call.head_dim, call.dtype).keys
        options = spans, pattern, tile, is_causal
        sums = 2, len(_sinks(*options).items), call.batch * call.heads, tile
        partial_k, partial_v = lse.new_empty((*sums, padded_dim(call.head_dim)))
        inputs: tuple[Any, ...]
        if pattern.sinks:
            launch = _launch(call, "backward_sinks", described, strides, row_strides)
            inputs = launch.descriptor(0, q), k, v, launch.descriptor(1, do), safe_lse, delta
            table = _sink_table(*options, q.device)
            launch_all([launch], [(*inputs, partial_k, partial_v, ids, table)])
        strides = (*strides, dk.stride()[:3])
        launch = _launch(call, "backward_dkdv", described, strides, row_strides)
        inputs = launch.descriptor(0, q), k, v, launch.descriptor(1, do), safe_lse, delta, dk, dv
        table = _key_table(*options, q.device)
        launch_all([launch], [(*inputs, partial_k, partial_v, ids, table)])
    if call.group > 1:
        grouped = (*dk.shape[:2], kv_heads, call.group, call.head_dim)
        dk, dv = dk.view(grouped).sum(3), dv.view(grouped).sum(3)
    return dq, dk, dv


def attend_spans(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, pattern: Window, scale: float,
    spans: tuple[Span, ...],
) -> Tensor:  # fmt: skip
    """Causal attention of queries to keys that are other rows: see `Span`, and `forward`.

    `sinks`: a logit per head (heads,) in the denominator of the softmax.
    """
    by = forward, backward, math.log(2)
    return attend_with_sinks(q, k, v, sinks, *by, None, pattern, True, scale, spans)


def _call(
    q: Tensor, k: Tensor, padding: Tensor | None, pattern: Window, is_causal: bool, scale: float
) -> _Call:
    batch, _, heads, head_dim = q.shape
    return _Call(
        batch, heads, heads // k.shape[2], head_dim, q.dtype, q.device, pattern, is_causal,
        padding is not None, scale,
    )  # fmt: skip


def _ids(padding: Tensor | None, unused: Tensor) -> Tensor:
    return unused if padding is None else padding


def _id_stride(padding: Tensor | None) -> int:
    return 0 if padding is None else padding.stride(0)
