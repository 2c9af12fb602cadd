"""What a run records: metrics, its history of starts and failures, console output, environment."""

from longspan.tracking.console import Reporter
from longspan.tracking.environment import describe_environment
from longspan.tracking.history import HISTORY, History, exit_reason, goodput
from longspan.tracking.lines import DiskErrors
from longspan.tracking.metrics import MetricsFile, read_metrics
from longspan.tracking.sinks import check_installed, open_sinks

__all__ = [
    "HISTORY",
    "DiskErrors",
    "History",
    "MetricsFile",
    "Reporter",
    "check_installed",
    "describe_environment",
    "exit_reason",
    "goodput",
    "open_sinks",
    "read_metrics",
]
