"""Attention: patterns, the float64 oracle, `attend` and context parallelism.

The modules are in `modules`, which imports DTensor: half a second that a plan does not need.
"""

from longspan.attention.cache import KVCache, KVCaches
from longspan.attention.context_parallel.sharded import (
    attend_sharded,
    choose_shards,
    choose_strategy,
)
from longspan.attention.context_parallel.shards import Heads, Shards
from longspan.attention.functional import attend, choose_backend
from longspan.attention.mask import Mask
from longspan.attention.newest import attend_newest
from longspan.attention.oracle import attend_oracle
from longspan.attention.pattern import BlockSparse, Dense, Dilated, Pattern, pattern_of, patterns_of
from longspan.attention.picture import picture, picture_svg
from longspan.attention.window import Window

__all__ = [
    "BlockSparse",
    "Dense",
    "Dilated",
    "Heads",
    "KVCache",
    "KVCaches",
    "Mask",
    "Pattern",
    "Shards",
    "Window",
    "attend",
    "attend_newest",
    "attend_oracle",
    "attend_sharded",
    "choose_backend",
    "choose_shards",
    "choose_strategy",
    "pattern_of",
    "patterns_of",
    "picture",
    "picture_svg",
]
