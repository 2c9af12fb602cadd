"""Linear layers with fewer than in · out parameters: a product of two thin factors.

`LowRankLinear` is y = x A B + b. `SKLinear` is a sum of l sketched terms of rank k,

    y = 1/(2l) Σᵢ (x S1ᵢ U1ᵢ + x U2ᵢ S2ᵢ) + b,

where S1ᵢ (in, k) and S2ᵢ (k, out) are trained and U1ᵢ (k, out), U2ᵢ (in, k) are fixed: random signs
(Rademacher) generated from a seed, divided by √k. Concatenated, with R = l · k and the signs as ±1,
the terms are two matrix products,

    h = x [c S1 | U2],   y = h [U1 ; c S2] + b,   h: (tokens, 2R),   c = 1/(2l √k),

so what a layer can express depends on R alone, and l is a scale. It has R (in + out) parameters;
forward takes 2R (in + out) multiplications per token, where a dense layer takes in · out and a
low-rank layer with as many parameters R (in + out).

Tensor parallelism shards S1 and U2 by input and U1 and S2 by output. x and y then hold the local
features, and only h in forward and its gradient in backward are all-reduced.
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

from longspan.costs import Cost
from longspan.nn.precision import autocast_dtype
from longspan.sketching.signs import pack_signs, random_signs, sign_table, unpack_signs
from longspan.torch_internals import all_reduce


class FactoredLinear(nn.Module):
    """A linear layer with two trained factors, s1 (in, R) and s2 (R, out)."""

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
        factory_kwargs: dict[str, Any],
        scale: float = 1.0,
    ) -> None:
        super().__init__()
        sizes = {"in_features": in_features, "out_features": out_features, "rank": rank}
        for name, value in sizes.items():
            if value < 1:
                raise ValueError(f"expected {name} >= 1, got {value}")
        self.in_features, self.out_features, self.rank = in_features, out_features, rank
        self.scale = scale
        self.s1 = nn.Parameter(torch.empty(in_features, rank, **factory_kwargs))
        self.s2 = nn.Parameter(torch.empty(rank, out_features, **factory_kwargs))
        self.register_parameter(
            "bias", nn.Parameter(torch.empty(out_features, **factory_kwargs)) if bias else None
        )
        for name in ("bits1", "bits2", "table"):
            self.register_buffer(name, None)

    def _init_factors(self, std_for: Callable[[float], float]) -> None:
        """Match the output variance of nn.Linear, whose weights have variance 1/(3 in)."""
        if self.s1.is_meta:  # random initialisation on the meta device is slow and has no effect
            return
        with torch.no_grad():
            for s in (self.s1, self.s2):
                s.normal_(std=std_for(1 / math.sqrt(3 * self.in_features)))
            if self.bias is not None:
                bound = 1 / math.sqrt(self.in_features)
                self.bias.uniform_(-bound, bound)

    def forward(self, x: Tensor) -> Tensor:
        """Map x (..., in) to (..., out); a sharded layer takes and returns the local features."""
        group = self.s1.device_mesh.get_group() if isinstance(self.s1, DTensor) else None
        s1, s2 = _local_shard(self.s1, 0), _local_shard(self.s2, 1)
        bias = None if self.bias is None else _local_shard(self.bias, 0)
        if x.shape[-1] != s1.shape[0]:
            raise ValueError(f"expected x (..., {s1.shape[0]}), got {tuple(x.shape)}")
        x = x.to(autocast_dtype(x) or x.dtype)
        y: Tensor = _Factored.apply(  # type: ignore[no-untyped-call]
            x, s1, s2, bias, self.bits1, self.bits2, self.table, self.scale, group
        )
        return y

    @property
    def weight(self) -> Tensor:
        """The (out, in) weight of the equivalent nn.Linear, differentiable."""
        fixed = self.bits1, self.bits2, self.table
        a, b = _factors(self.s1, self.s2, *fixed, self.s1.dtype)
        return (a @ b).T * self.scale

    def shard(self, index: int, count: int) -> None:
        """Keep shard `index` of `count` of the fixed factors, by features."""
        if self.in_features % count or self.out_features % count:
            raise ValueError(
                f"expected in_features and out_features divisible by {count} ranks, got "
                f"{self.in_features} and {self.out_features}"
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
        factory_kwargs = {"device": device, "dtype": dtype}
        super().__init__(in_features, out_features, rank, bias, factory_kwargs)
        self.cost = Cost.low_rank(in_features, out_features, rank)
        _warn_of_excess(self)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self._init_factors(lambda dense: low_rank_std(dense, self.rank))


class SKLinear(FactoredLinear):
    """y = 1/(2l) Σᵢ (x S1ᵢ U1ᵢ + x U2ᵢ S2ᵢ) + b, of l = `num_terms` terms of rank k = `low_rank`.

    s1 (in, l · k) concatenates the S1ᵢ by columns, s2 (l · k, out) the S2ᵢ by rows, and u2 and u1
    the signs likewise; bits2 and bits1 hold them packed, one bit each. The signs are generated from
    `seed` and are the same everywhere. A state dict has the seed, and the signs only with
    `store_signs`. Give each layer of a model its own seed.

    `sketch_size`, or a third argument alone, is the rank of a single term. Double backward and
    forward-mode differentiation are not supported. Under DistributedDataParallel set
    `broadcast_buffers=False`: every rank generates the signs itself.
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
            raise ValueError(f"expected num_terms >= 1, got {num_terms}")
        if not 0 <= seed < 1 << 63:
            raise ValueError(f"expected 0 <= seed < 2^63, got {seed}")
        self.num_terms, self.low_rank, self.seed = num_terms, low_rank, seed
        self._stores_signs = store_signs
        self._shard = 0, 1  # index and number of shards of the features
        factory_kwargs = {"device": device, "dtype": dtype}
        rank, scale = num_terms * low_rank, 0.5 / num_terms / max(low_rank, 1) ** 0.5
        super().__init__(in_features, out_features, rank, bias, factory_kwargs, scale)
        self.cost = Cost.sketched(in_features, out_features, rank)
        self.register_buffer("bits1", None, persistent=store_signs)
        self.register_buffer("bits2", None, persistent=store_signs)
        self.register_buffer("table", None, persistent=False)
        self.reset_signs(self.s1.device)
        _warn_of_excess(self)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self._init_factors(lambda dense: sketched_std(dense, self.num_terms))

    def shard(self, index: int, count: int) -> None:
        super().shard(index, count)
        self._shard = index, count
        self.reset_signs(self.s1.device)

    def reset_signs(self, device: torch.device) -> None:
        """Generate the signs on `device`."""
        with torch.inference_mode(mode=False):  # usable by autograd even in inference mode
            index, count = self._shard
            u1 = random_signs(f"{self.seed} u1", self.rank, self.out_features, device)
            u2 = random_signs(f"{self.seed} u2", self.in_features, self.rank, device)
            self.bits1 = pack_signs(u1.chunk(count, 1)[index])
            self.bits2 = pack_signs(u2.chunk(count, 0)[index])
            self.table = sign_table(device)

    @property
    def u1(self) -> Tensor:
        """The signs (rank, out) as int8; the local columns if sharded."""
        return self._unpack(self.bits1, (self.rank, self.out_features // self._shard[1]))

    @property
    def u2(self) -> Tensor:
        """The signs (in, rank) as int8; the local rows if sharded."""
        return self._unpack(self.bits2, (self.in_features // self._shard[1], self.rank))

    def _unpack(self, bits: Tensor | None, shape: tuple[int, int]) -> Tensor:
        assert bits is not None
        assert self.table is not None
        return unpack_signs(bits, shape, self.table)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> SKLinear:
        """Regenerate the signs: a move from the meta device, or to_empty, leaves them undefined."""
        assert self.bits1 is not None
        was_meta = self.bits1.is_meta
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if was_meta or not self._stores_signs:
            self.reset_signs(self.bits1.device)
        self.table = sign_table(self.bits1.device)
        return self

    def get_extra_state(self) -> Tensor:
        return torch.tensor([self.seed, self.num_terms])

    def set_extra_state(self, state: Tensor) -> None:
        seed, terms = state.tolist()
        if terms != self.num_terms:
            raise ValueError(f"expected a state with num_terms={self.num_terms}, got {terms}")
        assert self.bits1 is not None
        device = self.s1.device if self.bits1.is_meta else self.bits1.device
        if not self._stores_signs and (seed != self.seed or self.bits1.is_meta):
            self.seed = seed
            self.reset_signs(device)
        self.table = sign_table(device)

    def extra_repr(self) -> str:
        return f"num_terms={self.num_terms}, low_rank={self.low_rank}, {super().extra_repr()}"


def _warn_of_excess(layer: FactoredLinear) -> None:
    found = layer.cost.excess_over(Cost.dense(layer.in_features, layer.out_features))
    if found:
        message = f"{type(layer).__name__} {layer.in_features} -> {layer.out_features} of rank "
        warnings.warn(f"{message}{layer.rank} {'; '.join(found)}", stacklevel=3)


def _local_shard(x: Tensor, dim: int) -> Tensor:
    if not isinstance(x, DTensor):
        return x
    assert x.placements == (Shard(dim),), f"expected Shard({dim}), got {x.placements}"
    return x.to_local()


def sketched_std(dense: float, terms: int) -> float:
    """The std of S1 and S2 that gives the output variance of dense weights with std `dense`.

    R = l · k products with ±1/√k on either side, over 2l: 2 R σ² / (k · 4 l²) = dense².
    """
    return dense * math.sqrt(2 * terms)


def low_rank_std(dense: float, rank: int) -> float:
    """The same for A and B: a weight is a sum of R products, R σ⁴ = dense²."""
    return float((dense**2 / rank) ** 0.25)


def seed_of(seed: int, name: str) -> int:
    """Derive a seed from `seed` and a layer's name, so that no two layers share their signs."""
    return int.from_bytes(hashlib.sha256(f"{seed} {name}".encode()).digest()[:7], "big")


def _factors(
    s1: Tensor,
    s2: Tensor,
    bits1: Tensor | None,
    bits2: Tensor | None,
    table: Tensor | None,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """[S1 | U2] (in, 2R) and [U1 ; S2] (2R, out); signs are ±1, so exact in any precision."""
    a, b = s1.to(dtype), s2.to(dtype)
    if bits1 is None or bits2 is None or table is None:
        return a, b
    u1, u2 = unpack_signs(bits1, s2.shape, table), unpack_signs(bits2, s1.shape, table)
    return torch.cat([a, u2.to(dtype)], dim=1), torch.cat([u1.to(dtype), b])


def _scaled(scale: float, a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """scale · a b + bias, scaled inside the matrix product: 16 bits may overflow before scaling."""
    if bias is not None:
        return torch.addmm(bias, a, b, alpha=scale)
    if scale == 1:
        return a @ b
    return torch.addmm(a.new_empty(b.shape[1]), a, b, beta=0, alpha=scale)


class _Factored(torch.autograd.Function):
    """x to c x A B + b, with gradients only for the trained parts of A and B; c is the scale.

    The backward pass concatenates A and B again instead of saving them: under FSDP, saved tensors
    would hold the gathered factors from forward to backward.
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
            h = all_reduce(h, group)
        y = _scaled(scale, h, b, None if bias is None else bias.to(x.dtype))
        h2 = h if bits1 is None else h[:, -s2.shape[0] :].contiguous()  # all backward needs
        ctx.save_for_backward(rows, h2, s1, s2, bits1, bits2, table)
        ctx.scale, ctx.group, ctx.shape = scale, group, x.shape
        ctx.bias_dtype = None if bias is None else bias.dtype
        return y.view(*x.shape[:-1], b.shape[1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, h2, s1, s2, bits1, bits2, table = ctx.saved_tensors
        needs_x, needs_s1, needs_s2, needs_bias = ctx.needs_input_grad[:4]
        a, b = _factors(s1, s2, bits1, bits2, table, rows.dtype)
        dy = grad.reshape(-1, grad.shape[-1])
        dx = ds1 = ds2 = dbias = None
        if needs_x or needs_s1:
            g = dy @ b.T
            if ctx.group is not None:
                g = all_reduce(g, ctx.group)
            if needs_x:
                dx = _scaled(ctx.scale, g, a.T).view(ctx.shape)
            if needs_s1:
                ds1 = _scaled(ctx.scale, rows.T, g[:, : s1.shape[1]]).to(s1.dtype)
        if needs_s2:
            ds2 = _scaled(ctx.scale, h2.T, dy).to(s2.dtype)
        if needs_bias:
            dbias = dy.sum(0).to(ctx.bias_dtype)
        return dx, ds1, ds2, dbias, None, None, None, None, None
