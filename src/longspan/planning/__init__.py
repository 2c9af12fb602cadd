"""Planning: parameters, FLOPs and memory of a run, before it runs."""

from longspan.planning.memory import DeviceMemory, memory_per_rank
from longspan.planning.plan import Alternative, Plan, plan
from longspan.planning.run_time import RunTime, predict

__all__ = ["Alternative", "DeviceMemory", "Plan", "RunTime", "memory_per_rank", "plan", "predict"]
