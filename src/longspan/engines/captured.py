"""The forward and backward pass of a micro-batch as a CUDA graph: for steps of few tokens, whose
kernels take less time than the host takes to launch them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

Inputs = tuple[Tensor | None, ...]

WARM_UP = 3
"""Passes before the one that is captured, in which kernels are compiled and chosen."""


class CapturedPass:
    """Calls `run(inputs, scale)`, a forward and backward pass that returns a loss, by its graph.

    There are two graphs: one for the first pass of a step, which writes gradients where they were
    written before, and one for others, which adds to them. Inputs of another shape are run as is.
    """

    def __init__(
        self, run: Callable[[Inputs, Tensor], Tensor], parameters: Sequence[nn.Parameter]
    ) -> None:
        self._run, self._parameters, self._passes = run, parameters, 0
        self._graphs: dict[bool, torch.cuda.CUDAGraph] = {}
        self._inputs: Inputs = ()
        self._scale, self._losses = torch.empty(0), dict[bool, Tensor]()
        self._gradients: list[Tensor | None] = []

    def __call__(self, inputs: Inputs, scale: Tensor) -> Tensor:
        self._passes += 1
        if self._passes <= WARM_UP or (self._inputs and not self._fits(inputs)):
            return self._run(inputs, scale)
        adds = any(parameter.grad is not None for parameter in self._parameters)
        if adds and not self._graphs:  # the gradients so far are not those of a graph
            return self._run(inputs, scale)
        if not self._inputs:
            self._inputs = tuple(x if x is None else x.clone() for x in inputs)
            self._scale = scale.clone()
        for static, given in zip(self._inputs, inputs, strict=True):
            if static is not None and given is not None:
                static.copy_(given)
        self._scale.copy_(scale)
        if adds not in self._graphs:
            self._capture(adds)
        self._graphs[adds].replay()
        for parameter, gradient in zip(self._parameters, self._gradients, strict=True):
            parameter.grad = gradient
        return self._losses[adds].clone()

    def _fits(self, inputs: Inputs) -> bool:
        shapes = ([None if x is None else x.shape for x in y] for y in (inputs, self._inputs))
        given, captured = shapes
        return given == captured

    def _capture(self, adds: bool) -> None:
        graph, pool = torch.cuda.CUDAGraph(), None
        if self._graphs:
            pool = next(iter(self._graphs.values())).pool()
        # The threads that read samples and write checkpoints may call CUDA meanwhile.
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            self._losses[adds] = self._run(self._inputs, self._scale)
        self._graphs[adds] = graph
        if not adds:
            self._gradients = [parameter.grad for parameter in self._parameters]
