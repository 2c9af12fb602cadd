"""`attend_newest`: the attention of a sequence's last token over the keys of a cache."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from longspan.attention.functional import attend_checked
from longspan.attention.mask import Mask, check_pattern, check_scale, check_sinks, check_tensors
from longspan.attention.pattern import Dense, Pattern
from longspan.dtypes import accumulation_dtype


def attend_newest(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    pattern: Pattern,
    *,
    scale: float | None = None,
    sink_logits: Tensor | None = None,
) -> Tensor:
    """What causal `attend` gives for the query of the last token, without gradients.

    q: (batch, 1, heads, head_dim); keys, values: (batch, kv_heads, tokens, head_dim), heads first
    as a cache holds them. Only the keys that the query sees are read. Returns q's shape.
    """
    check_tensors(q, keys.transpose(1, 2), values.transpose(1, 2))
    check_pattern(pattern)
    if q.shape[1] != 1:
        raise ValueError(f"q must have one token, got {q.shape[1]}")
    if scale is None:
        scale = q.shape[3] ** -0.5
    else:
        check_scale(scale)
    check_sinks(q, sink_logits)
    position, heads = keys.shape[2] - 1, q.shape[2]
    branches = []
    for seeing, found in _visible_keys(pattern, position, heads, q.device):
        rows = slice(found.start, found.stop, found.step) if isinstance(found, range) else found
        key_rows = _select(keys, rows, seeing, heads)
        branches.append((seeing, key_rows, _select(values, rows, seeing, heads)))
    if len(branches) == 1 and len(branches[0][0]) == heads and sink_logits is None:
        # Dense over these keys.
        keys, values = (x.transpose(1, 2) for x in branches[0][1:])
        return attend_checked(q, keys, values, Mask(Dense(), is_causal=False), scale)
    return _attend_one(q, branches, scale, sink_logits)


@lru_cache(maxsize=64)
def _visible_keys(
    pattern: Pattern, position: int, heads: int, device: torch.device
) -> list[tuple[range, range | Tensor]]:
    """`Pattern.visible_keys` on `device`, computed once for all layers with the same pattern."""
    found = pattern.visible_keys(position, heads)
    return [(seeing, x if isinstance(x, range) else x.to(device)) for seeing, x in found]


def _select(x: Tensor, rows: slice | Tensor, seeing: range, heads: int) -> Tensor:
    """The rows of x (batch, kv_heads, rows, head_dim) that the query heads `seeing` read.

    A kv head stands for as many of them, in their order, as there are for each head returned.
    """
    group, step = heads // x.shape[1], seeing.step
    kv_heads: slice | list[int]
    if step % group == 0:  # at most one of a group
        kv_heads = slice(seeing.start // group, None, step // group)
    elif group % step == 0:  # equally many of every group
        kv_heads = slice(None)
    else:
        kv_heads = [head // group for head in seeing]
    if isinstance(rows, slice):
        return x[:, kv_heads, rows]
    return x[:, kv_heads].index_select(2, rows)


def _attend_one(
    q: Tensor,
    branches: list[tuple[range, Tensor, Tensor]],
    scale: float,
    sinks: Tensor | None,
) -> Tensor:
    """Attention of one query per head, q (batch, 1, heads, head_dim), over several branches.

    Each branch: the heads that see it, and their keys and values from `_select`. One softmax runs
    over all of a head's branches, so a key in two of them counts twice.
    """
    batch, _, heads, head_dim = q.shape
    dtype = accumulation_dtype(q)
    out = torch.zeros(batch, heads, head_dim, dtype=dtype, device=q.device)
    counts = [keys.shape[2] for _, keys, _ in branches]
    with torch.autocast(q.device.type, enabled=False):  # it would run the products in 16 bits
        q_BHD = q[:, 0].to(dtype) * scale
        scores = q_BHD.new_full((batch, heads, sum(counts)), -torch.inf)
        parts = torch.split(scores, counts, dim=2)
        for (seeing, keys, _), part in zip(branches, parts, strict=True):
            q_BGHD = q_BHD[:, _slice(seeing)].reshape(batch, keys.shape[1], -1, head_dim)
            found = q_BGHD @ keys.to(dtype).mT
            part[:, _slice(seeing)] = found.reshape(batch, len(seeing), -1)
        if sinks is not None:
            scores = torch.cat([scores, sinks.to(dtype).expand(batch, -1)[..., None]], dim=2)
        # NaN for a head that sees nothing, which no branch reads: its output stays zero.
        weights = torch.split(scores.softmax(-1)[..., : sum(counts)], counts, dim=2)
        for (seeing, _, values), part in zip(branches, weights, strict=True):
            w_BGHR = part[:, _slice(seeing)].reshape(batch, values.shape[1], -1, part.shape[2])
            found = w_BGHR @ values.to(dtype)
            out[:, _slice(seeing)] += found.reshape(batch, len(seeing), head_dim)
    return out[:, None].to(q.dtype)


def _slice(heads: range) -> slice:
    return slice(heads.start, heads.stop, heads.step)
