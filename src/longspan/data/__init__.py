"""Training data: token shards on disk, sources of samples, and their stateless shuffling."""

from longspan.data.dataset import DatasetSource, Failure
from longspan.data.loader import DatasetLoader
from longspan.data.opening import open_source
from longspan.data.prefetch import Prefetcher
from longspan.data.samples import Baseline, Batch, Sample, collate, count_targets
from longspan.data.source import Source

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
