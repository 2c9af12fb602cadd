"""Norms by layer under every axis, compared with those of one process, from its own gradients."""

from __future__ import annotations

from collections import defaultdict
from functools import cache, partial
from typing import Any

import pytest
from torch import Tensor

from longspan.engines import Engine
from longspan.errors import UserError
from longspan.parallel.norms_by_layer import NormsByLayer, layer_of
from longspan.training.step import train_step
from tests.harness import Ranks
from tests.parallel.test_apply import run_of
from tests.steps import CPU, open_state

Norms = tuple[dict[str, float], dict[str, float]]


def norms_of(rank: int, world: int, overrides: list[str]) -> Norms:
    """The norms of gradients and parameters by layer, of the second step."""
    run = run_of(world, *overrides)
    with open_state(run, rank, world) as (state, data):
        norms = NormsByLayer(state.engine.shapes, state.mesh, CPU)
        train_step(state, data, run.train, CPU)
        _, norm = train_step(state, data, run.train, CPU, norms)
        return norms.gradients(norm), norms.parameters(state.engine.model)


@cache
def expected(*overrides: str) -> Norms:
    """The same in one process, by the definition, in float64."""
    run = run_of(1, *overrides)
    gradients: dict[str, Tensor] = {}

    def step(engine: Engine, original: Any, *arguments: Any) -> Tensor:
        for name, parameter in engine.model.named_parameters():
            assert parameter.grad is not None
            gradients[name] = parameter.grad.clone()
        return original(*arguments)

    with open_state(run) as (state, data):
        train_step(state, data, run.train, CPU)
        state.engine.step = partial(step, state.engine, state.engine.step)  # type: ignore[method-assign]
        train_step(state, data, run.train, CPU)
        parameters = {name: p.detach() for name, p in state.engine.model.named_parameters()}
    return by_block(gradients), by_block(parameters)


def by_block(tensors: dict[str, Tensor]) -> dict[str, float]:
    """Norms of embedding, each block, last norm and head."""
    squares: dict[str, float] = defaultdict(float)
    for name, x in tensors.items():
        layer = name[:8] if name.startswith("blocks.") else name.split(".")[0]
        squares[layer] += float(x.double().square().sum())
    return {layer: square**0.5 for layer, square in squares.items()}


@pytest.mark.parametrize(
    "layout",
    [
        [],
        ["layout.replicate=2"],
        ["layout.shard=2"],
        ["layout.tensor=2"],
        ["layout.sequence=2"],
        ["layout.pipeline=2", "model.tie_embeddings=true"],
        ["layout.shard=2", "layout.tensor=2"],
    ],
    ids=lambda x: "-".join(item.split(".")[1] for item in x) or "one",
)
def test_norms_by_layer_are_those_of_one_process(ranks: Ranks, layout: list[str]) -> None:
    world = 1
    for item in layout:
        world *= int(item.split("=")[1]) if item.startswith("layout") else 1
    wanted = expected(*(item for item in layout if item.startswith("model.")))
    assert {"embedding", "blocks.0", "blocks.1"} < set(wanted[0])
    for found in ranks.run(norms_of, world, layout):
        for norms, reference in zip(found, wanted, strict=True):
            assert norms == pytest.approx(reference, rel=1e-4)


@pytest.mark.parametrize(
    ("name", "layer"),
    [
        ("blocks.11.attention.q.weight", "blocks.11"),
        ("embedding.weight", "embedding"),
        ("model.layers.3.self_attn.q_proj.weight", "model.layers.3"),
        ("model.embed_tokens.weight", "model.embed_tokens"),
        ("encoder.stem.conv.weight", "encoder.stem"),
        ("scale", "scale"),
    ],
)
def test_a_layer_is_a_name_up_to_its_first_number(name: str, layer: str) -> None:
    assert layer_of(name) == layer


def test_deepspeed_is_refused() -> None:
    with pytest.raises(UserError, match=r"track\.per_layer_norms .*not supported with DeepSpeed"):
        run_of(1, "track.per_layer_norms=true", "engine.name=deepspeed")
