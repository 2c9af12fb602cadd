"""What is attended: patterns, the float64 oracle and the operator."""

from longspan.attention.operator import attend
from longspan.attention.oracle import attend_oracle
from longspan.attention.pattern import Dense, Dilated, Pattern, pattern_of

__all__ = ["Dense", "Dilated", "Pattern", "attend", "attend_oracle", "pattern_of"]
