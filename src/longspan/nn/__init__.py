"""Layers other than attention."""

from longspan.nn.loss import cross_entropy_sum
from longspan.nn.mlp import SwiGLU
from longspan.nn.rope import apply_rope, rope_table

__all__ = ["SwiGLU", "apply_rope", "cross_entropy_sum", "rope_table"]
