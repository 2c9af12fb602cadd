"""What a run takes, before it runs."""

from longspan.planning.plan import Form, Plan, plan
from longspan.planning.states import States, states_of

__all__ = ["Form", "Plan", "States", "plan", "states_of"]
