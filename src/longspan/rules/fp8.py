"""What `train.fp8` asks of the other keys."""

from __future__ import annotations

from longspan.checks import layout_problems
from longspan.config import Engine, Layout, Model, Train
from longspan.costs import linear_sizes
from longspan.rules.problem import Problem, Problems

MULTIPLE = 16
"""What the matrix units ask of the widths of a layer."""


def fp8_rules(train: Train, model: Model, engine: Engine) -> Problems:
    if not train.fp8:
        return
    if train.precision in ("fp32", "fp16"):
        message = f'true needs train.precision = "bf16", but it is "{train.precision}": use false'
        yield Problem("train.fp8", message)
    if train.device == "cpu":
        yield Problem("train.fp8", 'true needs a GPU, but train.device is "cpu": use false')
    if engine.name != "native":
        message = f'true needs engine.name = "native", but it is "{engine.name}": use false'
        yield Problem("train.fp8", message)
    if model.linear != "dense":
        message = f'true needs model.linear = "dense", but it is "{model.linear}": use false'
        yield Problem("train.fp8", message)
    if model.lora.rank:
        yield Problem("train.fp8", "true is not supported with model.lora: use false")
    for name, size in linear_sizes(model).items():
        if any(features % MULTIPLE for features in size):
            yield Problem(
                "train.fp8",
                f"true needs linear layers whose sizes are multiples of {MULTIPLE}, but {name} "
                f"maps {size[0]} features to {size[1]}: change [model], or use false",
            )
            return


def fp8_layout_rules(train: Train, layout: Layout, world: int) -> Problems:
    if not train.fp8 or layout_problems(layout.ranks(), world):
        return
    ranks = layout.resolve(world)
    if ranks["tensor"] > 1:
        message = f"true is not supported with layout.tensor = {ranks['tensor']}: use false"
        yield Problem("train.fp8", message)
    if ranks["pipeline"] > 1 and layout.schedule == "zbv":
        message = 'true is not supported with layout.schedule = "zbv": use false, or "1f1b"'
        yield Problem("train.fp8", message)
