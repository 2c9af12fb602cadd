"""Layers other than attention."""

from longspan.nn.conversion import Report, report, sketch, to_dense
from longspan.nn.loss import cross_entropy_sum, logits_of
from longspan.nn.mlp import MakeLinear, SwiGLU
from longspan.nn.norm import RMSNorm
from longspan.nn.rope import apply_rope, rope_table
from longspan.nn.sketched import LowRankLinear, SKLinear

__all__ = [
    "LowRankLinear",
    "MakeLinear",
    "RMSNorm",
    "Report",
    "SKLinear",
    "SwiGLU",
    "apply_rope",
    "cross_entropy_sum",
    "logits_of",
    "report",
    "rope_table",
    "sketch",
    "to_dense",
]
