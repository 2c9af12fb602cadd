"""Records the collectives that a rank takes part in, as torch dispatches them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from longspan.attention.context_parallel import ring
from longspan.planning.traffic import Traffic
from longspan.torch_internals import TorchDispatchMode, process_group_of

COLLECTIVES = {
    "allreduce_": "all_reduce",
    "all_reduce": "all_reduce",
    "all_reduce_": "all_reduce",
    "_allgather_base_": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_to_all_single": "all_to_all",
    "alltoall_base_": "all_to_all",
    "send": "send_recv",
    "recv_": "send_recv",
    "broadcast_": "broadcast",
}
"""By operator of c10d and of the functional collectives."""
NO_COLLECTIVES = ("wait_tensor", "_wrap_tensor_autograd")


class Group(NamedTuple):
    """Collectives of one kind in groups of one size."""

    collective: str
    ranks: int


class Total(NamedTuple):
    """How many calls, and how many bytes in all of them."""

    calls: int
    bytes: int


class CollectiveRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While it is active, counts collectives by kind, ranks of the group and bytes of a call."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: Counter[tuple[str, int, int]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.longspan.ring_attention.default:
            with self:  # the operator hides its collectives
                return ring.forward_rounds(*args, **(kwargs or {}))
        result = func(*args, **(kwargs or {}))
        name = func.__name__.split(".")[0]
        if func.namespace not in ("c10d", "_c10d_functional") or name in NO_COLLECTIVES:
            return result
        values = list(_flat(args))
        tensors = [x for x in [*values, *_flat([result])] if isinstance(x, Tensor)]
        group = process_group_of(values)
        assert group is not None, name
        size = max(x.nbytes for x in tensors)
        self.calls[COLLECTIVES.get(name, name), group.size(), size] += 1
        return result

    def totals(self) -> dict[Group, Total]:
        """Calls and bytes by kind and ranks of the group."""
        return _totals((*key, calls) for key, calls in self.calls.items())


def totals_of(traffic: Iterable[Traffic]) -> dict[Group, Total]:
    """The same of planned traffic."""
    return _totals((x.collective, x.ranks, x.bytes, x.calls) for x in traffic)


def _totals(rows: Iterable[tuple[str, int, int, int]]) -> dict[Group, Total]:
    found: dict[Group, Total] = {}
    for collective, ranks, size, calls in rows:
        if ranks > 1:
            before = found.get(key := Group(collective, ranks), Total(0, 0))
            found[key] = Total(before.calls + calls, before.bytes + calls * size)
    return found


def _flat(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, list | tuple):
            yield from _flat(value)
        else:
            yield value
