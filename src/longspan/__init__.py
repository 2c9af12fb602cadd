"""Longspan trains long-context transformers from one run file.

The public names below are imported when they are first used: `import longspan` imports no torch.
docs/api.md documents them.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # for type checkers and editors, which do not run `__getattr__`
    from longspan.attention import BlockSparse as BlockSparse
    from longspan.attention import Dense as Dense
    from longspan.attention import Dilated as Dilated
    from longspan.attention import KVCache as KVCache
    from longspan.attention import Window as Window
    from longspan.attention import attend as attend
    from longspan.attention import attend_sharded as attend_sharded
    from longspan.attention.modules import BlockSparseAttention as BlockSparseAttention
    from longspan.attention.modules import DilatedAttention as DilatedAttention
    from longspan.attention.modules import (
        MultiheadBlockSparseAttention as MultiheadBlockSparseAttention,
    )
    from longspan.attention.modules import MultiheadDilatedAttention as MultiheadDilatedAttention
    from longspan.config import Run as Run
    from longspan.create import create_model as create_model
    from longspan.errors import UserError as UserError
    from longspan.planning.plan import plan as plan
    from longspan.planning.tracing import trace_memory as trace_memory
    from longspan.runfile import load_run as load_run
    from longspan.sketching import LowRankLinear as LowRankLinear
    from longspan.sketching import SKLinear as SKLinear
    from longspan.sketching import sketch as sketch
    from longspan.sketching import to_dense as to_dense
    from longspan.trained import load_weights as load_weights
    from longspan.training import train as train
    from longspan.training.module_task import Task as Task
    from longspan.training.trainer import Trainer as Trainer
    from longspan.verification import verify as verify

__version__ = "0.1.0"

PUBLIC = {
    "attend": "longspan.attention",
    "attend_sharded": "longspan.attention",
    "Dense": "longspan.attention",
    "Dilated": "longspan.attention",
    "BlockSparse": "longspan.attention",
    "Window": "longspan.attention",
    "DilatedAttention": "longspan.attention.modules",
    "BlockSparseAttention": "longspan.attention.modules",
    "MultiheadDilatedAttention": "longspan.attention.modules",
    "MultiheadBlockSparseAttention": "longspan.attention.modules",
    "KVCache": "longspan.attention",
    "SKLinear": "longspan.sketching",
    "LowRankLinear": "longspan.sketching",
    "sketch": "longspan.sketching",
    "to_dense": "longspan.sketching",
    "Trainer": "longspan.training.trainer",
    "Task": "longspan.training.module_task",
    "load_weights": "longspan.trained",
    "Run": "longspan.config",
    "load_run": "longspan.runfile",
    "create_model": "longspan.create",
    "train": "longspan.training",
    "verify": "longspan.verification",
    "plan": "longspan.planning.plan",
    "trace_memory": "longspan.planning.tracing",
    "UserError": "longspan.errors",
}
"""The public names, in the order of docs/api.md, and the modules that define them.

A name is added here and above, and `python -m tests.api_page` writes it into docs/api.md.
"""

__all__ = ["__version__", *PUBLIC]


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used (PEP 562)."""
    if name not in PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(PUBLIC[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *PUBLIC})
