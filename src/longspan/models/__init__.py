"""The decoder."""

from longspan.models.decoder import Decoder, build_decoder, count_parameters

__all__ = ["Decoder", "build_decoder", "count_parameters"]
