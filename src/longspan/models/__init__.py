"""The decoder, and what it computes."""

from longspan.models.decoder import (
    Decoder,
    build_decoder,
    count_parameters,
    create_model,
    new_decoder,
    parameter_shapes,
)
from longspan.models.flops import flops_per_sample

__all__ = [
    "Decoder",
    "build_decoder",
    "count_parameters",
    "create_model",
    "flops_per_sample",
    "new_decoder",
    "parameter_shapes",
]
