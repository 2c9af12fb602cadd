"""What the launches of all attention kernels need: tiles, inputs in the form they read, delta."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.functional import pad

from longspan.attention.kernels import rows as row_kernels
from longspan.attention.kernels.launch import Launch, Tiles


def tiles_of(
    kernel: str, head_dim: int, dtype: torch.dtype, block: int = 0, branches: int = 1
) -> Tiles:
    """The fastest tiles of those tried on an H200 for head_dim 64 and 128; others merely fit.

    They divide `block`, the block size of a block-sparse pattern, unless it is 0.
    """
    if dtype == torch.float32:
        return Tiles(32, 32, 4, 1)
    has_wide_blocks = block > 0 and block % 128 == 0
    is_plain = block == 0 and branches == 1
    if head_dim <= 64:
        return {
            "forward": Tiles(128, 128, 4, 2) if has_wide_blocks else Tiles(64, 64, 4, 3),
            "backward_dq": Tiles(64, 64 if block or is_plain else 32, 4, 3),
            "backward_dkdv": Tiles(64, 64, 4, 2) if is_plain else Tiles(32, 64, 4, 3),
        }[kernel]
    if head_dim <= 128:
        return {
            "forward": Tiles(128, 64, 4, 2) if has_wide_blocks else Tiles(64, 64, 4, 3),
            "backward_dq": Tiles(64, 64, 4, 2) if block else Tiles(128, 64, 8, 3),
            "backward_dkdv": Tiles(64, 64, 4, 2) if block or is_plain else Tiles(32, 64, 4, 3),
        }[kernel]
    return Tiles(32, 64, 8, 1) if kernel == "backward_dkdv" else Tiles(64, 32, 8, 2)


@lru_cache(maxsize=64)
def _preprocess(
    shape: tuple[int, ...], strides: tuple[tuple[int, ...], ...], row_strides: tuple[int, int],
    dtype: torch.dtype, device: torch.device,
) -> Launch:  # fmt: skip
    batch, tokens, heads, head_dim = shape
    scalars = (*strides, *row_strides, tokens, heads)
    constants = {"HEAD_DIM": head_dim, "TILE_D": padded_dim(head_dim), "TILE": 64}
    grid = (-(-tokens // 64), batch * heads)
    kernel = row_kernels.backward_preprocess
    return Launch(kernel, grid, scalars, constants, Tiles(64, 64, 4, 1))


def preprocess(do: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """delta and safe_lse of `rows.backward_preprocess`: (batch, heads, tokens).

    do, out (batch, tokens, heads, head_dim), of which `do` may have more tokens; `lse` as they are.
    """
    out, lse = kernel_input(out, 1), lse.contiguous()
    batch, heads, tokens = lse.shape
    rows = batch, heads, -(-tokens // 16) * 16  # the kernels read aligned rows
    delta, safe_lse = (lse.new_empty(rows)[..., :tokens] for _ in range(2))
    strides, row_strides = (out.stride()[:3], do.stride()[:3]), (lse.stride(1), delta.stride(1))
    launch = _preprocess(tuple(out.shape), strides, row_strides, out.dtype, out.device)
    launch(out, do, lse, delta, safe_lse)
    return delta, safe_lse


def scaled_copy(x: Tensor, scale: float, out: Tensor) -> None:
    """out = scale · x, of any dtypes."""
    if x.is_contiguous() and out.is_contiguous():  # torch.mul takes a third longer to round
        block = 4096
        grid = (-(-x.numel() // block),)
        row_kernels.scaled_copy[grid](x, out, x.numel(), scale, BLOCK=block, num_warps=8)
    else:
        torch.mul(x, scale, out=out)


def padded_dim(head_dim: int) -> int:
    """The power of two to which kernels pad rows of `head_dim` elements."""
    return max(16, 1 << (head_dim - 1).bit_length())


def kernel_input(x: Tensor, multiple: int) -> Tensor:
    """`x` with rows of aligned 16-byte units, padded to a multiple of tokens; copied if needed."""
    unit = 16 // x.element_size()
    b, n, h, d = x.stride()
    if d != 1 or b % unit or n % unit or h % unit or x.data_ptr() % 16:
        x = x.clone(memory_format=torch.contiguous_format)
    rest = -x.shape[1] % multiple
    return pad(x, (0, 0, 0, 0, 0, rest)) if rest else x
