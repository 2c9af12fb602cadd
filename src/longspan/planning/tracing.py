"""Memory of any module's training step, traced: every tensor is fake, so it needs no GPU.

The formulas of `activations.py` are checked against it. What a trace does not see are the
allocator's rounding and the workspaces inside kernels.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from longspan.torch_internals import TorchDispatchMode, fake_tensors, tree_leaves, tree_map_only


class LiveMemory(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of the storages that operators allocate, until they are freed.

    Views share a storage, and count once. `live` is now, `peak` since the last `reset_peak`.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = self.peak = 0
        self._known: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()

    def reset_peak(self) -> None:
        self.peak = self.live

    def add(self, *tensors: Tensor) -> None:
        """Count tensors that exist already, or came without an operator."""
        for x in tensors:
            local = getattr(x, "_local_tensor", x)  # of a DTensor
            local = getattr(local, "elem", local)  # of a collective that has not ended
            storage = local.untyped_storage()
            if storage in self._known:
                continue
            size = storage.nbytes()
            self._known[storage] = size
            self.live += size
            self.peak = max(self.peak, self.live)
            weakref.finalize(storage, self._free, size)

    def _free(self, size: int) -> None:
        self.live -= size

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        self.add(*(x for x in tree_leaves(out) if isinstance(x, Tensor)))
        return out


@dataclass(frozen=True)
class TracedMemory:
    """Bytes of one forward and backward pass of a module."""

    parameters: int
    """Of parameters and buffers."""
    gradients: int
    activations: int
    """Kept from the forward pass for the backward pass, the inputs not among them."""
    peak: int
    """The most that is allocated at one time, the above, the inputs and all else included."""


def trace_memory(
    module: nn.Module,
    *inputs: Any,
    loss: Callable[[Any], Tensor] | None = None,
    precision: str = "fp32",
    **named_inputs: Any,
) -> TracedMemory:
    """The memory of `module(*inputs)` and its backward pass, without computing anything.

    The module and its inputs may be on the meta device; they are left as they are. `loss` makes a
    scalar of the module's output; by default the output is summed. `precision`: "fp32", or "bf16"
    or "fp16" for autocast. The trace runs the module's Python code once, as on a CPU: code that
    depends on values cannot be traced.
    """
    dtypes = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
    if precision not in dtypes:
        raise ValueError(f"precision must be one of {', '.join(dtypes)}, got {precision!r}")
    dtype = dtypes[precision]
    with fake_tensors(), LiveMemory() as memory:

        def fake(x: Tensor) -> Tensor:
            new = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cpu")
            return new.requires_grad_(x.requires_grad)

        twins: dict[int, Tensor] = {}

        def twin(x: Tensor) -> Tensor:
            if id(x) not in twins:
                new = fake(x)
                is_parameter = isinstance(x, nn.Parameter)
                twins[id(x)] = nn.Parameter(new, x.requires_grad) if is_parameter else new
            return twins[id(x)]

        tensors = {
            name: twin(x)
            for name, x in (
                *module.named_parameters(remove_duplicate=False),
                *module.named_buffers(remove_duplicate=False),
            )
        }
        states = memory.live
        args, kwargs = tree_map_only(Tensor, fake, (inputs, named_inputs))
        before = memory.live
        with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
            out = torch.func.functional_call(module, tensors, args, kwargs)
            total = loss(out) if loss else _sum(out)
        del out
        activations = memory.live - before - total.untyped_storage().nbytes()
        total.backward()  # type: ignore[no-untyped-call]
        gradients = sum(x.grad.nbytes for x in twins.values() if x.grad is not None)
        return TracedMemory(states, gradients, activations, memory.peak)


def _sum(out: Any) -> Tensor:
    """The sum of all tensors in a module's output that have a gradient."""
    found = [x.sum() for x in tree_leaves(out) if isinstance(x, Tensor) and x.requires_grad]
    if not found:
        raise ValueError("the module's output has no gradient: give a loss that has one")
    return torch.stack(found).sum()
