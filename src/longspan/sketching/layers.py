"""Linear layers that store fewer numbers than in · out: a product of two thin factors.

`LowRankLinear` is y = x A B + b. `SKLinear` is a sum of l sketched terms of rank k,

    y = 1/(2l) Σᵢ (x S1ᵢ U1ᵢ + x U2ᵢ S2ᵢ) + b,

where S1ᵢ (in, k) and S2ᵢ (k, out) are trained and U1ᵢ (k, out), U2ᵢ (in, k) are fixed: signs drawn
from a seed, divided by √k. Side by side, with R = l · k and the signs as ±1, the terms are two
products,

    h = x [c S1 | U2],   y = h [U1 ; c S2] + b,   h: (tokens, 2R),   c = 1/(2l √k),

so what a layer can express depends on R alone, and l is a scale. Stored are R (in + out) numbers;
forward takes 2R (in + out) multiplications per token where a dense layer takes in · out, and a
low-rank layer of equal storage R (in + out).

The factors may be split over the ranks of a mesh: S1 and U2 by input, U1 and S2 by output. Then x
and y are a rank's own features, and of a token only h forward and its gradient backward are summed.
"""

from __future__ import annotations

import hashlib
import math
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor, Shard
from torch.nn import functional

from longspan.costs import Cost
from longspan.nn.collectives import summed
from longspan.nn.precision import autocast_dtype


class FactoredLinear(nn.Module):
    """What the two forms share: trained factors s1 (in, R) and s2 (R, out), and how they apply."""

    bits1: Tensor | None
    bits2: Tensor | None
    table: Tensor | None
    bias: nn.Parameter | None
    cost: Cost

    def __init__(
        self,
        in_features: int,
        out_features: int,
        rank: int,
        bias: bool,
        place: dict[str, Any],
        scale: float = 1.0,
    ) -> None:
        super().__init__()
        for name, value in (("in", in_features), ("out", out_features), ("rank", rank)):
            if value < 1:
                raise ValueError(f"expected {name} of at least 1, got {value}")
        self.in_features, self.out_features, self.rank = in_features, out_features, rank
        self.scale = scale
        self.s1 = nn.Parameter(torch.empty(in_features, rank, **place))
        self.s2 = nn.Parameter(torch.empty(rank, out_features, **place))
        self.register_parameter(
            "bias", nn.Parameter(torch.empty(out_features, **place)) if bias else None
        )
        for name in ("bits1", "bits2", "table"):
            self.register_buffer(name, None)

    def _draw(self, std_for: Callable[[float], float]) -> None:
        """Outputs as large as nn.Linear's, whose weights have variance 1/(3 in), its bias too."""
        if self.s1.is_meta:  # where drawing nothing takes torch long
            return
        with torch.no_grad():
            for s in (self.s1, self.s2):
                s.normal_(std=std_for(1 / math.sqrt(3 * self.in_features)))
            if self.bias is not None:
                bound = 1 / math.sqrt(self.in_features)
                self.bias.uniform_(-bound, bound)

    def forward(self, x: Tensor) -> Tensor:
        """x (..., in) to (..., out); of a split layer, this rank's features of both."""
        group = self.s1.device_mesh.get_group() if isinstance(self.s1, DTensor) else None
        s1, s2 = _own(self.s1, 0), _own(self.s2, 1)
        bias = None if self.bias is None else _own(self.bias, 0)
        if x.shape[-1] != s1.shape[0]:
            raise ValueError(f"expected x (..., {s1.shape[0]}), got {tuple(x.shape)}")
        x = x.to(autocast_dtype(x) or x.dtype)
        y: Tensor = _Factored.apply(  # type: ignore[no-untyped-call]
            x, s1, s2, bias, self.bits1, self.bits2, self.table, self.scale, group
        )
        return y

    @property
    def weight(self) -> Tensor:
        """The (out, in) weight of the nn.Linear that computes the same, with its gradient."""
        fixed = self.bits1, self.bits2, self.table
        a, b = _factors(self.s1, self.s2, *fixed, self.s1.dtype)
        return (a @ b).T * self.scale

    def split(self, part: int, parts: int) -> None:
        """Keep, of what is not trained, one of `parts` parts of the features."""
        for side in (self.in_features, self.out_features):
            if side % parts:
                raise ValueError(
                    f"{parts} parts do not divide {self.in_features} inputs and "
                    f"{self.out_features} outputs: use another number of ranks"
                )

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"rank={self.rank}, bias={self.bias is not None}"
        )


class LowRankLinear(FactoredLinear):
    """y = x A B + b, with s1 = A (in, rank) and s2 = B (rank, out)."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        rank: int,
        bias: bool = True,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        place = {"device": device, "dtype": dtype}
        super().__init__(in_features, out_features, rank, bias, place)
        self.cost = Cost.low_rank(in_features, out_features, rank)
        _warn_of_excess(self)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self._draw(lambda dense: low_rank_std(dense, self.rank))


class SKLinear(FactoredLinear):
    """y = 1/(2l) Σᵢ (x S1ᵢ U1ᵢ + x U2ᵢ S2ᵢ) + b, of l = `num_terms` terms of rank k = `low_rank`.

    s1 (in, l · k) holds the S1ᵢ side by side, s2 (l · k, out) the S2ᵢ one below the other, and so
    do u2 and u1, as signs, of which bits2 and bits1 hold a bit each. The signs follow from `seed`,
    are the same everywhere and do not stand in a state dict unless `store_signs`; the seed does.
    Layers of one model should have different seeds.

    `sketch_size`, or a third argument alone, is the rank of one term. There are no second and no
    forward-mode derivatives. Under
    DistributedDataParallel give `broadcast_buffers=False`: every rank has the signs already.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        num_terms: int | None = None,
        low_rank: int | None = None,
        bias: bool = True,
        *,
        sketch_size: int | None = None,
        seed: int = 0,
        store_signs: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if low_rank is None and (num_terms is None) != (sketch_size is None):
            num_terms, low_rank = 1, num_terms if sketch_size is None else sketch_size
        elif sketch_size is not None or num_terms is None or low_rank is None:
            raise ValueError(
                "expected num_terms and low_rank, or sketch_size alone, got "
                f"num_terms={num_terms}, low_rank={low_rank}, sketch_size={sketch_size}"
            )
        if num_terms < 1:
            raise ValueError(f"expected num_terms of at least 1, got {num_terms}")
        if not 0 <= seed < 1 << 63:
            raise ValueError(f"expected a seed from 0 to 2^63 - 1, got {seed}")
        self.num_terms, self.low_rank, self.seed = num_terms, low_rank, seed
        self._stores_signs = store_signs
        self._part = 0, 1  # which of how many parts of the features this rank has
        place = {"device": device, "dtype": dtype}
        rank, scale = num_terms * low_rank, 0.5 / num_terms / max(low_rank, 1) ** 0.5
        super().__init__(in_features, out_features, rank, bias, place, scale)
        self.cost = Cost.sketched(in_features, out_features, rank)
        self.register_buffer("bits1", None, persistent=store_signs)
        self.register_buffer("bits2", None, persistent=store_signs)
        self.register_buffer("table", None, persistent=False)
        self.draw_signs(self.s1.device)
        _warn_of_excess(self)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self._draw(lambda dense: sketched_std(dense, self.num_terms))

    def split(self, part: int, parts: int) -> None:
        super().split(part, parts)
        self._part = part, parts
        self.draw_signs(self.s1.device)

    def draw_signs(self, device: torch.device) -> None:
        """Have the signs on `device`."""
        with torch.inference_mode(mode=False):  # so that training can go on with them
            part, parts = self._part
            u1 = signs(f"{self.seed} u1", self.rank, self.out_features, device)
            u2 = signs(f"{self.seed} u2", self.in_features, self.rank, device)
            self.bits1 = packed(u1.chunk(parts, 1)[part])
            self.bits2 = packed(u2.chunk(parts, 0)[part])
            self.table = table_of_signs(device)

    @property
    def u1(self) -> Tensor:
        """The signs (rank, out), or a rank's own columns of them, in 8 bits."""
        return self._signs(self.bits1, (self.rank, self.out_features // self._part[1]))

    @property
    def u2(self) -> Tensor:
        """The signs (in, rank), or a rank's own rows of them, in 8 bits."""
        return self._signs(self.bits2, (self.in_features // self._part[1], self.rank))

    def _signs(self, bits: Tensor | None, shape: tuple[int, int]) -> Tensor:
        assert bits is not None
        assert self.table is not None
        return unpacked(bits, shape, self.table)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> SKLinear:
        """Moving from the meta device, or to_empty, leaves signs that are none: draw them again."""
        assert self.bits1 is not None
        had_none = self.bits1.is_meta
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if had_none or not self._stores_signs:
            self.draw_signs(self.bits1.device)
        self.table = table_of_signs(self.bits1.device)
        return self

    def get_extra_state(self) -> Tensor:
        return torch.tensor([self.seed, self.num_terms])

    def set_extra_state(self, state: Tensor) -> None:
        seed, terms = state.tolist()
        if terms != self.num_terms:
            raise ValueError(f"expected the state of {self.num_terms} terms, got {terms}")
        assert self.bits1 is not None
        device = self.s1.device if self.bits1.is_meta else self.bits1.device
        if not self._stores_signs and (seed != self.seed or self.bits1.is_meta):
            self.seed = seed
            self.draw_signs(device)
        self.table = table_of_signs(device)

    def extra_repr(self) -> str:
        return f"num_terms={self.num_terms}, low_rank={self.low_rank}, {super().extra_repr()}"


def _warn_of_excess(layer: FactoredLinear) -> None:
    found = layer.cost.excess_over(Cost.dense(layer.in_features, layer.out_features))
    if found:
        message = f"{type(layer).__name__} {layer.in_features} -> {layer.out_features} of rank "
        warnings.warn(f"{message}{layer.rank} {'; '.join(found)}", stacklevel=3)


def _own(x: Tensor, dim: int) -> Tensor:
    """This rank's part of a factor."""
    if not isinstance(x, DTensor):
        return x
    assert x.placements == (Shard(dim),), f"split by features, got {x.placements}"
    return x.to_local()


def sketched_std(dense: float, terms: int) -> float:
    """Of S1 and S2, so that the layer's outputs vary as those of dense weights of std `dense`.

    R = l · k products with ±1/√k on either side, over 2l: 2 R σ² / (k · 4 l²) = dense².
    """
    return dense * math.sqrt(2 * terms)


def low_rank_std(dense: float, rank: int) -> float:
    """Of A and B likewise: R products of two such numbers make a weight, R σ⁴ = dense²."""
    return float((dense**2 / rank) ** 0.25)


def seed_of(seed: int, name: str) -> int:
    """A seed for what is called `name`, so that no two layers have the same signs."""
    return int.from_bytes(hashlib.sha256(f"{seed} {name}".encode()).digest()[:7], "big")


def signs(key: str, rows: int, columns: int, device: torch.device) -> Tensor:
    """(rows, columns) of ±1 in 8 bits that follow from `key` alone, on any device, for ever.

    Bit j of word w is that of a hash of (w, key) [C. Wellons' "lowbias32", twice]: a checkpoint
    holds no signs, so they may not depend on a library's stream of random numbers.
    """
    if device.type == "meta":
        return torch.empty(rows, columns, dtype=torch.int8, device=device)
    digest = hashlib.sha256(key.encode()).digest()
    low, high = (int.from_bytes(digest[i : i + 4], "big") for i in (0, 4))
    count = -(-rows * columns // 32)
    words = torch.arange(count, dtype=torch.int64, device=device)
    words = _mixed(_mixed((words + low) & 0xFFFFFFFF) ^ high)
    bits = torch.empty(count, 32, dtype=torch.int8, device=device)
    for j in range(32):
        bits[:, j] = (words >> j) & 1
    return bits.mul_(2).sub_(1).flatten()[: rows * columns].view(rows, columns)


def packed(u: Tensor) -> Tensor:
    """The signs `u` (rows, columns) in a bit each, eight to a byte, the first in its lowest bit."""
    is_plus = functional.pad((u > 0).flatten(), (0, -u.numel() % 8)).view(-1, 8).to(torch.uint8)
    return (is_plus << torch.arange(8, dtype=torch.uint8, device=u.device)).sum(1).to(torch.uint8)


def unpacked(bits: Tensor, shape: tuple[int, ...], table: Tensor) -> Tensor:
    """The signs of `shape` that were packed, in 8 bits."""
    signs = table.index_select(0, bits.int()).view(torch.int8)
    return signs[: math.prod(shape)].view(shape)


def table_of_signs(device: torch.device) -> Tensor:
    """The eight signs that each byte of packed ones stands for, as one number of 64 bits."""
    with torch.inference_mode(mode=False):  # so that training can go on with it
        numbers, places = torch.arange(256, device=device), torch.arange(8, device=device)
        signs = ((numbers[:, None] >> places) & 1) * 2 - 1
        return signs.to(torch.int8).view(torch.int64).flatten()


def _mixed(x: Tensor) -> Tensor:
    """A hash of 32-bit numbers, in 64 bits that never overflow: the factors are below 2³¹."""
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & 0xFFFFFFFF
    x = ((x ^ (x >> 15)) * (0x846CA68B - (1 << 32))) & 0xFFFFFFFF
    return x ^ (x >> 16)


def _factors(
    s1: Tensor,
    s2: Tensor,
    bits1: Tensor | None,
    bits2: Tensor | None,
    table: Tensor | None,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """[S1 | U2] (in, 2R) and [U1 ; S2] (2R, out), where signs are ±1: exact in any precision."""
    a, b = s1.to(dtype), s2.to(dtype)
    if bits1 is None or bits2 is None or table is None:
        return a, b
    u1, u2 = unpacked(bits1, s2.shape, table), unpacked(bits2, s1.shape, table)
    return torch.cat([a, u2.to(dtype)], dim=1), torch.cat([u1.to(dtype), b])


def _scaled(scale: float, a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """scale · a b + bias; 16 bits may not hold the product before it is scaled, the sum does."""
    if bias is not None:
        return torch.addmm(bias, a, b, alpha=scale)
    if scale == 1:
        return a @ b
    return torch.addmm(a.new_empty(b.shape[1]), a, b, beta=0, alpha=scale)


class _Factored(torch.autograd.Function):
    """x to c x A B + b, without gradients of the fixed parts of A and B; c is the scale.

    A and B are put together again for the backward pass instead of kept: of a sharded layer the
    whole factors would else stay from forward to backward.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        s1: Tensor,
        s2: Tensor,
        bias: Tensor | None,
        bits1: Tensor | None,
        bits2: Tensor | None,
        table: Tensor | None,
        scale: float,
        group: dist.ProcessGroup | None,
    ) -> Tensor:
        a, b = _factors(s1, s2, bits1, bits2, table, x.dtype)
        rows = x.flatten(0, -2) if x.dim() > 1 else x[None]
        h = rows @ a
        if group is not None:
            h = summed(h, group)
        y = _scaled(scale, h, b, None if bias is None else bias.to(x.dtype))
        h2 = h if bits1 is None else h[:, -s2.shape[0] :].contiguous()  # half is not needed again
        ctx.save_for_backward(rows, h2, s1, s2, bits1, bits2, table)
        ctx.scale, ctx.group, ctx.shape = scale, group, x.shape
        ctx.bias_dtype = None if bias is None else bias.dtype
        return y.view(*x.shape[:-1], b.shape[1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, h2, s1, s2, bits1, bits2, table = ctx.saved_tensors
        wants_x, wants_s1, wants_s2, wants_bias = ctx.needs_input_grad[:4]
        a, b = _factors(s1, s2, bits1, bits2, table, rows.dtype)
        dy = grad.reshape(-1, grad.shape[-1])
        dx = ds1 = ds2 = dbias = None
        if wants_x or wants_s1:
            g = dy @ b.T
            if ctx.group is not None:
                g = summed(g, ctx.group)
            if wants_x:
                dx = _scaled(ctx.scale, g, a.T).view(ctx.shape)
            if wants_s1:
                ds1 = _scaled(ctx.scale, rows.T, g[:, : s1.shape[1]]).to(s1.dtype)
        if wants_s2:
            ds2 = _scaled(ctx.scale, h2.T, dy).to(s2.dtype)
        if wants_bias:
            dbias = dy.sum(0).to(ctx.bias_dtype)
        return dx, ds1, ds2, dbias, None, None, None, None, None
