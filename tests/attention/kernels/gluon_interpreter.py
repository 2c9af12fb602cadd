"""Runs kernels in Gluon on a CPU, as Triton's interpreter runs those in Triton: for tests.

A program is executed block by block in torch, one program after the other. Copies and products are
done when they are started. Groups of warps are threads, which wait for each other at barriers as on
a GPU; layouts and registers mean nothing.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from math import prod
from threading import Condition
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

WAIT_S = 10.0
"""How long a group waits at a barrier before it is a deadlock."""
MODULES = ("gluon_parts", "hopper_forward", "hopper_backward")
KERNELS = "longspan.attention.kernels"


class Block(Tensor):
    """A block of values, or a number; it does not change."""

    def __iadd__(self, other: Any) -> Block:
        return block(self + other)

    @property
    def type(self) -> Any:
        return SimpleNamespace(layout=None)


def block(x: Any) -> Block:
    return torch.as_tensor(x).as_subclass(Block)


class Pointer:
    """Elements of a tensor's memory."""

    def __init__(self, memory: Tensor, offset: Any) -> None:
        self.memory, self.offset = memory, offset
        self.dtype = SimpleNamespace(element_ty=memory.dtype)

    def __add__(self, offset: Any) -> Pointer:
        return Pointer(self.memory, self.offset + offset)

    @staticmethod
    def to(x: Tensor) -> Pointer:
        size = x.untyped_storage().nbytes() // x.element_size()
        return Pointer(x.as_strided((size,), (1,), 0), x.storage_offset())


class Shared:
    """A tile in shared memory."""

    def __init__(self, data: Tensor) -> None:
        self.data, self.dtype = data, data.dtype

    def index(self, i: Any) -> Shared:
        return Shared(self.data[int(i)])

    def permute(self, order: Sequence[int]) -> Shared:
        return Shared(self.data.permute(*order))

    def load(self, _layout: Any) -> Block:
        return block(self.data.clone())

    def store(self, value: Tensor) -> None:
        self.data.copy_(value)


class Barrier:
    """An mbarrier: a phase ends when `count` have arrived and the expected bytes have, too."""

    def __init__(self) -> None:
        self._condition, self._phase = Condition(), 0

    def init(self, count: int) -> None:
        self._count = self._missing = count
        self._bytes = 0

    def arrive(self, count: int, expected: int = 0, arrived: int = 0) -> None:
        with self._condition:
            self._missing -= count
            self._bytes += expected - arrived
            assert self._missing >= 0
            if self._missing == self._bytes == 0:
                self._phase, self._missing = self._phase ^ 1, self._count
                self._condition.notify_all()

    def wait(self, parity: int) -> None:
        with self._condition:
            is_over = self._condition.wait_for(lambda: self._phase != parity, WAIT_S)
        assert is_over, "a deadlock"


class Barriers:
    def __init__(self, count: int) -> None:
        self._all = [Barrier() for _ in range(count)]

    def index(self, i: Any) -> Barrier:
        return self._all[int(i)]


class Descriptor:
    """A tensor seen as a matrix, of which blocks are copied or added to."""

    def __init__(
        self, base: Tensor, shape: list[int], strides: list[int], block_shape: list[int]
    ) -> None:
        self.base, self.shape, self.strides, self.block_shape = base, shape, strides, block_shape
        self.dtype, self.layout = base.dtype, None
        self.block_type = SimpleNamespace(nbytes=base.element_size() * prod(block_shape))

    def at(self, place: Sequence[Any]) -> Tensor:
        """A block, which must lie within the matrix."""
        (row, rows), (column, columns) = zip(map(int, place), self.block_shape, strict=True)
        is_within = 0 <= row <= self.shape[0] - rows and 0 <= column <= self.shape[1] - columns
        assert is_within, (place, self.shape)
        offset = self.base.storage_offset() + row * self.strides[0] + column * self.strides[1]
        return self.base.as_strided(self.block_shape, self.strides, offset)


class Kernel:
    """A function of Gluon: launched on a grid, or called by another."""

    program, programs = (0, 0), (0, 0)

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    @torch.no_grad()  # of threads, too
    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return self._function(*arguments, **options)

    def __getitem__(self, grid: tuple[int, int]) -> Callable[..., None]:
        def launch(*arguments: Any, **constants: Any) -> None:
            for name in ("num_warps", "num_stages", "maxnreg"):
                constants.pop(name)
            given = [Pointer.to(x) if isinstance(x, Tensor) else x for x in arguments]
            Kernel.programs = grid
            for y in range(grid[1]):
                for x in range(grid[0]):
                    Kernel.program = x, y
                    self(*given, **constants)

        return launch


BARRIERS = object()
"""The layout of barriers in shared memory."""


def _allocate(dtype: torch.dtype, shape: Sequence[int], layout: Any) -> Any:
    if layout is BARRIERS:
        return Barriers(shape[0])
    return Shared(torch.full(list(shape), torch.nan).to(dtype))


def _load(pointer: Pointer, mask: Any = True, other: float = 0.0) -> Block:
    mask, offset = torch.broadcast_tensors(block(mask), block(pointer.offset))
    found = pointer.memory[torch.where(mask, offset, 0)]
    return block(torch.where(mask, found, other))


def _store(pointer: Pointer, value: Tensor) -> None:
    pointer.memory[pointer.offset.as_subclass(Tensor)] = value.as_subclass(Tensor)


def _specialize(
    groups: Sequence[tuple[Kernel, tuple[Any, ...]]], _warps: Any, _registers: Any
) -> None:
    with ThreadPoolExecutor(len(groups)) as pool:
        started = [pool.submit(function, *arguments) for function, arguments in groups]
        for future in as_completed(started):
            future.result()


def _ignored(*_: Any, **__: Any) -> None:
    """A layout, a fence, or a wait for what is done at once."""


def _language() -> ModuleType:
    gl: Any = ModuleType("gl")
    gl.float16, gl.float32 = torch.float16, torch.float32
    gl.int32, gl.int64 = torch.int32, torch.int64
    gl.constexpr, gl.static_range = (lambda x: x), range
    gl.program_id = lambda axis: block(Kernel.program[axis])
    gl.num_programs = lambda axis: Kernel.programs[axis]
    gl.arange = lambda start, stop, layout: block(torch.arange(start, stop))
    gl.full = lambda shape, value, dtype, layout: block(torch.full(shape, value, dtype=dtype))
    gl.zeros = lambda shape, dtype, layout: block(torch.zeros(shape, dtype=dtype))
    gl.where, gl.maximum, gl.minimum = torch.where, torch.maximum, torch.minimum
    gl.max, gl.sum = torch.amax, torch.sum
    gl.exp2, gl.log2 = torch.exp2, lambda x: torch.log2(block(x))
    gl.convert_layout = lambda x, layout, assert_trivial=False: x
    gl.load, gl.store = _load, _store
    gl.allocate_shared_memory, gl.warp_specialize = _allocate, _specialize
    gl.thread_barrier = _ignored
    layouts = ("BlockedLayout", "DotOperandLayout", "NVMMADistributedLayout", "SliceLayout")
    for name in (*layouts, "SwizzledSharedLayout"):
        setattr(gl, name, _ignored)
    gl.NVMMASharedLayout = SimpleNamespace(get_default_for=_ignored)
    return gl


def _hopper() -> ModuleType:
    def copy(
        source: Descriptor, place: Sequence[Any], barrier: Barrier, to: Shared, pred: Any = True
    ) -> None:
        if pred:
            to.store(source.at(place))
            barrier.arrive(0, arrived=source.block_type.nbytes)

    def expect(barrier: Barrier, count: int, pred: Any = True) -> None:
        if pred:
            barrier.arrive(1, expected=count)

    def product(a: Any, b: Any, total: Tensor, use_acc: bool = True, is_async: bool = False) -> Any:
        a, b = ((x.data if isinstance(x, Shared) else x).float() for x in (a, b))
        found = a @ b
        return block(found + total if use_acc else found)

    hopper: Any = ModuleType("hopper")
    hopper.fence_async_shared = _ignored
    hopper.mbarrier = SimpleNamespace(
        MBarrierLayout=lambda: BARRIERS,
        init=lambda barrier, count: barrier.init(count),
        expect=expect,
        arrive=lambda barrier, count: barrier.arrive(count),
        wait=lambda barrier, parity: barrier.wait(int(parity)),
    )
    hopper.tma = SimpleNamespace(async_copy_global_to_shared=copy, store_wait=_ignored)
    hopper.warpgroup_mma = product
    hopper.warpgroup_mma_init = lambda x: x
    hopper.warpgroup_mma_wait = lambda _, deps: deps[0] if len(deps) == 1 else tuple(deps)
    return hopper


@contextmanager
def interpreted() -> Iterator[None]:
    """Within this context the kernels for whole segments are run by this interpreter."""
    gluon, hopper = ModuleType("gluon"), _hopper()
    vars(gluon).update(jit=Kernel, constexpr_function=lambda function: function)
    vars(hopper)["TensorDescriptor"] = None  # `describe` is replaced below
    experimental = "triton.experimental"
    fakes: dict[str, Any] = {
        experimental: SimpleNamespace(gluon=gluon),
        f"{experimental}.gluon": gluon,
        f"{experimental}.gluon.language": _language(),
        f"{experimental}.gluon.language._core": SimpleNamespace(builtin=lambda function: function),
        f"{experimental}.gluon.language.nvidia.hopper": hopper,
        f"{experimental}.gluon.nvidia.hopper": hopper,
    }
    vars(gluon)["language"] = fakes[f"{experimental}.gluon.language"]
    package = importlib.import_module(KERNELS)
    before = {name: vars(package).pop(name) for name in MODULES if name in vars(package)}
    with patch.dict(sys.modules, fakes):
        for name in MODULES:
            sys.modules.pop(f"{KERNELS}.{name}", None)
        parts: Any = importlib.import_module(f"{KERNELS}.{MODULES[0]}")
        parts.describe = Descriptor
        parts.async_add_shared_to_global = lambda to, place, tile: to.at(place).add_(tile.data)
        kernels = [importlib.import_module(f"{KERNELS}.{name}") for name in MODULES[1:]]
    with patch.dict(sys.modules, {module.__name__: module for module in (parts, *kernels)}):
        try:
            yield
        finally:
            for name in MODULES:
                vars(package).pop(name, None)
            vars(package).update(before)
