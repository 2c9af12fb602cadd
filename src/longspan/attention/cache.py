"""The KV cache for decoding: it holds keys and values for as long as a later query may see them."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from longspan.attention.functional import attend_checked
from longspan.attention.mask import Mask, check_pattern, check_scale, check_sinks, check_tensors
from longspan.attention.pattern import Dense, Pattern
from longspan.attention.reference import Places, reference_attention
from longspan.dtypes import accumulation_dtype

SPARE_ROWS = 16
"""Free rows of a new buffer, besides a quarter of those in use."""


class KVCache:
    """The KV cache of one attention layer, for inference: it computes no gradients.

    Call `attend` with the tokens of a sequence in order, any number at a time: the outputs equal
    those of one causal `attend` over the whole sequence. `length` tokens were seen so far. The
    buffers have `rows` rows; when they are full, keys that no later query sees are dropped, and
    they grow by a quarter of what is left. So with a dilated pattern `rows` stays near 5/4 of the
    longest segment.
    """

    def __init__(self, pattern: Pattern) -> None:
        check_pattern(pattern)
        self.pattern = pattern
        self.length = 0
        self._heads = 0
        # The buffers (batch, kv_heads, rows, head_dim) hold positions [0, sink) and [start, length)
        # in this order. Heads come first so that the rows of a head lie together.
        self._sink, self._start = 0, 0
        self._keys, self._values = torch.empty(1, 1, 0, 1), torch.empty(1, 1, 0, 1)

    @property
    def rows(self) -> int:
        return self._keys.shape[2]

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float | None = None,
        sink_logits: Tensor | None = None,
    ) -> Tensor:
        """Append the next tokens' k and v; returns the output for q. Arguments as of `attend`."""
        self._check(q, k, v)
        check_sinks(q, sink_logits)
        mask = Mask(self.pattern, sink_logits=sink_logits)
        if scale is None:
            scale = q.shape[3] ** -0.5
        else:
            check_scale(scale)
        tokens, is_first = q.shape[1], self.length == 0
        if is_first:  # only what a query after these tokens sees is stored
            self.length, self._heads = tokens, q.shape[2]
            self._reallocate(k.transpose(1, 2), v.transpose(1, 2), spare=0)
            return attend_checked(q, k, v, mask, scale)
        used = self._row(self.length)
        if used + tokens > self.rows:
            self._reallocate(self._keys, self._values, spare=tokens)
            used = self._row(self.length)
        self._keys[:, :, used : used + tokens] = k.transpose(1, 2)
        self._values[:, :, used : used + tokens] = v.transpose(1, 2)
        self.length += tokens
        if tokens == 1:
            held_from = self.length - 1, scale, self._sink, self._start
            return _attend_newest(q, self._keys, self._values, mask, *held_from)
        held = torch.cat([torch.arange(self._sink), torch.arange(self._start, self.length)])
        keys, values = (x[:, :, : len(held)].transpose(1, 2) for x in (self._keys, self._values))
        return reference_attention(q, keys, values, mask, scale, Places(held))

    def _check(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        check_tensors(q, k, v)
        if q.shape[1] != k.shape[1]:
            raise ValueError(
                f"a KV cache needs as many queries as keys, got {q.shape[1]} and {k.shape[1]}"
            )
        if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
            raise ValueError("a KV cache computes no gradients: call it under torch.no_grad()")
        if self.length == 0:
            return
        batch, kv_heads, _, head_dim = self._keys.shape
        first = (batch, self._heads, kv_heads, head_dim, self._keys.dtype, self._keys.device)
        now = (q.shape[0], q.shape[2], k.shape[2], k.shape[3], k.dtype, k.device)
        if now != first:
            names = ("batch", "heads", "kv_heads", "head_dim", "dtype", "device")
            changed = [
                f"{name} was {a} and is {b}"
                for name, a, b in zip(names, first, now, strict=True)
                if a != b
            ]
            raise ValueError(
                f"the tokens of a KV cache differ from its first ones: {', '.join(changed)}"
            )

    def _row(self, position: int) -> int:
        """The row of a position from `start` on."""
        return self._sink + position - self._start

    def _reallocate(self, keys: Tensor, values: Tensor, spare: int) -> None:
        """Copy what a later query may see to new buffers, with room for `spare` more tokens.

        keys, values: (batch, kv_heads, rows, head_dim) in the order of the buffers.
        """
        sink, start = self.pattern.retained(self.length)
        begin, end = self._row(start), self._row(self.length)
        count = sink + end - begin
        rows = (count + spare) * 5 // 4 + SPARE_ROWS

        def copied(x: Tensor) -> Tensor:
            new = x.new_zeros(*x.shape[:2], rows, x.shape[3])
            new[:, :, :sink] = x[:, :, :sink]
            new[:, :, sink:count] = x[:, :, begin:end]
            return new

        self._keys, self._values = copied(keys), copied(values)
        self._sink, self._start = sink, start


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
    mask = Mask(pattern, sink_logits=sink_logits)
    return _attend_newest(q, keys, values, mask, keys.shape[2] - 1, scale, 0, 0)


def _attend_newest(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Mask,
    position: int,
    scale: float,
    sink: int,
    start: int,
) -> Tensor:
    """`attend_newest` for a query at `position`, whose rows are [0, sink) and from `start` on."""
    heads, shift = q.shape[2], sink - start
    branches = []
    for seeing, found in _visible_keys(mask.pattern, position, heads, q.device):
        rows: slice | Tensor
        if isinstance(found, range):
            rows = slice(found.start + shift, found.stop + shift, found.step)
        else:
            rows = torch.where(found < sink, found, found + shift)
        key_rows = _select(keys, rows, seeing, heads)
        branches.append((seeing, key_rows, _select(values, rows, seeing, heads)))
    sinks = mask.sink_logits
    if len(branches) == 1 and len(branches[0][0]) == heads and sinks is None:
        # Dense over these keys.
        keys, values = (x.transpose(1, 2) for x in branches[0][1:])
        return attend_checked(q, keys, values, Mask(Dense(), is_causal=False), scale)
    return _attend_one(q, branches, scale, sinks)


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
