"""The decoder."""

from longspan.models.decoder import (
    Decoder,
    build_decoder,
    count_parameters,
    create_model,
    new_decoder,
)

__all__ = ["Decoder", "build_decoder", "count_parameters", "create_model", "new_decoder"]
