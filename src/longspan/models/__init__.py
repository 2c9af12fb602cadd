"""The decoder, and what it computes."""

from longspan.models.cost import (
    StageFlops,
    activation_elements,
    flops_per_sample,
    stage_flops,
)
from longspan.models.decoder import (
    Decoder,
    build_decoder,
    new_decoder,
    parameter_shapes,
)

__all__ = [
    "Decoder",
    "StageFlops",
    "activation_elements",
    "build_decoder",
    "flops_per_sample",
    "new_decoder",
    "parameter_shapes",
    "stage_flops",
]
