"""What a run's model computes."""

from __future__ import annotations

from longspan.attention import pattern_of
from longspan.config import Run


def flops_per_sample(run: Run) -> tuple[float, float]:
    """Forward and backward FLOPs of one sequence: of matrices, 6 per weight and token, and of
    attention.

    As is usual for MFU, backward counts as twice forward: what a kernel computes again is no work
    of the model. An embedding that is not also the head is looked up, not multiplied by. Fixed
    factors of sketched layers are multiplied by, and get no gradient.
    """
    model, context = run.model, run.data.context
    _, linear = model.linear_costs()
    matrices = linear.forward + linear.backward + 6 * model.hidden * model.vocab
    attention = pattern_of(run.attention).flops(
        context, model.heads, model.head_dim, is_causal=True
    )
    return float(matrices * context), 3.0 * model.layers * attention
