"""Matrix products of compiled blocks on Hopper GPUs: the algorithm of cuBLASLt is chosen here.

A GPU that multiplies for longer than some milliseconds is at its power limit, and lowers its clock.
cuBLAS takes what is fastest at the full clock; other tiles do the same sums with less energy, and
so in less time. docs/measurements.md has what was measured: 2 to 11% less time on an H200.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from ctypes import byref, c_float, c_int, c_int32, c_int64, c_size_t, c_uint32, c_uint64, c_void_p
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from longspan.config import Train
from longspan.torch_internals import compiled_product

LEAST = 1 << 35
"""Multiplications of a product, below which cuBLAS's own choice is left: not measured."""
WORKSPACE_BYTES = 64 << 20
"""At most, of an algorithm; what the chosen ones need is allocated."""

# Names and values of cublasLt.h.
COMPUTE_32F, R_32F, R_16BF = 68, 0, 14
DESC_TRANSA, DESC_TRANSB = 3, 4
PREF_MAX_WORKSPACE_BYTES = 1
ALGO_CONFIG_TILE_ID = 1
TILE_256x128, TILE_128x160, TILE_168x128 = 24, 29, 197


class _Algorithm(ctypes.Structure):
    _fields_ = (("data", c_uint64 * 8),)


class _Heuristic(ctypes.Structure):
    _fields_ = (
        ("algorithm", _Algorithm),
        ("workspace", c_size_t),
        ("state", c_int),
        ("waves", c_float),
        ("reserved", c_int * 4),
    )


class _Plan(NamedTuple):
    """What a call of cuBLASLt needs for products of one shape."""

    operation: c_void_p
    layouts: tuple[c_void_p, c_void_p, c_void_p]
    algorithm: _Algorithm
    workspace: int


def chosen_products(train: Train, device: torch.device) -> AbstractContextManager[None]:
    """A context in which compiled blocks multiply by `product`, where that is for this device."""
    is_hopper = device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)
    serves = is_hopper and torch.version.hip is None and train.compile and train.precision == "bf16"
    return compiled_product(product) if serves else nullcontext()


def product(a: Tensor, b: Tensor, *, out: Tensor) -> Tensor:
    """out = a · b for a (rows, inner) and b (inner, columns)."""
    plan = None
    if _is_served(a, b, out) and not torch.are_deterministic_algorithms_enabled():
        plan = _plan(*a.shape, b.shape[1], a.stride(), b.stride(), a.device.index)
    if plan is None:
        return torch.mm(a, b, out=out)
    library, handle = _library(), _handle(a.device.index)
    stream = torch.cuda.current_stream(a.device).cuda_stream
    workspace = _workspace(a.device.index, stream, plan.workspace)
    one, zero, result = c_float(1), c_float(0), c_void_p(out.data_ptr())
    of_b, of_a, of_result = plan.layouts
    # Column-major: the transposed result is the product of the transposed operands.
    status = library.cublasLtMatmul(
        handle, plan.operation, byref(one), c_void_p(b.data_ptr()), of_b, c_void_p(a.data_ptr()),
        of_a, byref(zero), result, of_result, result, of_result, byref(plan.algorithm),
        c_void_p(workspace.data_ptr()), c_size_t(plan.workspace), c_void_p(stream),
    )  # fmt: skip
    assert status == 0, f"cublasLtMatmul returned {status}"
    return out


def _is_served(a: Tensor, b: Tensor, out: Tensor) -> bool:
    return (
        a.dtype == b.dtype == out.dtype == torch.bfloat16
        and a.dim() == b.dim() == 2
        and a.shape[0] * a.shape[1] * b.shape[1] >= LEAST
        and out.shape == (a.shape[0], b.shape[1])
        and all(_is_matrix(x) for x in (a, b))
        and out.is_contiguous()
        and not any(x.data_ptr() % 16 for x in (a, b, out))
    )


def _is_matrix(x: Tensor) -> bool:
    """Whether rows or columns lie densely, each in units of 16 bytes, without overlap."""
    unit, other = sorted(x.stride())
    inner = x.shape[x.stride().index(unit)]
    return unit == 1 and other % 8 == 0 and other >= inner


@lru_cache(maxsize=256)
def _plan(
    rows: int, inner: int, columns: int, a: Sequence[int], b: Sequence[int], device: int
) -> _Plan | None:
    """None if none of the algorithms that were measured is offered. a, b: strides."""
    if (library := _library()) is None:
        return None
    handle = _handle(device)
    turns_b, turns_a = b[1] != 1, a[1] != 1
    layouts = (
        _layout(inner, columns, b[1]) if turns_b else _layout(columns, inner, b[0]),
        _layout(rows, inner, a[1]) if turns_a else _layout(inner, rows, a[0]),
        _layout(columns, rows, columns),
    )
    operation = c_void_p()
    _check(library.cublasLtMatmulDescCreate(byref(operation), COMPUTE_32F, R_32F))
    for key, turns in ((DESC_TRANSA, turns_b), (DESC_TRANSB, turns_a)):
        value = c_int32(turns)
        _check(library.cublasLtMatmulDescSetAttribute(operation, key, byref(value), c_size_t(4)))
    of_b, of_a, of_result = layouts
    preference, limit = c_void_p(), c_uint64(WORKSPACE_BYTES)
    _check(library.cublasLtMatmulPreferenceCreate(byref(preference)))
    _check(
        library.cublasLtMatmulPreferenceSetAttribute(
            preference, PREF_MAX_WORKSPACE_BYTES, byref(limit), c_size_t(8)
        )
    )
    offers, count = (_Heuristic * 8)(), c_int()
    status = library.cublasLtMatmulAlgoGetHeuristic(
        handle, operation, of_b, of_a, of_result, of_result, preference, 8, offers, byref(count)
    )
    library.cublasLtMatmulPreferenceDestroy(preference)
    if status != 0:
        return None
    tiles = [_tile(offer.algorithm) for offer in offers[: count.value]]
    if (index := choice(tiles, is_weight_gradient=turns_a)) is None:
        return None
    return _Plan(operation, layouts, offers[index].algorithm, offers[index].workspace)


def choice(tiles: Sequence[int], *, is_weight_gradient: bool) -> int | None:
    """Which of the algorithms that cuBLASLt offers, the fastest at the full clock first, to take.

    Among those with the tiles that took least time at the power limit, for hidden sizes of 768 to
    2,048; a weight gradient sums over tokens.
    """
    if is_weight_gradient:
        return next((i for i, tile in enumerate(tiles[:2]) if tile == TILE_256x128), None)
    wanted = (tile for tile in (TILE_168x128, TILE_128x160) if tile in tiles)
    return next((tiles.index(tile) for tile in wanted), None)


def _tile(algorithm: _Algorithm) -> int:
    tile, written = c_uint32(), c_size_t()
    _check(
        _library().cublasLtMatmulAlgoConfigGetAttribute(
            byref(algorithm), ALGO_CONFIG_TILE_ID, byref(tile), c_size_t(4), byref(written)
        )
    )
    return tile.value


def _layout(rows: int, columns: int, stride: int) -> c_void_p:
    """Of a column-major matrix in bf16."""
    layout = c_void_p()
    size = c_uint64(rows), c_uint64(columns), c_int64(stride)
    _check(_library().cublasLtMatrixLayoutCreate(byref(layout), R_16BF, *size))
    return layout


@cache
def _library() -> Any:
    """cuBLASLt as this process has loaded it, or None."""
    maps = Path("/proc/self/maps")
    lines = maps.read_text().splitlines() if maps.exists() else []
    loaded = [line.split(maxsplit=5)[-1] for line in lines if "libcublasLt.so" in line]
    return ctypes.CDLL(loaded[0]) if loaded else None


@cache
def _handle(device: int) -> c_void_p:
    handle = c_void_p()
    with torch.cuda.device(device):
        _check(_library().cublasLtCreate(byref(handle)))
    return handle


@cache
def _workspace(device: int, stream: int, size: int) -> Tensor:
    """Of each stream its own: products on two may run at once."""
    return torch.empty(size, dtype=torch.uint8, device=torch.device("cuda", device))


def _check(status: int) -> None:
    assert status == 0, f"cuBLASLt returned {status}"
