"""Training data: token shards on disk, sources of samples, and their stateless shuffling."""

from longspan.data.dataset import DatasetSource, Failure
from longspan.data.loader import DatasetLoader
from longspan.data.prefetch import Prefetcher
from longspan.data.source import (
    Baseline,
    Batch,
    Sample,
    Source,
    collate,
    count_targets,
    open_source,
)

__all__ = [
    "Baseline",
    "Batch",
    "DatasetLoader",
    "DatasetSource",
    "Failure",
    "Prefetcher",
    "Sample",
    "Source",
    "collate",
    "count_targets",
    "open_source",
]
