"""Constants that several packages share."""

IGNORE_INDEX = -100
"""The target of a position without loss, as in `torch.nn.functional.cross_entropy`."""
