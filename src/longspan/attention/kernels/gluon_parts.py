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
