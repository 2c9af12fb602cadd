"""One launch of a Triton kernel, whose compiled form is kept from the first time on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor


@dataclass(frozen=True)
class Tiles:
    """Queries and keys per tile, and how the compiler is to lay the kernel out."""

    queries: int
    keys: int
    warps: int
    stages: int
    registers: int | None = None  # the most a thread may use


class Launch:
    """One launch, ready but for its pointers.

    After the first time the compiled kernel is called directly: looking it up by its arguments
    costs Triton more than the launch itself. Nothing it was specialised on may change, so every
    pointer is 16-byte aligned and all else is bound here.
    """

    def __init__(
        self, kernel: Any, grid: tuple[int, int], numbers: tuple[Any, ...],
        constants: Mapping[str, Any], tiles: Tiles, unit: tuple[int, int, int] = (1, 1, 1),
    ) -> None:  # fmt: skip
        self.kernel, self.grid, self.numbers, self.constants = kernel, grid, numbers, constants
        self.tiles, self.unit = tiles, unit
        self._run: Any = None
        self._prototypes: dict[int, Any] = {}

    def __call__(self, *pointers: Any) -> None:
        if self._run is not None:
            self._run(*pointers, *self.numbers, *self.constants.values())
            return
        compiled = self.kernel[self.grid](
            *pointers, *self.numbers, **self.constants, num_warps=self.tiles.warps,
            num_stages=self.tiles.stages, maxnreg=self.tiles.registers,
        )  # fmt: skip
        if compiled is not None:  # the interpreter compiles nothing
            self._run = compiled[(*self.grid, 1)]

    def described(self, index: int, x: Tensor) -> Any:
        """(batch, tokens, heads, head_dim) as (batch, rows, rate, heads, head_dim), read in tiles.

        Checked once; `index` tells one tensor of a launch from another.
        """
        if index not in self._prototypes:
            rate, rows, dims = self.unit
            batch, tokens, heads, head_dim = x.shape
            b, n, h, _ = x.stride()
            shape, strides = [batch, tokens // rate, rate, heads, head_dim], [b, rate * n, n, h, 1]
            descriptor = TensorDescriptor(x, shape, strides, [1, rows, 1, 1, dims])
            self._prototypes[index] = {**vars(descriptor), "base": None}
        new = object.__new__(TensorDescriptor)
        vars(new).update(self._prototypes[index], base=x)
        return new
