"""Bytes of parameters, gradients and optimizer state on a rank, measured within a step."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from longspan.config import Run
from longspan.models import count_parameters
from longspan.runfile import load_run
from longspan.training.step import train_step
from tests.harness import Ranks
from tests.steps import CPU, open_state

LAYERS = 16
OPTIONS = [
    "model.hidden=64",
    f"model.layers={LAYERS}",
    "model.heads=4",
    "model.vocab=64",
    "data.source=recall",
    "data.context=8",
    "data.recall_pairs=1",
    "attention.segment_lengths=[8]",
    "attention.dilation_rates=[1]",
    "train.precision=fp32",
    "train.device=cpu",
    "train.compile=false",
    "train.activation_checkpointing=full",  # few activations, which are not what is measured
]


def run_of(world: int, layout: list[str]) -> Run:
    batch = f"train.global_batch={2 * world}"
    return load_run(None, [*OPTIONS, batch, *layout], world=world)


def storages() -> dict[int, torch.UntypedStorage]:
    """Every storage that a tensor of Python's refers to, by address."""
    found = {}
    for thing in gc.get_objects():
        if type(thing) not in (Tensor, torch.nn.Parameter, DTensor):
            continue
        for x in (thing, thing.grad if thing.is_leaf else None):
            local = x.to_local() if isinstance(x, DTensor) else x
            if local is not None and local.device.type == "cpu":
                storage = local.untyped_storage()
                found[storage.data_ptr()] = storage
    return found


def bytes_in_a_step(rank: int, world: int, layout: list[str]) -> tuple[float, float]:
    """Per parameter: once the model is there, and as a step's second forward pass ends."""
    run, before = run_of(world, layout), storages()
    with open_state(run, rank, world) as (state, source):
        held = []

        def measure(*_: object) -> None:
            gc.collect()
            held.append(sum(x.nbytes() for at, x in storages().items() if at not in before))

        measure()
        train_step(state, source, run.train, CPU)
        handle = state.engine.model.norm.register_forward_pre_hook(measure)
        train_step(state, source, run.train, CPU)
        handle.remove()
    return held[0] / count_parameters(run.model), held[-1] / count_parameters(run.model)


@pytest.mark.parametrize("d", [2, 4])
@pytest.mark.parametrize("kind", ["replicate", "zero 1", "zero 2", "zero 3", "tensor"])
def test_bytes_per_parameter(ranks: Ranks, kind: str, d: int) -> None:
    """fp32: parameter 4, gradient 4, moments 8. A rank keeps 1/d of a parameter beside the whole
    one that stages 1 and 2 have in use; stage 3 has one block whole at a time."""
    layout, expected = {
        "replicate": ([f"layout.replicate={d}", "layout.shard=1"], 16.0),
        "zero 1": (["layout.zero=1"], 8 + 12 / d),
        "zero 2": (["layout.zero=2"], 4 + 16 / d),
        "zero 3": (["layout.zero=3"], 16 / d + 4 / LAYERS),
        "tensor": ([f"layout.tensor={d}", "train.global_batch=2"], 16 / d),
    }[kind]
    own = 4.0 if kind == "replicate" else 4 / d
    for found in ranks.run(bytes_in_a_step, d, layout):
        assert found == pytest.approx((own, expected), rel=0.05)


def kept_weights(rank: int, world: int, zero: int) -> int:
    """Bytes of weights that wait for the backward pass as a forward pass in 16 bits ends."""
    options = [f"layout.zero={zero}", "train.precision=bf16", "train.activation_checkpointing=none"]
    run = run_of(world, options)
    with open_state(run, rank, world) as (state, source):
        engine = state.engine
        smallest = min(p.numel() for p in engine.model.blocks.parameters() if p.dim() > 1)
        kept: dict[int, torch.UntypedStorage] = {}
        found = []

        def keep(x: Tensor) -> Tensor:
            if x.numel() >= smallest:  # no activation of 8 tokens is so large
                storage = x.untyped_storage()
                kept[storage._cdata] = storage
            return x

        def measure(*_: object) -> None:
            found.append(sum(x.nbytes() for x in kept.values()))

        handle = engine.model.norm.register_forward_pre_hook(measure)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            train_step(state, source, run.train, CPU)
        handle.remove()
    return found[0]


@pytest.mark.parametrize("zero", [2, 3])
def test_in_16_bits_stage_3_keeps_no_weights(ranks: Ranks, zero: int) -> None:
    """Autocast would keep a copy of each for the backward pass, beside those that are sharded."""
    run = run_of(2, [])
    matrices = sum(i * o for i, o in run.model.linear_sizes.values())
    expected = 0 if zero == 3 else 2 * LAYERS * matrices
    assert ranks.run(kept_weights, 2, zero) == [expected] * 2
