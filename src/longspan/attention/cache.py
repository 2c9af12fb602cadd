"""The KV cache for decoding: static buffers with the rows that a later query may see."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from copy import copy

import torch
from torch import Tensor

from longspan.attention.cache_layout import CacheLayout, Step, cache_layout
from longspan.attention.functional import attend_checked, triton_problem
from longspan.attention.mask import Mask, check_pattern, check_scale, check_sinks, check_tensors
from longspan.attention.pattern import Dense, Dilated, Pattern
from longspan.dtypes import accumulation_dtype

ANY = Mask(Dense())
NOTHING = nullcontext()


class Positions:
    """The position of the next token of each row of a batch; the layers of a model share it."""

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"the capacity of a KV cache must be at least 1, got {capacity}")
        self.capacity = capacity
        self.length = 0
        """Tokens of the longest row."""
        self.next = torch.zeros(0, dtype=torch.int64)
        """int64 (batch,), on the device of the tokens."""
        self._steps = dict[CacheLayout, Step]()
        self._stored = dict[CacheLayout, tuple[Tensor, Tensor, Tensor]]()

    def step(self, layout: CacheLayout) -> Step:
        """`layout.step` of the next tokens, computed once for all layers that share the layout."""
        if layout not in self._steps:
            self._steps[layout] = layout.step(self.next)
        return self._steps[layout]

    def stored(self, layout: CacheLayout, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
        """`layout.stored` of a prompt, computed once for all layers that share the layout."""
        if layout not in self._stored:
            self._stored[layout] = layout.stored(tokens)
        return self._stored[layout]

    def check(self, tokens: int) -> None:
        """Check that every row has room for so many more tokens."""
        if self.length + tokens > self.capacity:
            raise ValueError(
                f"a KV cache of {self.capacity} tokens holds {self.length}, and has no room for "
                f"{tokens} more"
            )

    def advance(self, tokens: int, batch: int, device: torch.device) -> None:
        """Count tokens that all layers have appended to each of `batch` rows."""
        if self.length == 0:
            self.next = torch.zeros(batch, dtype=torch.int64, device=device)
        self.next += tokens
        self.length += tokens
        self._steps.clear()
        self._stored.clear()


class KVCache:
    """The KV cache of one attention layer, for inference: it computes no gradients.

    Call `attend` with the tokens of a sequence in order, the prompt first: the outputs equal those
    of one causal `attend` over the whole sequence. The buffers are allocated with the prompt, for
    `capacity` tokens in all, and never again. They hold every row for a dense pattern, the window
    and its sinks for a window, and for a dilated pattern the rows of each branch's current segment
    that a head reads. `rows` is the number of rows for all kv heads together, `bytes` their size.
    `length` tokens were seen so far.

    The caches of a model's layers share `positions`, and are advanced together (`KVCaches`).
    """

    def __init__(
        self, pattern: Pattern, capacity: int, *, positions: Positions | None = None
    ) -> None:
        check_pattern(pattern)
        self.pattern = pattern
        self.positions = positions or Positions(capacity)
        self._advances = positions is None
        self._layout: CacheLayout | None = None
        self.keys = self.values = torch.empty(1, 0, 1)
        """(batch · rows + 1, head_dim), as `CacheLayout` describes."""

    @property
    def length(self) -> int:
        return self.positions.length

    @property
    def rows(self) -> int:
        return 0 if self._layout is None else self._layout.rows

    @property
    def bytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float | None = None,
        sink_logits: Tensor | None = None,
    ) -> Tensor:
        """Append the next tokens' k and v; returns the output for q. Arguments as of `attend`.

        All rows of the batch have the same number of tokens. The prompt runs the backend of
        `attend`; later tokens are appended and attended one by one.
        """
        self._check(q, k, v)
        check_sinks(q, sink_logits)
        if scale is None:
            scale = q.shape[3] ** -0.5
        else:
            check_scale(scale)
        tokens = q.shape[1]
        if self._advances:
            self.positions.check(tokens)
        if self.length == 0:
            self.allocate(q, k)
            self._store(k, v)
            mask = Mask(self.pattern, sink_logits=sink_logits)
            out = attend_checked(q, k, v, mask, scale)
            self._advance(tokens, q)
            return out
        assert tokens == 1 or self._advances, "the layers of a model append tokens one by one"
        outputs = []
        for one in range(tokens):
            now = slice(one, one + 1)
            outputs.append(self._attend_next(q[:, now], k[:, now], v[:, now], scale, sink_logits))
            self._advance(1, q)
        return outputs[0] if tokens == 1 else torch.cat(outputs, dim=1)

    def allocate(self, q: Tensor, k: Tensor) -> None:
        """Allocate the buffers for tensors like q and k, (batch, tokens, heads, head_dim)."""
        heads, (batch, _, kv_heads, head_dim) = q.shape[2], k.shape
        capacity = self.positions.capacity
        self._layout = cache_layout(self.pattern, capacity, heads, kv_heads, k.device)
        # Zeros: rows that hold no key yet get the weight 0, and 0 · NaN is NaN.
        self.keys = k.new_zeros(batch * self._layout.rows + 1, head_dim)
        self.values = torch.zeros_like(self.keys)

    def allocate_like(self, other: KVCache, batch: int) -> None:
        """Allocate the buffers of another cache for the same layer, for `batch` rows."""
        self._layout = other._layout
        self.keys = other.keys.new_zeros(batch * other.rows + 1, other.keys.shape[1])
        self.values = torch.zeros_like(self.keys)

    def load_row(self, row: int, other: KVCache) -> None:
        """Copy the only row of the batch of `other` to a row of this cache's batch."""
        rows = slice(row * self.rows, (row + 1) * self.rows)
        self.keys[rows] = other.keys[:-1]
        self.values[rows] = other.values[:-1]

    def _advance(self, tokens: int, q: Tensor) -> None:
        if self._advances:
            self.positions.advance(tokens, q.shape[0], q.device)

    def _store(self, k: Tensor, v: Tensor) -> None:
        """Store what queries after a prompt's k and v may see."""
        assert self._layout is not None
        rows, source, kv_head = self.positions.stored(self._layout, k.shape[1])
        for buffer, x in ((self.keys, k), (self.values, v)):
            buffer[:-1].view(len(x), self.rows, -1)[:, rows] = x[:, source, kv_head]

    def _attend_next(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float, sinks: Tensor | None
    ) -> Tensor:
        """Append one token and attend to it; nothing here waits for the device."""
        layout = self._layout
        assert layout is not None
        step = self.positions.step(layout)
        for buffer, x in ((self.keys, k), (self.values, v)):
            rows = x[:, 0]
            if isinstance(self.pattern, Dilated):
                rows = rows.index_select(1, layout.kv_head_of_slot)
            buffer.index_copy_(0, step.write, rows.flatten(0, 1))
        attend, kind = _attend_slots if _has_kernel(q) else _attend_rows, q.device.type
        # Autocast would run the products in 16 bits; to enter it takes as long as one of them.
        with torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else NOTHING:
            return attend(q, self.keys, self.values, step, scale, sinks)

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
        assert self._layout is not None
        batch, head_dim = len(self.positions.next), self.keys.shape[1]
        dtype, device = self.keys.dtype, self.keys.device
        heads, kv_heads = self._layout.heads, self._layout.kv_heads
        first = (batch, heads, kv_heads, head_dim, dtype, device)
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


class KVCaches:
    """The KV caches of a model's layers, for up to `capacity` tokens of each row of a batch."""

    def __init__(self, patterns: Sequence[Pattern], capacity: int) -> None:
        self.positions = Positions(capacity)
        self.layers = [KVCache(x, capacity, positions=self.positions) for x in patterns]

    @property
    def length(self) -> int:
        """Tokens of the longest row."""
        return self.positions.length

    @property
    def bytes(self) -> int:
        return sum(cache.bytes for cache in self.layers)

    def advance(self, tokens: Tensor) -> None:
        """Count tokens (batch, tokens) that all layers have appended."""
        self.positions.advance(tokens.shape[1], tokens.shape[0], tokens.device)

    def repeat(self, batch: int) -> KVCaches:
        """Caches of `batch` rows, each a copy of the only row of these."""
        found = KVCaches([cache.pattern for cache in self.layers], self.positions.capacity)
        found.positions.length = self.length
        found.positions.next = self.positions.next.repeat(batch)
        for new, cache in zip(found.layers, self.layers, strict=True):
            new.allocate_like(cache, batch)
            for row in range(batch):
                new.load_row(row, cache)
        return found

    def load_row(self, row: int, other: KVCaches) -> None:
        """Copy the only row of `other`, of the same capacity, to a row of these, in place."""
        self.positions.next[row] = other.length
        self.positions.length = max(self.length, other.length)
        for cache, given in zip(self.layers, other.layers, strict=True):
            cache.load_row(row, given)

    def split(self, lengths: Sequence[int]) -> list[KVCaches]:
        """The caches of consecutive layers, so many at a time, with the same positions."""
        found, start = [], 0
        for length in lengths:
            part = copy(self)
            part.layers = self.layers[start : start + length]
            found.append(part)
            start += length
        return found


def _attend_rows(
    q: Tensor, keys: Tensor, values: Tensor, step: Step, scale: float, sinks: Tensor | None
) -> Tensor:
    """Attention of one query per head, q (batch, 1, heads, head_dim), over the rows it sees.

    One softmax runs over all rows of a head, so a key in two branches counts twice.
    """
    batch, _, heads, head_dim = q.shape
    dtype, layout = accumulation_dtype(q), step.layout
    shape = batch * layout.kv_heads, layout.width, head_dim
    k_GRD, v_GRD = (x[:-1].view(shape).to(dtype) for x in (keys, values))
    q_GND = (q.to(dtype) * scale).reshape(shape[0], -1, head_dim)  # N: heads of a kv head
    scores = torch.bmm(q_GND, k_GRD.mT).view(batch, heads, -1)
    scores = scores.masked_fill_(step.is_hidden, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.to(dtype).expand(batch, -1)[..., None]], dim=2)
    weights = scores.softmax(-1)[..., : layout.width]
    if not layout.covers_all:
        weights = weights.nan_to_num()  # of a head that sees nothing
    out = torch.bmm(weights.reshape(shape[0], -1, layout.width), v_GRD)
    return out.view(q.shape).to(q.dtype)


def _attend_slots(
    q: Tensor, keys: Tensor, values: Tensor, step: Step, scale: float, sinks: Tensor | None
) -> Tensor:
    """`_attend_rows` by the Triton kernel, which reads only rows that a head sees."""
    from longspan.attention.kernels.decode import attend_slots

    outputs, lses = attend_slots(q[:, 0], keys, values, step, scale)
    if sinks is not None:  # as one more chunk, whose output is zero
        lses = torch.cat([lses, sinks.float().expand(len(q), -1)[..., None]], dim=2)
    weights = lses.softmax(-1)[..., : outputs.shape[2], None]
    if not step.layout.covers_all:
        weights = weights.nan_to_num()
    return (weights * outputs).sum(2)[:, None].to(q.dtype)


def _has_kernel(q: Tensor) -> bool:
    """Whether the Triton kernel supports these inputs."""
    return q.is_cuda and triton_problem(q, q, ANY) is None
