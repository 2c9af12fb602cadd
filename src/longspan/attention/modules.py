"""Attention modules: one per pattern, and replacements for nn.MultiheadAttention."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module
from torch.nn.functional import linear

from longspan.attention.context_parallel.sharded import attend_sharded
from longspan.attention.functional import attend
from longspan.attention.pattern import BlockSparse, Dilated, Pattern, as_integer, as_integers
from longspan.hashing import hash64


class PatternAttention(nn.Module):
    """`attend` with a fixed pattern; dropout acts in training and follows torch's random state.

    With `sequence_parallel` the inputs are this rank's shard of a sequence that is split over that
    group in shards of equal length (sequence, or context, parallelism).
    """

    def __init__(
        self,
        pattern: Pattern,
        *,
        dropout: float = 0.0,
        softmax_scale: float | None = None,
        sequence_parallel: ProcessGroup | None = None,
    ) -> None:
        super().__init__()
        if not 0 <= dropout < 1:
            raise ValueError(f"dropout must be at least 0 and below 1, got {dropout}")
        self.sequence_parallel = sequence_parallel
        self.pattern = pattern
        self.first_head = 0
        """Index of the first of this rank's heads, if ranks split the heads."""
        self.dropout = dropout
        self.softmax_scale = softmax_scale

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        is_causal: bool = False,
        documents: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
    ) -> Tensor:
        """Tensors (batch, tokens, heads, head_dim) and options are those of `attend`.

        With `sequence_parallel` they are those of `attend_sharded`.
        """
        group = self.sequence_parallel
        call = attend if group is None else partial(attend_sharded, group=group)
        dropout = self.dropout if self.training else 0.0
        pattern = self.pattern
        if self.first_head and isinstance(pattern, Dilated):
            pattern = replace(pattern, first_head=self.first_head)
        return call(
            q,
            k,
            v,
            pattern,
            is_causal=is_causal,
            scale=self.softmax_scale,
            documents=documents,
            key_padding_mask=key_padding_mask,
            dropout_p=dropout,
            dropout_seed=_new_seed(group, q.device, self.first_head) if dropout > 0 else 0,
        )

    def extra_repr(self) -> str:
        return repr(self.pattern)


def _new_seed(group: ProcessGroup | None, device: torch.device, first_head: int) -> int:
    """A seed from torch's random state; in a group, from that of the first rank.

    Ranks with other heads get other seeds, even if their random states are the same.
    """
    seed = torch.randint(1 << 31, ())
    if group is not None:
        seed = seed.to(device)
        dist.broadcast(seed, group=group, group_src=0)
    return hash64(int(seed), first_head) % (1 << 31)


class DilatedAttention(PatternAttention):
    """LongNet's dilated attention; with `blocks`, block-sparse within each segment."""

    def __init__(
        self,
        segment_lengths: Sequence[int],
        dilation_rates: Sequence[int],
        *,
        blocks: BlockSparse | None = None,
        dropout: float = 0.0,
        softmax_scale: float | None = None,
        sequence_parallel: ProcessGroup | None = None,
    ) -> None:
        super().__init__(
            Dilated(
                as_integers("segment_lengths", segment_lengths),
                as_integers("dilation_rates", dilation_rates),
                blocks,
            ),
            dropout=dropout,
            softmax_scale=softmax_scale,
            sequence_parallel=sequence_parallel,
        )


class BlockSparseAttention(PatternAttention):
    """Block-sparse attention; the first arguments are those of the BlockSparse pattern."""

    def __init__(
        self,
        block_size: int,
        *,
        local_window: int = 0,
        global_tokens: int = 0,
        stride: int = 0,
        density: float = 0.0,
        seed: int = 0,
        dropout: float = 0.0,
        softmax_scale: float | None = None,
        sequence_parallel: ProcessGroup | None = None,
    ) -> None:
        super().__init__(
            BlockSparse(block_size, local_window, global_tokens, stride, density, seed),
            dropout=dropout,
            softmax_scale=softmax_scale,
            sequence_parallel=sequence_parallel,
        )


class MultiheadPatternAttention(nn.Module):
    """Replaces `nn.MultiheadAttention(embed_dim, num_heads, batch_first=True)`.

    Parameters have the same names and shapes, so a state dict of one loads into the other. Two
    things differ: attention follows the pattern of `attention`, and attention weights are never
    computed: the second value of the result is None, and `need_weights=True` is an error. If
    query, key and value are one tensor, one matrix product projects all three.

    - `sub_layer_norm` is MAGNETO's: a LayerNorm before the output projection, and Xavier init with
      `magneto_gain` (√(ln 2·layers) for a decoder) on the value and output projections.
    - `tensor_parallel`: the ranks of a one-dimensional mesh split the heads (Megatron-LM). Inputs
      and outputs are the same on every rank; the output is all-reduced, and in the backward pass
      the gradient of the inputs. Parameters are DTensors, initialised on the mesh's first rank;
      `in_proj_weight` is (3, embed_dim, embed_dim), so that each rank holds rows of all three. A
      state dict of plain tensors, the same on every rank, still loads.
    - `sequence_parallel`: each rank of that group passes its shard of the tokens, and must
      all-reduce the parameters' gradients as in data parallelism.
    """

    # nn.TransformerEncoderLayer reads these; its fused path would otherwise run dense attention on
    # the parameters below.
    _qkv_same_embed_dim = False
    batch_first = True

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        attention: PatternAttention,
        *,
        bias: bool = True,
        sub_layer_norm: bool = False,
        magneto_gain: float = 1.0,
        tensor_parallel: DeviceMesh | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        embed_dim = as_integer("embed_dim", embed_dim)
        num_heads = as_integer("num_heads", num_heads)
        if min(embed_dim, num_heads) < 1 or embed_dim % num_heads:
            raise ValueError(
                f"embed_dim must be a multiple of num_heads, got {embed_dim} and {num_heads}"
            )
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.embed_dim, self.num_heads = embed_dim, num_heads
        self.attention = attention
        self.in_proj_weight = nn.Parameter(torch.empty(3 * embed_dim, embed_dim, **factory))
        self.in_proj_bias: nn.Parameter | None
        self.register_parameter(
            "in_proj_bias", nn.Parameter(torch.empty(3 * embed_dim, **factory)) if bias else None
        )
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias=bias, **factory)
        self.norm = nn.LayerNorm(embed_dim, **factory) if sub_layer_norm else nn.Identity()
        self._reset_parameters(magneto_gain if sub_layer_norm else None)
        self.tensor_parallel = tensor_parallel
        if tensor_parallel is not None:
            self._split_heads(tensor_parallel)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = False,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, None]:
        """query (batch, queries, embed_dim), key and value (batch, keys, embed_dim).

        `key_padding_mask`: bool (batch, keys), True for padding. `attn_mask` may only be
        the causal mask that torch passes with `is_causal=True`; others are not supported.
        """
        if need_weights:
            raise ValueError("need_weights must be False: attention weights are never computed")
        if attn_mask is not None and not is_causal:
            raise ValueError(
                "attn_mask must be None, or the causal mask with is_causal=True: the pattern "
                "decides which keys a query sees"
            )
        self._check(query, key, value)
        if key_padding_mask is not None and key_padding_mask.dtype != torch.bool:
            key_padding_mask = _as_bool_mask(key_padding_mask)
        q, k, v = self._project(query, key, value)
        out = self.attention(q, k, v, is_causal=is_causal, key_padding_mask=key_padding_mask)
        out = out.flatten(-2)
        if self.tensor_parallel is not None and isinstance(self.norm, nn.LayerNorm):
            out = DTensor.from_local(out, self.tensor_parallel, [Shard(2)])  # over all heads
        return self.out_proj(self.norm(out)), None

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        """q, k and v of this rank's heads: (batch, tokens, heads, head_dim)."""
        weight: Tensor = self.in_proj_weight
        bias: Tensor | None = self.in_proj_bias
        is_self = query is key and key is value
        inputs = [query] if is_self else [query, key, value]
        if self.tensor_parallel is not None:
            weight = _local_rows(weight)
            bias = None if bias is None else _local_rows(bias)
            inputs = [_all_reduced_in_backward(x, self.tensor_parallel) for x in inputs]
        projected: Iterable[Tensor]
        if is_self:
            projected = linear(inputs[0], weight, bias).chunk(3, -1)
        else:
            biases = (None,) * 3 if bias is None else bias.chunk(3)
            projected = map(linear, inputs, weight.chunk(3), biases)
        head_dim = self.embed_dim // self.num_heads
        return tuple(x.view(*x.shape[:2], -1, head_dim) for x in projected)

    def _split_heads(self, mesh: DeviceMesh) -> None:
        """Make the parameters DTensors of which each rank holds those of some heads."""
        if mesh.ndim != 1:
            names = mesh.mesh_dim_names or "its axes"
            raise ValueError(
                f"tensor_parallel must be a mesh of one dimension, got {mesh.ndim}: pass one of "
                f"{names}, as in mesh['tensor']"
            )
        if self.num_heads % mesh.size():
            raise ValueError(
                f"num_heads must be a multiple of the {mesh.size()} ranks of tensor_parallel, got "
                f"{self.num_heads}"
            )
        self.attention.first_head = self.num_heads // mesh.size() * mesh.get_local_rank()
        parallelize_module(self.out_proj, mesh, RowwiseParallel())
        for name, parameter in list(self.named_parameters()):
            if not isinstance(parameter, DTensor):
                full, placements = self._split(name, parameter.detach())
                owner = self.get_submodule(name.rpartition(".")[0])
                new = nn.Parameter(distribute_tensor(full, mesh, placements))
                owner.register_parameter(name.rpartition(".")[2], new)
        self.register_load_state_dict_pre_hook(_distribute_state)  # type: ignore[no-untyped-call]

    def _split(self, name: str, full: Tensor) -> tuple[Tensor, list[Placement]]:
        """A full parameter in the shape that it has with tensor parallelism, and its placement."""
        if name in ("in_proj_weight", "in_proj_bias"):
            return full.view(3, self.embed_dim, *full.shape[1:]), [Shard(1)]
        return full, [Shard(1) if name == "out_proj.weight" else Replicate()]

    def _check(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        for name, x in (("query", query), ("key", key), ("value", value)):
            if x.dim() != 3 or x.shape[2] != self.embed_dim:
                raise ValueError(
                    f"{name} must be (batch, tokens, embed_dim = {self.embed_dim}), "
                    f"got shape {tuple(x.shape)}"
                )
            dtype = self.in_proj_weight.dtype
            if x.dtype != dtype and not torch.is_autocast_enabled(x.device.type):
                raise TypeError(
                    f"{name} is {x.dtype} but the parameters are {dtype}: convert one of them, or "
                    "use torch.autocast"
                )

    def _reset_parameters(self, magneto_gain: float | None) -> None:
        """Initialise like nn.MultiheadAttention, or like MAGNETO."""
        if magneto_gain is None:
            nn.init.xavier_uniform_(self.in_proj_weight)
        else:
            gains = (1.0, 1.0, magneto_gain)
            for weight, gain in zip(self.in_proj_weight.data.chunk(3), gains, strict=True):
                nn.init.xavier_normal_(weight, gain=gain)
            nn.init.xavier_normal_(self.out_proj.weight, gain=magneto_gain)
        for bias in (self.in_proj_bias, self.out_proj.bias):
            if bias is not None:
                nn.init.zeros_(bias)


class MultiheadDilatedAttention(MultiheadPatternAttention):
    """Dilated attention; with `blocks`, block-sparse within each segment."""

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        segment_lengths: Sequence[int],
        dilation_rates: Sequence[int],
        *,
        blocks: BlockSparse | None = None,
        dropout: float = 0.0,
        bias: bool = True,
        sub_layer_norm: bool = False,
        magneto_gain: float = 1.0,
        tensor_parallel: DeviceMesh | None = None,
        sequence_parallel: ProcessGroup | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            embed_dim,
            num_heads,
            DilatedAttention(
                segment_lengths,
                dilation_rates,
                blocks=blocks,
                dropout=dropout,
                sequence_parallel=sequence_parallel,
            ),
            bias=bias,
            sub_layer_norm=sub_layer_norm,
            magneto_gain=magneto_gain,
            tensor_parallel=tensor_parallel,
            device=device,
            dtype=dtype,
        )


class MultiheadBlockSparseAttention(MultiheadPatternAttention):
    """Block-sparse attention; `block_size` to `seed` are those of the BlockSparse pattern."""

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        block_size: int,
        *,
        local_window: int = 0,
        global_tokens: int = 0,
        stride: int = 0,
        density: float = 0.0,
        seed: int = 0,
        dropout: float = 0.0,
        bias: bool = True,
        sub_layer_norm: bool = False,
        magneto_gain: float = 1.0,
        tensor_parallel: DeviceMesh | None = None,
        sequence_parallel: ProcessGroup | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            embed_dim,
            num_heads,
            BlockSparseAttention(
                block_size,
                local_window=local_window,
                global_tokens=global_tokens,
                stride=stride,
                density=density,
                seed=seed,
                dropout=dropout,
                sequence_parallel=sequence_parallel,
            ),
            bias=bias,
            sub_layer_norm=sub_layer_norm,
            magneto_gain=magneto_gain,
            tensor_parallel=tensor_parallel,
            device=device,
            dtype=dtype,
        )


def _all_reduced_in_backward(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """x, the same on every rank of the mesh; its gradient is summed over the ranks."""
    replicated = DTensor.from_local(x, mesh, [Replicate()], run_check=False)
    return replicated.to_local(grad_placements=[Partial()])


def _local_rows(x: Tensor) -> Tensor:
    """The rows of q, k and v that this rank holds, of a DTensor (3, rows, ...): (rows, ...)."""
    assert isinstance(x, DTensor)
    return x.to_local().flatten(0, 1)


def _distribute_state(
    module: MultiheadPatternAttention, state: dict[str, Any], prefix: str, *_: Any
) -> None:
    """Before a state dict is loaded: distribute its plain tensors like the parameters."""
    mesh = module.tensor_parallel
    assert mesh is not None
    for name, parameter in module.named_parameters():
        full = state.get(prefix + name)
        if full is not None and not isinstance(full, DTensor):
            full, placements = module._split(name, full.to(parameter.device))
            state[prefix + name] = distribute_tensor(full, mesh, placements, src_data_rank=None)


def _as_bool_mask(mask: Tensor) -> Tensor:
    """A key padding mask as torch's layers pass it, with 0 and -inf, as bool, True for padding."""
    if not mask.is_floating_point():
        raise TypeError(
            "key_padding_mask must be bool, True for padding, or floating point, 0 and -inf, "
            f"got {mask.dtype}: use mask.bool()"
        )
    # Reading the values on a GPU would wait for it in every layer.
    if mask.device.type == "cpu" and not torch.compiler.is_compiling():
        other = mask[(mask > 0) | (mask < 0) & (mask > -1e4)]  # code without -inf uses -1e4 or less
        if len(other):
            raise ValueError(
                "a floating-point key_padding_mask must hold 0 for keys and -inf for padding, got "
                f"{other[0].item()}"
            )
    return mask < 0
