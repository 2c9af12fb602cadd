"""Matrix products of compiled blocks on Hopper GPUs: which algorithm of cuBLASLt computes them.

A GPU that multiplies for longer than some milliseconds is at its power limit and lowers its clock.
Of the algorithms that cuBLASLt offers, others than cuBLAS's own choice take less time then: up to
10% less on an H200 (docs/measurements.md, products at the power limit).
"""

from __future__ import annotations

import ctypes
import warnings
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from ctypes import byref, c_float, c_int, c_int32, c_int64, c_size_t, c_uint32, c_uint64, c_void_p
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from longspan.config import Train
from longspan.torch_internals import compiled_product

FEATURES = range(768, 6145)
"""Widths of layers that were measured; others are left to cuBLAS."""
LEAST_WIDE = 1024
"""Narrower layers take other tiles."""
LEAST_TOKENS = 32_768
"""65,536 were measured; half as many still fill the multiprocessors many times."""
WORKSPACE_BYTES = 64 << 20
"""At most; for the time of a product."""
LEAST_CUDA = 13
"""With its cuBLASLt, of which 13.1 was measured."""

# Names and values of cublasLt.h.
COMPUTE_32F, R_32F, R_16BF = 68, 0, 14
DESC_TRANSA, DESC_TRANSB = 3, 4
PREF_MAX_WORKSPACE_BYTES = 1
ALGO_CONFIG_TILE_ID = 1
TILE_256x128, TILE_128x160, TILE_168x128 = 24, 29, 197
ALIGNMENT = 256
"""Bytes that cuBLASLt takes pointers to be aligned to, unless it is told otherwise."""


class _Algorithm(ctypes.Structure):
    _fields_ = (("data", c_uint64 * 8),)


class _Offer(ctypes.Structure):
    _fields_ = (
        ("algorithm", _Algorithm),
        ("workspace", c_size_t),
        ("state", c_int),
        ("waves", c_float),
        ("reserved", c_int * 4),
    )


class _Layout:
    """Of a column-major matrix in bf16. Ends with its plan: documents make ever other sizes."""

    def __init__(self, rows: int, columns: int, stride: int) -> None:
        library, self.pointer = _library(), c_void_p()
        size = c_uint64(rows), c_uint64(columns), c_int64(stride)
        _check(library.cublasLtMatrixLayoutCreate(byref(self.pointer), R_16BF, *size))
        weakref.finalize(self, library.cublasLtMatrixLayoutDestroy, self.pointer)


class _Plan(NamedTuple):
    """What a call of cuBLASLt needs for products of one shape."""

    operation: c_void_p
    layouts: tuple[_Layout, _Layout, _Layout]
    algorithm: _Algorithm
    workspace: int


class _RefusedError(Exception):
    """cuBLASLt returned an error."""


_refused: set[int] = set()
"""Devices on which a product failed: the next ones are left to cuBLAS."""
_are_chosen = False


@contextmanager
def chosen_products(train: Train, device: torch.device) -> Iterator[None]:
    """A context in which compiled blocks multiply by `product`, where that is for this device.

    There `linear_onto` has such products add the residual stream, which is rounded once then.
    """
    global _are_chosen
    if not (_serves(device) and train.compile and train.precision == "bf16"):
        yield
        return
    before = _are_chosen
    with compiled_product(product):
        _are_chosen = True
        try:
            yield
        finally:
            _are_chosen = before


def _serves(device: torch.device) -> bool:
    if device.type != "cuda" or torch.version.cuda is None:
        return False
    has_library = int(torch.version.cuda.partition(".")[0]) >= LEAST_CUDA
    return has_library and torch.cuda.get_device_capability(device) == (9, 0)


def are_chosen() -> bool:
    """Whether `chosen_products` is in effect."""
    return _are_chosen


def product(a: Tensor, b: Tensor, *, out: Tensor, addend: Tensor | None = None) -> Tensor:
    """out = a · b for a (rows, inner) and b (inner, columns), plus `addend` if there is one."""
    device = a.device.index
    plan = None
    if _is_served(a, b, out, out if addend is None else addend) and device not in _refused:
        plan = _plan(*a.shape, b.shape[1], a.stride(), b.stride(), device)
    if plan is None:
        return _by_cublas(a, b, out, addend)
    workspace = torch.empty(plan.workspace, dtype=torch.uint8, device=a.device)
    stream = torch.cuda.current_stream(a.device).cuda_stream
    result = c_void_p(out.data_ptr())
    added = result if addend is None else c_void_p(addend.data_ptr())
    one, factor = c_float(1), c_float(addend is not None)
    of_b, of_a, of_result = (layout.pointer for layout in plan.layouts)
    # Column-major: the transposed result is the product of the transposed operands.
    status = _library().cublasLtMatmul(
        _handle(device), plan.operation, byref(one), c_void_p(b.data_ptr()), of_b,
        c_void_p(a.data_ptr()), of_a, byref(factor), added, of_result, result, of_result,
        byref(plan.algorithm), c_void_p(workspace.data_ptr()), c_size_t(plan.workspace),
        c_void_p(stream),
    )  # fmt: skip
    if status != 0:
        _refused.add(device)
        warnings.warn(
            f"cublasLtMatmul returned {status} for {tuple(a.shape)} · {tuple(b.shape)}: products "
            "are left to cuBLAS",
            stacklevel=1,
        )
        return _by_cublas(a, b, out, addend)
    return out


def _by_cublas(a: Tensor, b: Tensor, out: Tensor, addend: Tensor | None) -> Tensor:
    if addend is None:
        return torch.mm(a, b, out=out)
    return torch.addmm(addend, a, b, out=out)


def _is_served(a: Tensor, b: Tensor, *others: Tensor) -> bool:
    """`others`: the result and what is added to it."""
    return (
        a.is_cuda
        and all(x.dtype == torch.bfloat16 for x in (a, b, *others))
        and a.dim() == b.dim() == 2
        and is_measured(*_size(a, b))
        and all(x.shape == (a.shape[0], b.shape[1]) for x in others)
        and all(_is_matrix(x) for x in (a, b))
        and all(x.is_contiguous() for x in others)
        and not any(x.data_ptr() % ALIGNMENT for x in (a, b, *others))
        and not torch.are_deterministic_algorithms_enabled()
    )


def is_measured(tokens: int, *features: int) -> bool:
    """Whether products of a layer of such a size were measured."""
    return tokens >= LEAST_TOKENS and all(width in FEATURES for width in features)


def _size(a: Tensor, b: Tensor) -> tuple[int, int, int]:
    """Tokens and both widths of the layer; the gradient of its weight sums over tokens."""
    (rows, inner), columns = a.shape, b.shape[1]
    return (rows, inner, columns) if a.stride(1) == 1 else (inner, rows, columns)


def _is_matrix(x: Tensor) -> bool:
    """Whether rows or columns lie densely, each in units of 16 bytes, without overlap."""
    unit, other = sorted(x.stride())
    inner = x.shape[x.stride().index(unit)]
    return unit == 1 and other % 8 == 0 and other >= inner


@lru_cache(maxsize=256)
def _plan(
    rows: int, inner: int, columns: int, a: Sequence[int], b: Sequence[int], device: int
) -> _Plan | None:
    """None if cuBLASLt offers none of the algorithms that were measured. a, b: strides."""
    library = _library()
    if library is None:
        return None
    turns_b, turns_a = b[1] != 1, a[1] != 1
    try:
        layouts = (
            _Layout(inner, columns, b[1]) if turns_b else _Layout(columns, inner, b[0]),
            _Layout(rows, inner, a[1]) if turns_a else _Layout(inner, rows, a[0]),
            _Layout(columns, rows, columns),
        )
        operation = _operation(turns_b, turns_a)
        offers = _offers(device, operation, layouts)
        tiles = [_tile(offer.algorithm) if offer.state == 0 else 0 for offer in offers]
    except _RefusedError:
        return None
    width = min(rows if turns_a else inner, columns)
    if (index := choice(tiles, width, is_weight_gradient=turns_a)) is None:
        return None
    return _Plan(operation, layouts, offers[index].algorithm, offers[index].workspace)


def choice(tiles: Sequence[int], width: int, *, is_weight_gradient: bool) -> int | None:
    """Which of the algorithms to take that cuBLASLt offers, those first that it deems fastest.

    Among those with the tiles that took least time in steps; None leaves the product to cuBLAS.
    `width`: the smaller one of the layer.
    """
    if width >= LEAST_WIDE:
        wanted = [TILE_256x128]
    else:
        wanted = [] if is_weight_gradient else [TILE_168x128, TILE_128x160]
    return next((tiles.index(tile) for tile in wanted if tile in tiles), None)


@cache
def _operation(*turns: bool) -> c_void_p:
    """A product with its operands transposed or not, summed in float32."""
    library, operation = _library(), c_void_p()
    _check(library.cublasLtMatmulDescCreate(byref(operation), COMPUTE_32F, R_32F))
    for key, turn in zip((DESC_TRANSA, DESC_TRANSB), turns, strict=True):
        value = c_int32(turn)
        _check(library.cublasLtMatmulDescSetAttribute(operation, key, byref(value), c_size_t(4)))
    return operation


def _offers(
    device: int, operation: c_void_p, layouts: tuple[_Layout, _Layout, _Layout]
) -> list[_Offer]:
    library, preference, limit = _library(), c_void_p(), c_uint64(WORKSPACE_BYTES)
    pointers = [layout.pointer for layout in layouts]
    _check(library.cublasLtMatmulPreferenceCreate(byref(preference)))
    _check(
        library.cublasLtMatmulPreferenceSetAttribute(
            preference, PREF_MAX_WORKSPACE_BYTES, byref(limit), c_size_t(8)
        )
    )
    offers, count = (_Offer * 8)(), c_int()
    status = library.cublasLtMatmulAlgoGetHeuristic(
        _handle(device), operation, *pointers, pointers[-1], preference, 8, offers, byref(count)
    )
    library.cublasLtMatmulPreferenceDestroy(preference)
    _check(status)
    return list(offers[: count.value])


def _tile(algorithm: _Algorithm) -> int:
    tile, written = c_uint32(), c_size_t()
    _check(
        _library().cublasLtMatmulAlgoConfigGetAttribute(
            byref(algorithm), ALGO_CONFIG_TILE_ID, byref(tile), c_size_t(4), byref(written)
        )
    )
    return tile.value


@cache
def _library() -> Any:
    """cuBLASLt as this process has loaded it; None if it has not."""
    maps = Path("/proc/self/maps")
    lines = maps.read_text().splitlines() if maps.exists() else []
    for path in {line.split(maxsplit=5)[-1] for line in lines if "libcublasLt.so" in line}:
        try:
            return ctypes.CDLL(path)
        except OSError:  # removed since it was loaded
            continue
    return None


@cache
def _handle(device: int) -> c_void_p:
    handle = c_void_p()
    with torch.cuda.device(device):
        _check(_library().cublasLtCreate(byref(handle)))
    return handle


def _check(status: int) -> None:
    if status != 0:
        raise _RefusedError(status)
