"""What a run tells: metrics on disk, a console for people, the environment it ran in."""

from longspan.tracking.console import Reporter
from longspan.tracking.environment import describe_environment
from longspan.tracking.metrics import MetricsFile

__all__ = ["MetricsFile", "Reporter", "describe_environment"]
