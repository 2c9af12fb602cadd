"""Count collectives and the bytes that they communicate."""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class Collectives(TorchDispatchMode):
    """Counts the operators of torch.distributed by name, and the bytes of their inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.split(".")[0].removesuffix("_")
        is_collective = name not in ("wait_tensor", "_wrap_tensor_autograd")
        if is_collective and func.namespace in ("c10d", "_c10d_functional"):
            self.counts[name] += 1
            first = args[0] if isinstance(args[0], Tensor) else args[0][0]
            self.bytes[name] += first.nbytes if isinstance(first, Tensor) else 0
        return func(*args, **(kwargs or {}))
