"""What the kernels in Gluon share."""

from __future__ import annotations

import torch
from torch import Tensor
from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

# mypy: ignore-errors

thread_barrier = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier  # Triton 3.7


def describe(x: Tensor, shape: list[int], strides: list[int], block: list[int]) -> TensorDescriptor:
    """A tensor descriptor (TMA) of `x`, seen as a matrix that is read or written in blocks."""
    # The layout of bfloat16 is the same as float16's: only the element size matters.
    dtype = gl.float32 if x.dtype == torch.float32 else gl.float16
    layout = gl.NVMMASharedLayout.get_default_for(block, dtype)
    return TensorDescriptor(x, shape, strides, block, layout)


@builtin
def async_add_shared_to_global(tensor_desc, coord, src, _semantic=None):
    """Add a block in shared memory to global memory, atomically; Gluon itself has only copies."""
    coord = _semantic._convert_to_ir_values(coord, require_i64=False)
    add = ir.DESCRIPTOR_REDUCE_KIND.ADD
    _semantic.builder.create_async_tma_reduce(add, tensor_desc.handle, coord, src.handle)


@gluon.jit
def place(strides, batch, rho, head, rate):
    """Row 0 and the column of a sample's residue and head, in a matrix of rows of `rate` tokens."""
    return batch * (strides[0] // (rate * strides[1])), rho * strides[1] + head * strides[2]


@gluon.jit
def log_counts(row, shift, RATIOS: gl.constexpr):
    """log2 of the number of branches, from this one outwards, that keep each row."""
    count = gl.full(row.shape, 1.0, gl.float32, layout=row.type.layout)
    for j in gl.static_range(len(RATIOS)):
        count += gl.where((row + shift) % RATIOS[j] == 0, 1.0, 0.0)
    return gl.log2(count)


@gluon.jit
def log_counts_in_tile(i, shift, RATIOS: gl.constexpr, TILE: gl.constexpr):
    """`log_counts` of the rows i of any tile, which begins at a multiple of TILE.

    Only for ratios up to TILE: the sparser branches keep at most the row `is_sparse` of a tile.
    """
    count = gl.full(i.shape, 1.0, gl.float32, layout=i.type.layout)
    for j in gl.static_range(len(RATIOS)):
        if RATIOS[j] <= TILE:
            count += gl.where((i + shift) % RATIOS[j] == 0, 1.0, 0.0)
    return gl.log2(count), (i + shift) % TILE == 0


@gluon.jit
def with_sparse_row(
    log_count, is_sparse, first, shift, RATIOS: gl.constexpr, TILE: gl.constexpr
):  # fmt: skip
    """`log_counts` of the tile that begins with row `first`."""
    if len(RATIOS) > 0 and RATIOS[len(RATIOS) - 1] > TILE:
        row = first + (-shift) % TILE + shift  # shift is at most 0
        count = 1.0
        for j in gl.static_range(len(RATIOS)):
            if RATIOS[j] <= TILE:
                count += 1.0
            else:
                count += gl.where(row % RATIOS[j] == 0, 1.0, 0.0)
        log_count = gl.where(is_sparse, gl.log2(count), log_count)
    return log_count
