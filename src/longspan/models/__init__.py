"""The decoder, and what it computes."""

from longspan.models.decoder import (
    Decoder,
    new_decoder,
    parameter_shapes,
    stored_shapes,
)
from longspan.models.initial import build_decoder

__all__ = [
    "Decoder",
    "build_decoder",
    "new_decoder",
    "parameter_shapes",
    "stored_shapes",
]
