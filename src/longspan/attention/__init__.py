"""What is attended: patterns, the float64 oracle and the operator."""

from longspan.attention.cache import KVCache
from longspan.attention.masked import Mask
from longspan.attention.operator import attend, choose_backend
from longspan.attention.oracle import attend_oracle
from longspan.attention.pattern import BlockSparse, Dense, Dilated, Pattern, pattern_of

__all__ = [
    "BlockSparse",
    "Dense",
    "Dilated",
    "KVCache",
    "Mask",
    "Pattern",
    "attend",
    "attend_oracle",
    "choose_backend",
    "pattern_of",
]
