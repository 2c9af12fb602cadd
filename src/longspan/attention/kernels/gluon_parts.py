"""What the kernels in Gluon share."""

from __future__ import annotations

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
    return TensorDescriptor(x, shape, strides, block, layout_of(block, x.element_size()))


def layout_of(block: list[int], element_size: int) -> gl.NVMMASharedLayout:
    """The layout of a block in shared memory.

    Products read 16-bit elements in the widest swizzle. Results of products are written in 32 bits,
    8 bytes per thread and 32 per row, without bank conflicts in columns of 32 bytes alone.
    """
    if element_size == 4:
        return gl.NVMMASharedLayout(swizzle_byte_width=32, element_bitwidth=32, rank=2)
    return gl.NVMMASharedLayout.get_default_for(block, gl.float16)


@builtin
def async_add_shared_to_global(tensor_desc, coord, src, _semantic=None):
    """Add a block in shared memory to global memory, atomically; Gluon itself has only copies."""
    coord = _semantic._convert_to_ir_values(coord, require_i64=False)
    add = ir.DESCRIPTOR_REDUCE_KIND.ADD
    _semantic.builder.create_async_tma_reduce(add, tensor_desc.handle, coord, src.handle)


@gluon.jit
def place(strides, batch, rho, head, rate):
    """Row 0 and the column of a sample's residue and head, in a matrix of rows of `rate` tokens.

    In 32 bits, as the copy engine takes them: the stride of a sample may need 64.
    """
    row = batch * (strides[0] // (rate * strides[1]))
    return row.to(gl.int32), rho * strides[1] + head * strides[2]


@gluon.constexpr_function
def period_of(RATIOS, TILE):
    """After how many rows the counts of a tile repeat; at least 8, as many columns as a product has
    side by side. Branches sparser than a tile keep one row of it, where nothing repeats.
    """
    return TILE if len(RATIOS) > 0 and RATIOS[-1] > TILE else max([8, *RATIOS])


@gluon.jit
def counts_of_rows(first, shift, SCORES: gl.constexpr, RATIOS: gl.constexpr, TILE: gl.constexpr):
    """log2 of the number of branches, from this one outwards, that keep a row: of the TILE rows
    from `first` on, and of those in a period of any tile; and which of the latter are the one row
    of a tile that branches sparser than TILE may keep.

    In layouts for `counts_of_pairs` of scores in the layout SCORES.
    """
    PERIOD: gl.constexpr = period_of(RATIOS, TILE)
    scores = gl.zeros([TILE, TILE], gl.float32, layout=SCORES)
    PERIODIC: gl.constexpr = scores.reshape([TILE, TILE // PERIOD, PERIOD]).type.layout
    row = first + gl.arange(0, TILE, layout=gl.SliceLayout(1, gl.SliceLayout(2, PERIODIC)))
    count = gl.full(row.shape, 1.0, gl.float32, layout=row.type.layout)
    i = gl.arange(0, PERIOD, layout=gl.SliceLayout(0, gl.SliceLayout(1, PERIODIC)))
    count_in_tile = gl.full(i.shape, 1.0, gl.float32, layout=i.type.layout)
    for j in gl.static_range(len(RATIOS)):
        count += gl.where((row + shift) % RATIOS[j] == 0, 1.0, 0.0)
        if RATIOS[j] <= TILE:
            count_in_tile += gl.where((i + shift) % RATIOS[j] == 0, 1.0, 0.0)
    return gl.log2(count), gl.log2(count_in_tile), (i + shift) % TILE == 0


@gluon.jit
def counts_of_pairs(
    row_log_count, log_count_in_tile, is_sparse, first, shift, RATIOS: gl.constexpr,
    TILE: gl.constexpr,
):  # fmt: skip
    """log2 of the number of branches that keep both rows of a pair: (TILE, 1, period), of rows and
    of the tile that begins with row `first`.
    """
    if len(RATIOS) > 0 and RATIOS[len(RATIOS) - 1] > TILE:
        row = first + (-shift) % TILE + shift  # shift is at most 0
        count = 1.0
        for j in gl.static_range(len(RATIOS)):
            if RATIOS[j] <= TILE:
                count += 1.0
            else:
                count += gl.where(row % RATIOS[j] == 0, 1.0, 0.0)
        log_count_in_tile = gl.where(is_sparse, gl.log2(count), log_count_in_tile)
    return gl.minimum(row_log_count[:, None][:, :, None], log_count_in_tile[None, :][:, None, :])


@gluon.jit
def add_periodic(x, y):
    """x + y for x (rows, columns) and y (rows, 1, period)."""
    PERIOD: gl.constexpr = y.shape[2]
    total = x.reshape([x.shape[0], x.shape[1] // PERIOD, PERIOD]) + y
    return gl.convert_layout(total.reshape(x.shape), x.type.layout, assert_trivial=True)
