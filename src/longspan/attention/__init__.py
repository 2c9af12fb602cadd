"""What is attended: patterns, the float64 oracle and the operator."""

from longspan.attention.cache import KVCache
from longspan.attention.context_parallel.sharded import attend_sharded, best_shards, choose_way
from longspan.attention.context_parallel.shards import Heads, Shards
from longspan.attention.functional import attend, choose_backend
from longspan.attention.modules import (
    BlockSparseAttention,
    DilatedAttention,
    MultiheadDilatedAttention,
)
from longspan.attention.oracle import attend_oracle
from longspan.attention.pattern import BlockSparse, Dense, Dilated, Pattern, pattern_of
from longspan.attention.picture import picture, picture_svg
from longspan.attention.reference import Mask

__all__ = [
    "BlockSparse",
    "BlockSparseAttention",
    "Dense",
    "Dilated",
    "DilatedAttention",
    "Heads",
    "KVCache",
    "Mask",
    "MultiheadDilatedAttention",
    "Pattern",
    "Shards",
    "attend",
    "attend_oracle",
    "attend_sharded",
    "best_shards",
    "choose_backend",
    "choose_way",
    "pattern_of",
    "picture",
    "picture_svg",
]
