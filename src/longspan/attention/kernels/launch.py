"""One launch of a Triton kernel; its compiled form is cached after the first call."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor


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
        self, kernel: Any, grid: tuple[int, int], scalars: tuple[Any, ...],
        constants: Mapping[str, Any], tiles: Tiles, tile_shape: tuple[int, int, int] = (1, 1, 1),
    ) -> None:  # fmt: skip
        self.kernel, self.grid, self.scalars, self.constants = kernel, grid, scalars, constants
        self.tiles, self.tile_shape = tiles, tile_shape  # (rate, rows, dims)
        self._run: Any = None
        self._prototypes: dict[int, Any] = {}

    def __call__(self, *pointers: Any) -> None:
        if self._run is not None:
            self._run(*pointers, *self.scalars, *self.constants.values())
            return
        compiled = self.kernel[self.grid](
            *pointers, *self.scalars, **self.constants, num_warps=self.tiles.warps,
            num_stages=self.tiles.stages, maxnreg=self.tiles.registers,
        )  # fmt: skip
        if compiled is not None:  # the interpreter compiles nothing
            self._run = compiled[(*self.grid, 1)]

    def descriptor(self, index: int, x: Tensor) -> Any:
        """x (batch, tokens, heads, head_dim) as (batch, rows, rate, heads, head_dim), in tiles.

        Validated once per launch; `index` distinguishes its tensors.
        """
        if index not in self._prototypes:
            rate, rows, dims = self.tile_shape
            batch, tokens, heads, head_dim = x.shape
            b, n, h, _ = x.stride()
            shape, strides = [batch, tokens // rate, rate, heads, head_dim], [b, rate * n, n, h, 1]
            descriptor = TensorDescriptor(x, shape, strides, [1, rows, 1, 1, dims])
            self._prototypes[index] = {**vars(descriptor), "base": None}
        new = object.__new__(TensorDescriptor)
        vars(new).update(self._prototypes[index], base=x)
        return new
