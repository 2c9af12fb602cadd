"""Bytes of parameters, gradients and optimizer state on a rank, measured within a step."""

from __future__ import annotations

import gc
from contextlib import suppress

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from longspan.config import Run
from longspan.costs import count_parameters, linear_sizes
from longspan.runfile import load_run
from longspan.training.step import train_step
from tests.harness import Ranks
from tests.slow import slow
from tests.steps import CPU, open_state

LAYERS = 12
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
    "train.activation_checkpointing=full",  # keeps activations small; they are not measured
]


def run_of(world: int, layout: list[str]) -> Run:
    batch = f"train.global_batch={2 * world}"
    return load_run(None, [*OPTIONS, batch, *layout], world=world)


def storages() -> dict[int, torch.UntypedStorage]:
    """Every storage that a Python tensor refers to, by address."""
    found = {}
    for candidate in gc.get_objects():
        if type(candidate) not in (Tensor, torch.nn.Parameter, DTensor):
            continue
        for x in (candidate, candidate.grad if candidate.is_leaf else None):
            local = x.to_local() if isinstance(x, DTensor) else x
            if local is not None and local.device.type == "cpu":
                storage = local.untyped_storage()
                with suppress(RuntimeError):  # a fake tensor, left behind by torch.compile
                    found[storage.data_ptr()] = storage
    return found


def bytes_per_parameter(rank: int, world: int, layout: list[str]) -> tuple[float, float]:
    """After initialisation, and at the end of the last forward pass of the second step."""
    run, before = run_of(world, layout), storages()
    with open_state(run, rank, world) as (state, data):
        found = []

        def measure(*_: object) -> None:
            gc.collect()
            found.append(sum(x.nbytes() for at, x in storages().items() if at not in before))

        measure()
        train_step(state, data, run.train, CPU)
        handle = state.engine.model.norm.register_forward_pre_hook(measure)
        train_step(state, data, run.train, CPU)
        handle.remove()
    return found[0] / count_parameters(run.model), found[-1] / count_parameters(run.model)


@pytest.mark.parametrize("d", [2, pytest.param(4, marks=slow("parity"))])
@pytest.mark.parametrize("kind", ["replicate", "zero 1", "zero 2", "zero 3", "tensor"])
def test_bytes_per_parameter(ranks: Ranks, kind: str, d: int) -> None:
    """fp32: parameter 4, gradient 4, moments 8. ZeRO-1 and 2 hold unsharded parameters beside the
    shards of 1/d; ZeRO-3 gathers one block at a time."""
    layout, expected = {
        "replicate": ([f"layout.replicate={d}", "layout.shard=1"], 16.0),
        "zero 1": (["layout.zero=1"], 8 + 12 / d),
        "zero 2": (["layout.zero=2"], 4 + 16 / d),
        "zero 3": (["layout.zero=3"], 16 / d + 4 / LAYERS),
        "tensor": ([f"layout.tensor={d}", "train.global_batch=2"], 16 / d),
    }[kind]
    parameters = 4.0 if kind == "replicate" else 4 / d
    for found in ranks.run(bytes_per_parameter, d, layout):
        assert found == pytest.approx((parameters, expected), rel=0.05)


def saved_weight_bytes(rank: int, world: int, zero: int) -> int:
    """Bytes of weights saved for the backward pass, at the end of a forward pass in bf16."""
    options = [f"layout.zero={zero}", "train.precision=bf16", "train.activation_checkpointing=none"]
    run = run_of(world, options)
    with open_state(run, rank, world) as (state, data):
        engine = state.engine
        smallest = min(p.numel() for p in engine.model.blocks.parameters() if p.dim() > 1)
        saved: dict[int, torch.UntypedStorage] = {}
        found = []

        def pack(x: Tensor) -> Tensor:
            if x.numel() >= smallest:  # no activation of 8 tokens is so large
                storage = x.untyped_storage()
                saved[storage._cdata] = storage
            return x

        def measure(*_: object) -> None:
            found.append(sum(x.nbytes() for x in saved.values()))

        handle = engine.model.norm.register_forward_pre_hook(measure)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            train_step(state, data, run.train, CPU)
        handle.remove()
    return found[0]


@pytest.mark.parametrize("zero", [2, 3])
def test_zero_3_saves_no_bf16_weights(ranks: Ranks, zero: int) -> None:
    """Autocast would save a 16-bit copy of each for the backward pass, beside the shards."""
    run = run_of(2, [])
    matrices = sum(i * o for i, o in linear_sizes(run.model).values())
    expected = 0 if zero == 3 else 2 * LAYERS * matrices
    assert ranks.run(saved_weight_bytes, 2, zero) == [expected] * 2
