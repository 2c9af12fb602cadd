"""What `train.recompute_layers` asks of the other keys."""

from __future__ import annotations

from longspan.checks import layout_problems
from longspan.config import Engine, Layout, Model, Train
from longspan.rules.problem import Problem, Problems


def recomputation_rules(
    train: Train, model: Model, engine: Engine, layout: Layout, world: int
) -> Problems:
    count, mode = train.recompute_layers, train.activation_checkpointing
    if count is None or layout_problems(layout.ranks(), world):
        return
    stages = layout.resolve(world)["pipeline"]
    refused = {
        f'needs train.activation_checkpointing = "full", but it is "{mode}"': mode != "full",
        f"is more than model.layers = {model.layers}": count > model.layers,
        f'needs engine.name = "native", but it is "{engine.name}"': engine.name != "native",
        f"is not supported with the {stages} stages of layout.pipeline": stages > 1,
    }
    for message, holds in refused.items():
        if holds:
            yield Problem("train.recompute_layers", f"{count} {message}: leave it out")
