"""What a run takes, before it runs."""

from longspan.planning.memory import States, states_of
from longspan.planning.plan import Form, Plan, plan

__all__ = ["Form", "Plan", "States", "plan", "states_of"]
