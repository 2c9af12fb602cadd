"""A decoding step: the newest token of each row of a batch to the logits of the next one."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from longspan.attention import KVCaches
from longspan.models.decoder import Block, Decoder


class DecodeStep:
    """Calls `next_logits(tokens, caches)` with tokens (batch, 1), on a GPU as a CUDA graph.

    The graph is captured in the first call. A step reads and writes the buffers of `caches`, whose
    shapes never change; what depends on positions is computed from a tensor that the step advances.
    """

    def __init__(
        self,
        next_logits: Callable[[Tensor, KVCaches], Tensor],
        caches: KVCaches,
        forward_context: Callable[[], AbstractContextManager[object]],
        *,
        captures: bool = False,
    ) -> None:
        self.caches = caches
        self._next_logits, self._forward_context = next_logits, forward_context
        self._captures = captures
        self._graph: torch.cuda.CUDAGraph | None = None
        self._tokens = self._logits = torch.empty(0)

    def __call__(self, tokens: Tensor) -> Tensor:
        """The logits (batch, vocab); a later call may overwrite them."""
        if not self._captures:
            return self._run(tokens)
        if self._graph is None:
            self._graph = self._capture(tokens)
        self._tokens.copy_(tokens)
        self._graph.replay()
        self.caches.positions.length += 1
        return self._logits

    def _run(self, tokens: Tensor) -> Tensor:
        with self._forward_context():
            return self._next_logits(tokens, self.caches)

    def _capture(self, tokens: Tensor) -> torch.cuda.CUDAGraph:
        self._tokens = tokens.clone()
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):  # kernels are compiled and libraries initialised before a capture
                self._run(self._tokens)
                self._rewind()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._logits = self._run(self._tokens)
        self.caches.positions.length -= 1  # a capture computes nothing
        return graph

    def _rewind(self) -> None:
        """Undo a step. It has overwritten rows that no later query sees, and its own."""
        self.caches.positions.length -= 1
        self.caches.positions.next -= 1


def is_whole(model: object) -> bool:
    """Whether this process holds all of a decoder, as plain tensors in plain blocks.

    Blocks that are wrapped for activation checkpointing read the random state, for which the host
    waits.
    """
    if not isinstance(model, Decoder) or any(type(x) is not Block for x in model.blocks):
        return False
    return not any(isinstance(parameter, DTensor) for parameter in model.parameters())


@torch.no_grad()
def round_weights(model: Decoder, dtype: torch.dtype) -> None:
    """Round the weights of linear layers to `dtype`, in place, as autocast does in every step.

    A tied head becomes a copy of the embedding, whose own output is not rounded.
    """
    if model.head is None:
        vocab, width = model.embedding.weight.shape
        model.head = nn.Linear(width, vocab, bias=False, device="meta")
        model.head.weight = nn.Parameter(model.embedding.weight.to(dtype))
    for layer in model.modules():
        if isinstance(layer, nn.Linear):
            layer.weight = nn.Parameter(layer.weight.to(dtype), requires_grad=False)
