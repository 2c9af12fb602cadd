"""Sums over the ranks that hold parts of one layer."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import all_reduce, wait_tensor


def summed(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum of x over `group`, in a form that torch.compile can follow."""
    total: Tensor = wait_tensor(all_reduce(x, "sum", group))  # type: ignore[no-untyped-call]
    return total
