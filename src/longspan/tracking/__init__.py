"""What a run tells: metrics on disk, a console for people, the environment it ran in."""

from longspan.tracking.console import Reporter
from longspan.tracking.environment import describe_environment
from longspan.tracking.history import History, goodput
from longspan.tracking.metrics import MetricsFile, lines_of

__all__ = [
    "History",
    "MetricsFile",
    "Reporter",
    "describe_environment",
    "goodput",
    "lines_of",
]
