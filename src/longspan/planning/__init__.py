"""Planning: parameters, FLOPs and memory of a run, before it runs."""

from longspan.planning.memory import DeviceMemory, memory_per_rank
from longspan.planning.plan import Alternative, Plan, plan

__all__ = ["Alternative", "DeviceMemory", "Plan", "memory_per_rank", "plan"]
