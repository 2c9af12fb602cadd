"""What `train.mlp_tile_tokens` asks of the other keys."""

from __future__ import annotations

from longspan.checks import layout_problems
from longspan.config import Engine, Layout, Model, Train
from longspan.rules.problem import Problem, Problems


def tile_rules(train: Train, model: Model, engine: Engine, layout: Layout, world: int) -> Problems:
    if not train.mlp_tile_tokens or layout_problems(layout.ranks(), world):
        return
    ranks = layout.resolve(world)
    is_zbv = ranks["pipeline"] > 1 and layout.schedule == "zbv"
    refused = {
        f'needs engine.name = "native", but it is "{engine.name}"': engine.name != "native",
        f'needs model.linear = "dense", but it is "{model.linear}"': model.linear != "dense",
        "is not supported with model.lora": model.lora.rank > 0,
        "is not supported with train.fp8 = true": train.fp8,
        f"is not supported with layout.tensor = {ranks['tensor']}": ranks["tensor"] > 1,
        'is not supported with layout.schedule = "zbv"': is_zbv,
    }
    for message, holds in refused.items():
        if holds:
            yield Problem("train.mlp_tile_tokens", f"{train.mlp_tile_tokens} {message}: use 0")
