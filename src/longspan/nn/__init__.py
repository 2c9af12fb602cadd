"""Layers other than attention."""

from longspan.nn.loss import cross_entropy_sum, logits_of
from longspan.nn.mlp import MakeLinear, SwiGLU
from longspan.nn.mode import eval_mode
from longspan.nn.norm import RMSNorm
from longspan.nn.rope import apply_rope, rope_table

__all__ = [
    "MakeLinear",
    "RMSNorm",
    "SwiGLU",
    "apply_rope",
    "cross_entropy_sum",
    "eval_mode",
    "logits_of",
    "rope_table",
]
