"""The forward and backward pass of a micro-batch as CUDA graphs: for steps of few tokens, whose
kernels take less time than the host takes to launch them.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from traceback import clear_frames

import torch
from torch import Tensor, nn

from longspan.errors import UserError
from longspan.torch_internals import abandon_capture

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

    def __init__(self, parameters: Sequence[nn.Parameter], *, must: bool = True) -> None:
        """`parameters`: those to which the function gives gradients; `must`: a pass that cannot be
        captured is an error, instead of being run as is with a warning.
        """
        self._parameters, self._must, self._passes = parameters, must, 0
        self._cannot, self._bytes = False, 0
        self._release()

    def make_room(self) -> None:
        """Free the memory of a pass, between steps, if the device has no room for as much again.

        The next pass is captured anew then.
        """
        if self._first is None or self._has_room():
            return
        torch.cuda.empty_cache()
        if not self._has_room():
            self._release()

    def _has_room(self) -> bool:
        return torch.cuda.mem_get_info()[0] >= self._bytes

    def _release(self) -> None:
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
        can_replay = is_warm and (begins or adds) and self._fits(inputs)
        if self._cannot or not can_replay:
            return run(inputs, scale)
        if self._first is None:
            self._inputs = tuple(x if x is None else x.clone() for x in inputs)
            self._scale = scale.clone()
        for static, given in zip((*self._inputs, self._scale), (*inputs, scale), strict=True):
            if static is not None and given is not None:
                static.copy_(given)
        graph = self._next if adds else self._first
        if graph is None and (graph := self._capture(run)) is None:
            return run(inputs, scale)
        graph.replay()
        for parameter, gradient in zip(self._parameters, self._gradients, strict=True):
            parameter.grad = gradient
        return self._loss.clone()

    def _fits(self, inputs: Inputs) -> bool:
        return not self._inputs or _shapes(inputs) == _shapes(self._inputs)

    def _capture(self, run: Pass) -> torch.cuda.CUDAGraph | None:
        """The graph of the first pass of a step if there is none yet, else that of others; None if
        it cannot be captured, which a warning says.
        """
        is_first, graph = self._first is None, torch.cuda.CUDAGraph()
        before, cause = None, None
        pool = torch.cuda.graph_pool_handle() if self._first is None else self._first.pool()
        stream = torch.cuda.current_stream()
        try:
            # The threads that read samples and write checkpoints may call CUDA meanwhile.
            with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                before = torch.cuda.memory_reserved()
                try:
                    loss = run(self._inputs, self._scale)
                    if not is_first:
                        self._loss.copy_(loss)
                except BaseException as error:
                    cause = error
                    raise
        except RuntimeError as error:
            if error is not cause:  # the beginning or the end of the capture failed
                torch.cuda.set_stream(stream)
                if before is None:
                    raise
                abandon_capture(graph, pool)
            graph.reset()  # which the frames of the error keep
            self._release()
            if is_first:
                for parameter in self._parameters:
                    parameter.grad = None
            self._refuse(cause or error)
            return None
        if is_first:
            self._first, self._loss = graph, loss
            self._bytes = torch.cuda.memory_reserved() - before
            self._gradients = [parameter.grad for parameter in self._parameters]
        else:
            self._next = graph
        return graph

    def _refuse(self, cause: BaseException) -> None:
        """Raise `cause`, or explain it: why a pass cannot be captured.

        What lacks the memory for a capture may well have enough to be launched, as it was before.
        """
        is_out_of_memory = isinstance(cause, torch.OutOfMemoryError)
        if not isinstance(cause, RuntimeError) or (self._must and is_out_of_memory):
            raise cause
        message = f"the passes of this run cannot be CUDA graphs ({cause})"
        if self._must:
            raise UserError(f"{message}: set train.cuda_graphs = false") from cause
        clear_frames(cause.__traceback__)  # which hold activations
        self._cannot = True
        warnings.warn(f"{message}: they are launched", stacklevel=2)


def _are_same(a: Sequence[Tensor | None], b: Sequence[Tensor | None]) -> bool:
    return all(x is y for x, y in zip(a, b, strict=True))


def _shapes(inputs: Inputs) -> list[torch.Size | None]:
    return [None if x is None else x.shape for x in inputs]
