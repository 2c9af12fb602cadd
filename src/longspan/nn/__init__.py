"""Layers other than attention."""

from longspan.nn.conversion import (
    Report,
    Row,
    fit_low_rank,
    fit_sketched,
    random_sketch,
    report,
    sketch,
    to_dense,
)
from longspan.nn.loss import cross_entropy_sum, logits_of
from longspan.nn.mlp import MakeLinear, SwiGLU
from longspan.nn.norm import RMSNorm
from longspan.nn.rope import apply_rope, rope_table
from longspan.nn.sketched import LowRankLinear, SKLinear, layer_seed

__all__ = [
    "LowRankLinear",
    "MakeLinear",
    "RMSNorm",
    "Report",
    "Row",
    "SKLinear",
    "SwiGLU",
    "apply_rope",
    "cross_entropy_sum",
    "fit_low_rank",
    "fit_sketched",
    "layer_seed",
    "logits_of",
    "random_sketch",
    "report",
    "rope_table",
    "sketch",
    "to_dense",
]
