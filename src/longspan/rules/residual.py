"""What `train.residual_precision` asks of the other keys."""

from __future__ import annotations

from longspan.checks import layout_problems
from longspan.config import Engine, Layout, Train
from longspan.rules.problem import Problem, Problems


def residual_rules(train: Train, layout: Layout, engine: Engine, world: int) -> Problems:
    if train.residual_precision == "fp32" or layout_problems(layout.ranks(), world):
        return
    if train.precision in ("fp32", "fp16"):
        message = f'"bf16" needs train.precision = "bf16", but it is "{train.precision}"'
        yield Problem("train.residual_precision", f'{message}: use "fp32"')
    if engine.name != "native":
        message = f'"bf16" needs engine.name = "native", but it is "{engine.name}": use "fp32"'
        yield Problem("train.residual_precision", message)
    ranks = layout.resolve(world)
    for axis in ("tensor", "pipeline"):
        if ranks[axis] > 1:
            message = f'"bf16" is not supported with layout.{axis} = {ranks[axis]}: use "fp32"'
            yield Problem("train.residual_precision", message)
