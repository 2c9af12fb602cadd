"""What a run tells: metrics on disk, a console for people, the environment it ran in."""

from longspan.tracking.console import Reporter
from longspan.tracking.environment import describe_environment
from longspan.tracking.history import HISTORY, History, cause_of_end, goodput
from longspan.tracking.metrics import MetricsFile, lines_of

__all__ = [
    "HISTORY",
    "History",
    "MetricsFile",
    "Reporter",
    "cause_of_end",
    "describe_environment",
    "goodput",
    "lines_of",
]
