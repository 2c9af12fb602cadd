"""The decoder, and what it computes."""

from longspan.models.decoder import (
    Decoder,
    build_decoder,
    new_decoder,
    parameter_shapes,
    stored_shapes,
)

__all__ = [
    "Decoder",
    "build_decoder",
    "new_decoder",
    "parameter_shapes",
    "stored_shapes",
]
