"""Sketched and low-rank linear layers, and the conversion of trained layers to them."""

from longspan.sketching.conversion import Report, report, sketch, to_dense
from longspan.sketching.layers import FactoredLinear, LowRankLinear, SKLinear

__all__ = [
    "FactoredLinear",
    "LowRankLinear",
    "Report",
    "SKLinear",
    "report",
    "sketch",
    "to_dense",
]
