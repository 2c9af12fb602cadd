"""Tokens: shards on disk, the sources of samples, and their stateless order."""

from longspan.data.source import (
    Baseline,
    Batch,
    Sample,
    Source,
    batch_of,
    count_targets,
    open_source,
)

__all__ = ["Baseline", "Batch", "Sample", "Source", "batch_of", "count_targets", "open_source"]
