"""The passes of a micro-batch as CUDA graphs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from longspan.config import Run
from longspan.data import Prefetcher, open_source
from longspan.device import resolve
from longspan.engines import NativeEngine, open_engine
from longspan.engines.captured import WARM_UP, CapturedPass, Inputs, Pass
from longspan.nn.products import chosen_products
from longspan.parallel.mesh import open_mesh
from longspan.parallel.world import World
from longspan.runfile import load_run
from longspan.training.guard import Guard
from longspan.training.state import TrainState
from longspan.training.step import forward_context_of, train_step

STEPS = 8
pytestmark = pytest.mark.gpu


def losses_of(run: Run) -> tuple[list[Tensor], list[Tensor], NativeEngine]:
    device = torch.device("cuda")
    torch.manual_seed(0)
    source = open_source(run.data, run.model)
    with (
        open_mesh(run.layout, World(0, 1, 0), device) as mesh,
        chosen_products(run.train, device),
    ):
        engine = open_engine(run, mesh, device, forward_context_of(run.train))
        assert isinstance(engine, NativeEngine)
        state = TrainState(engine, mesh, Guard(0.0, device))
        with Prefetcher(source, run.train.seed, mesh.local_samples, device) as data:
            found = [train_step(state, data, run.train, device) for _ in range(STEPS)]
    return [x for pair in found for x in pair], list(engine.model.parameters()), engine


@pytest.mark.parametrize(
    "options",
    [
        ["train.precision=fp32", "train.compile=false"],
        ["train.precision=bf16", "train.compile=true"],
        ["train.precision=bf16", "train.compile=true", "model.dropout=0.1"],
        ["train.precision=bf16", "train.mlp_tile_tokens=256"],
        ["train.precision=bf16", "train.optimizer=muon", "train.residual_precision=bf16"],
        ["train.precision=fp16", "train.compile=true"],
        ["train.precision=bf16", "train.fp8=true"],
        ["train.precision=bf16", "model.lora.rank=4", "model.sub_layer_norm=true"],
        ["train.precision=bf16", "train.activation_checkpointing=selective"],
        ["train.precision=bf16", "train.activation_checkpointing=full", "attention.kind=dense"],
    ],
    ids=lambda x: " ".join(y.partition(".")[2] for y in x),
)
@pytest.mark.parametrize("micro_batch", [4, 2])
def test_graphs_take_the_steps_that_launches_take(options: list[str], micro_batch: int) -> None:
    """Bit for bit, but for sums of dQ in any order."""
    sizes = ["model.hidden=256", "model.heads=4", "model.layers=2", "data.context=1024"]
    sizes += ["data.source=recall", "train.global_batch=4", f"train.micro_batch={micro_batch}"]
    run = load_run(None, [*sizes, "train.device=cuda", *options], builtin="cuda", world=1)
    run = resolve(run, torch.device("cuda"))
    launched, expected, _ = losses_of(with_graphs(run, cuda_graphs=False))
    replayed, found, engine = losses_of(with_graphs(run, cuda_graphs=True))
    assert engine._captured is not None
    assert engine._captured._first is not None
    assert (engine._captured._next is not None) == (micro_batch == 2)
    for ours, theirs in zip(replayed, launched, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-3, atol=0)
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours - theirs).norm() <= 1e-2 * theirs.norm()


def with_graphs(run: Run, *, cuda_graphs: bool) -> Run:
    update = {"cuda_graphs": cuda_graphs}
    return run.model_copy(update={"train": run.train.model_copy(update=update)})


def new_pass(layer: nn.Linear) -> Pass:
    """A forward and backward pass of the sum of squares of what `layer` makes of its input."""

    def run(inputs: Inputs, scale: Tensor) -> Tensor:
        (x,) = inputs
        assert x is not None
        loss: Tensor = layer(x).square().sum() * scale
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    return run


def test_gradients_are_those_of_passes_in_any_order() -> None:
    """Of other shapes too, first in a step or not, against float64."""
    torch.manual_seed(0)
    layer = nn.Linear(16, 4, device="cuda")
    run, captured = new_pass(layer), CapturedPass(list(layer.parameters()))
    exact = nn.Linear(16, 4, device="cuda", dtype=torch.float64)
    exact.load_state_dict(layer.state_dict())
    steps = [[8]] * (WARM_UP + 1) + [[8, 8, 8], [5, 8], [8, 5, 8], [5], [8, 8], [8]]
    for step in steps:
        for model in (layer, exact):
            model.zero_grad()
        for index, rows in enumerate(step):
            x = torch.randn(rows, 16, device="cuda")
            scale = torch.full((), index + 0.5, device="cuda")
            loss = captured(run, (x,), scale)
            expected = exact(x.double()).square().sum() * scale
            expected.backward()
            torch.testing.assert_close(loss.double(), expected.detach(), rtol=1e-5, atol=0)
        for ours, theirs in zip(layer.parameters(), exact.parameters(), strict=True):
            assert ours.grad is not None
            torch.testing.assert_close(ours.grad.double(), theirs.grad, rtol=1e-5, atol=1e-5)
    assert captured._first is not None
    assert captured._next is not None


def test_a_capture_that_runs_out_of_memory_says_so_and_can_be_tried_again() -> None:
    layer = nn.Linear(1024, 1024, device="cuda")
    run, captured = new_pass(layer), CapturedPass(list(layer.parameters()))
    inputs, scale = (torch.randn(65_536, 1024, device="cuda"),), torch.ones((), device="cuda")
    for _ in range(WARM_UP):
        expected = captured(run, inputs, scale)
        layer.zero_grad()
    torch.cuda.empty_cache()
    held = torch.cuda.memory_reserved() + 2 * inputs[0].nbytes
    torch.cuda.set_per_process_memory_fraction(
        held / torch.cuda.get_device_properties(0).total_memory
    )
    try:
        with pytest.raises(torch.OutOfMemoryError):
            captured(run, inputs, scale)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    layer.zero_grad()
    assert captured._first is None
    torch.testing.assert_close(captured(run, inputs, scale), expected)
    assert captured._first is not None
