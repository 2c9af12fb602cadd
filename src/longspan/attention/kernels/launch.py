"""Launches of Triton kernels, whose compiled form is cached after the first call."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Timer
from typing import Any

import torch
import triton
from torch import Tensor
from triton.runtime import JITFunction
from triton.runtime._async_compile import AsyncCompileMode
from triton.tools.tensor_descriptor import TensorDescriptor

ANNOUNCED_AFTER_S = 2.0
"""Seconds of compilation after which a message says what the program waits for."""


def has_gluon(device: torch.device) -> bool:
    """Whether the kernels in Gluon run: it is experimental, and they were tested with Triton 3.6
    and 3.7, on compute capability 9.0."""
    return (
        device.type == "cuda"
        and torch.version.hip is None
        and torch.cuda.get_device_capability(device) == (9, 0)
        and triton.__version__.startswith(("3.6.", "3.7."))
    )


@dataclass(frozen=True)
class Tiles:
    """Queries and keys per tile, and compiler options of the kernel."""

    queries: int
    keys: int
    warps: int
    stages: int
    registers: int | None = None  # the maximum per thread


class Launch:
    """One launch with all arguments bound except its pointers.

    After the first call the compiled kernel is called directly: Triton's lookup by arguments costs
    more than the launch itself. Nothing that Triton specialises on may change, so every pointer is
    16-byte aligned and all other arguments are bound here.
    """

    def __init__(
        self, kernel: Any, grid: tuple[int | None, int], scalars: tuple[Any, ...],
        constants: Mapping[str, Any], tiles: Tiles,
        describe: Callable[[Tensor], TensorDescriptor] | None = None,
    ) -> None:  # fmt: skip
        """`grid`: programs, with None one for each item of a work table, the last pointer;
        `describe`: makes the descriptor of a tensor that is read or written in tiles."""
        self.kernel, self.grid, self.scalars, self.constants = kernel, grid, scalars, constants
        self.tiles, self._describe = tiles, describe
        self._compiled: Any = None
        self._prototypes: dict[int, Any] = {}

    @property
    def is_compiled(self) -> bool:
        return self._compiled is not None

    def __call__(self, *pointers: Any) -> None:
        grid = self._grid_of(pointers)
        if self._compiled is not None:
            self._compiled[(*grid, 1)](*pointers, *self.scalars, *self.constants.values())
        else:  # the interpreter compiles nothing and returns None
            self._compiled = self.kernel[grid](*pointers, *self.scalars, **self._options)

    def compile(self, *pointers: Any) -> None:
        """Compile the kernel for these arguments; within AsyncCompileMode only start to."""
        if isinstance(self.kernel, JITFunction):  # not interpreted
            grid = self._grid_of(pointers)
            self.kernel.warmup(*pointers, *self.scalars, grid=grid, **self._options)

    def _grid_of(self, pointers: tuple[Any, ...]) -> tuple[int, int]:
        programs, heads = self.grid
        return len(pointers[-1]) if programs is None else programs, heads

    @property
    def _options(self) -> dict[str, Any]:
        return {
            **self.constants,
            "num_warps": self.tiles.warps,
            "num_stages": self.tiles.stages,
            "maxnreg": self.tiles.registers,
        }

    def descriptor(self, index: int, x: Tensor) -> Any:
        """The descriptor of x; validated once per launch, whose tensors `index` distinguishes."""
        if index not in self._prototypes:
            assert self._describe is not None
            descriptor = self._describe(x)
            self._prototypes[index] = type(descriptor), {**vars(descriptor), "base": None}
        kind, attributes = self._prototypes[index]
        new = object.__new__(kind)
        vars(new).update(attributes, base=x)
        return new


def tiles_of_rows(rate: int, rows: int, dims: int) -> Callable[[Tensor], TensorDescriptor]:
    """Describes x (batch, tokens, heads, head_dim) as (batch, rows, rate, heads, head_dim)."""

    def describe(x: Tensor) -> TensorDescriptor:
        batch, tokens, heads, head_dim = x.shape
        b, n, h, _ = x.stride()
        shape, strides = [batch, tokens // rate, rate, heads, head_dim], [b, rate * n, n, h, 1]
        return TensorDescriptor(x, shape, strides, [1, rows, 1, 1, dims])

    return describe


def launch_all(launches: Sequence[Launch], pointers: Sequence[tuple[Any, ...]]) -> None:
    """Launch kernels one after the other; new ones are compiled first, side by side."""
    if not launches[0].is_compiled:
        with (
            _announced(f"compiling {len(launches)} attention kernels for new inputs"),
            ThreadPoolExecutor(len(launches)) as pool,
            AsyncCompileMode(pool),
        ):
            for launch, arguments in zip(launches, pointers, strict=True):
                launch.compile(*arguments)
    for launch, arguments in zip(launches, pointers, strict=True):
        launch(*arguments)


@contextmanager
def _announced(text: str) -> Iterator[None]:
    """Print `text` if what is done in this context takes long."""
    message = f"longspan: {text}; Triton caches them on disk"
    timer = Timer(ANNOUNCED_AFTER_S, print, [message], {"file": sys.stderr, "flush": True})
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
