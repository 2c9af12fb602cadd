"""The Triton kernel of a decoding step: one query per head over the slots of a KV cache.

The rows that a head may read are divided into chunks, one program for each head and chunk, so that
a batch of one query fills the GPU (split-KV, as in Flash-Decoding). A program reads the rows of its
chunk that the head sees now, and writes their partial softmax. Rows of slots that the head does not
read at this position, and rows beyond the newest, are not loaded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

if TYPE_CHECKING:
    from longspan.attention.cache_layout import Step

PROGRAMS = 1024
"""Programs to aim at: several for each multiprocessor of a GPU."""
TILE = 64
"""Rows that a program reads at a time."""
MAX_CHUNK = 4096
"""Rows of a chunk, at most."""


def attend_slots(
    q: Tensor, keys: Tensor, values: Tensor, step: Step, scale: float
) -> tuple[Tensor, Tensor]:
    """Partial softmaxes of q (batch, heads, head_dim) over the buffers of a KV cache.

    Returns outputs (batch, heads, chunks, head_dim) and their log-sum-exps (batch, heads, chunks),
    float32; -inf for a chunk that a head does not see.
    """
    batch, heads, head_dim = q.shape
    layout = step.layout
    rows = sum(slot.rows for slot in layout.read[0])
    chunk = triton.next_power_of_2(max(1, batch * heads * rows // PROGRAMS))
    chunk = min(max(chunk, TILE), MAX_CHUNK)
    table = layout.chunks(chunk)
    out = q.new_empty(batch, heads, len(table), head_dim, dtype=torch.float32)
    lse = q.new_empty(batch, heads, len(table), dtype=torch.float32)
    visible = step.visible if layout.has_mask else lse
    _decode[batch * heads, len(table)](
        q.contiguous(), keys, values, out, lse, table, layout.read_starts, step.counts, visible,
        scale, heads, len(table), layout.read_starts.shape[1], layout.rows, layout.width,
        HAS_MASK=layout.has_mask, CHUNK=chunk, TILE=TILE, HEAD_DIM=head_dim,
        TILE_D=triton.next_power_of_2(head_dim), num_warps=4, num_stages=3,
    )  # fmt: skip
    return out, lse


# mypy: ignore-errors


@triton.jit
def _decode(
    q, keys, values, out, lse, table, starts, counts, visible, scale, heads, chunks, slots, rows,
    width, HAS_MASK: tl.constexpr, CHUNK: tl.constexpr, TILE: tl.constexpr, HEAD_DIM: tl.constexpr,
    TILE_D: tl.constexpr,
):  # fmt: skip
    """`table` (chunks, 2): the slot of a chunk and its first row there; `starts` (heads, slots):
    the first row of a head's slot; `counts` (batch, heads, slots): rows that it reads.
    """  # fmt: skip
    row_head, index = tl.program_id(0), tl.program_id(1)
    batch, head = row_head // heads, row_head % heads
    slot = tl.load(table + 2 * index).to(tl.int32)
    first = tl.load(table + 2 * index + 1).to(tl.int32)
    count = tl.load(counts + row_head * slots + slot).to(tl.int32)
    start = tl.load(starts + head * slots + slot)
    end = tl.minimum(first + CHUNK, count)
    dims = tl.arange(0, TILE_D)
    in_head = dims < HEAD_DIM
    q_D = tl.load(q + row_head * HEAD_DIM + dims, in_head, other=0.0).to(tl.float32) * scale
    base = batch.to(tl.int64) * rows + start
    m_i = -float("inf")
    l_i = 0.0
    acc = tl.zeros([TILE_D], tl.float32)
    for at in tl.range(first, end, TILE):
        row = at + tl.arange(0, TILE)
        seen = row < end
        if HAS_MASK:
            column = row_head.to(tl.int64) * width + start % width + row
            seen &= tl.load(visible + column, seen, other=0) != 0
        places = (base + row)[:, None] * HEAD_DIM + dims[None, :]
        loaded = seen[:, None] & in_head[None, :]
        k_RD = tl.load(keys + places, loaded, other=0.0).to(tl.float32)
        scores = tl.where(seen, tl.sum(k_RD * q_D[None, :], 1), -float("inf"))
        m_new = tl.maximum(m_i, tl.max(scores, 0))
        m_safe = tl.where(m_new == -float("inf"), 0.0, m_new)  # nothing was seen yet
        weights = tl.exp(scores - m_safe)
        correction = tl.exp(m_i - m_safe)
        v_RD = tl.load(values + places, loaded, other=0.0).to(tl.float32)
        acc = acc * correction + tl.sum(weights[:, None] * v_RD, 0)
        l_i = l_i * correction + tl.sum(weights, 0)
        m_i = m_new
    place = row_head.to(tl.int64) * chunks + index
    total = tl.where(l_i > 0, l_i, 1.0)
    tl.store(out + place * HEAD_DIM + dims, acc / total, in_head)
    tl.store(lse + place, tl.where(l_i > 0, m_i + tl.log(total), -float("inf")))
