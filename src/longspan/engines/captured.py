"""The forward and backward pass of a micro-batch as CUDA graphs: for steps of few tokens, whose
kernels take less time than the host takes to launch them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from longspan.errors import UserError

Inputs = tuple[Tensor | None, ...]
Pass = Callable[[Inputs, Tensor], Tensor]

WARM_UP = 3
"""Passes before the one that is captured, in which kernels are compiled and chosen."""


class CapturedPass:
    """Calls a function of inputs and a scale, a forward and backward pass that returns the loss, by
    its graph.

    There are two graphs: one for the first pass of a step, which writes gradients where they were
    written before, and one for others, which adds to them. Inputs of another shape are run as is,
    and so is what is added to gradients of such a pass.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        """`parameters`: those to which the function gives gradients."""
        self._parameters, self._passes = parameters, 0
        self._first: torch.cuda.CUDAGraph | None = None
        self._next: torch.cuda.CUDAGraph | None = None
        self._inputs: Inputs = ()
        self._scale, self._loss = torch.empty(0), torch.empty(0)
        self._gradients: list[Tensor | None] = []

    def __call__(self, run: Pass, inputs: Inputs, scale: Tensor) -> Tensor:
        """`run`: the same function in every call."""
        self._passes += 1
        held = [parameter.grad for parameter in self._parameters]
        begins = all(gradient is None for gradient in held)
        adds = self._first is not None and _are_same(held, self._gradients)
        is_warm = self._first is not None or self._passes > WARM_UP
        if not (is_warm and (begins or adds) and self._fits(inputs)):
            return run(inputs, scale)
        if self._first is None:
            self._inputs = tuple(x if x is None else x.clone() for x in inputs)
            self._scale = scale.clone()
        for static, given in zip((*self._inputs, self._scale), (*inputs, scale), strict=True):
            if static is not None and given is not None:
                static.copy_(given)
        if adds:
            self._next = self._next or self._capture(run)
            self._next.replay()
        else:
            self._first = self._first or self._capture(run)
            self._first.replay()
            for parameter, gradient in zip(self._parameters, self._gradients, strict=True):
                parameter.grad = gradient
        return self._loss.clone()

    def _fits(self, inputs: Inputs) -> bool:
        return not self._inputs or _shapes(inputs) == _shapes(self._inputs)

    def _capture(self, run: Pass) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        pool = None if self._first is None else self._first.pool()
        # The threads that read samples and write checkpoints may call CUDA meanwhile.
        try:
            with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                loss = run(self._inputs, self._scale)
                if self._first is not None:
                    self._loss.copy_(loss)
        except RuntimeError as error:
            # The end of a capture that ran out of memory may fail as well.
            for each in (error, error.__context__):
                if isinstance(each, torch.OutOfMemoryError):
                    raise each from None
            raise UserError(
                f"train.cuda_graphs: this run's step cannot be captured ({error}): set it to false"
            ) from error
        if self._first is None:
            self._loss = loss
            self._gradients = [parameter.grad for parameter in self._parameters]
        return graph


def _are_same(a: Sequence[Tensor | None], b: Sequence[Tensor | None]) -> bool:
    return all(x is y for x, y in zip(a, b, strict=True))


def _shapes(inputs: Inputs) -> list[torch.Size | None]:
    return [None if x is None else x.shape for x in inputs]
