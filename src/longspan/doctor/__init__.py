"""`longspan doctor`: what of this machine, its ranks and a run would keep the run from training.

Each check is a function that yields findings. `examination` runs them on every rank, each within a
time limit, and rank 0 joins what all have found in one report.
"""

from longspan.doctor.examination import examine
from longspan.doctor.finding import Finding, Report

__all__ = ["Finding", "Report", "examine"]
