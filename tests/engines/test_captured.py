"""The passes of a micro-batch as CUDA graphs: on a GPU, and by graphs of a CPU's operators."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from longspan.config import Run
from longspan.data import Prefetcher, open_source
from longspan.device import resolve
from longspan.engines import NativeEngine, open_engine
from longspan.engines import captured as captured_module
from longspan.engines.captured import WARM_UP, CapturedPass, Inputs, Pass
from longspan.engines.loss_scale import LossScale
from longspan.errors import UserError
from longspan.nn.products import chosen_products
from longspan.parallel.mesh import open_mesh
from longspan.parallel.world import World
from longspan.runfile import load_run
from longspan.torch_internals import TorchDispatchMode
from longspan.training.guard import Guard
from longspan.training.state import TrainState
from longspan.training.step import forward_context_of, train_step

STEPS = 8
GRAPH_BYTES = 1000
SIZES = ["model.hidden=32", "model.heads=2", "model.layers=2", "model.vocab=64", "data.context=32"]
SIZES += ["data.source=recall", "data.recall_pairs=4", "train.global_batch=4", "train.lr=0.01"]
DYNAMIC = ["model.rope.type=dynamic", "model.rope.factor=2"]
SIZES += ["attention.segment_lengths=[16,32]", "attention.dilation_rates=[1,2]"]


class GraphOfOperators(TorchDispatchMode):
    """Records a CPU's operators, and replays them on the tensors that they had.

    As in a capture, nothing is changed meanwhile, and no value may be read.
    """

    def __init__(self) -> None:
        super().__init__()
        self.opened = (0, 0)
        self._calls: list[tuple[Any, Any, Any, Any]] = []
        self._before: list[tuple[Tensor, Tensor]] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if function is torch.ops.aten._local_scalar_dense.default:
            raise RuntimeError("a value is read")
        written = [
            a.alias_info is not None and a.alias_info.is_write for a in function._schema.arguments
        ]
        self._before += [(x, x.clone()) for x, w in zip(args, written, strict=False) if w]
        out = function(*args, **(kwargs or {}))
        self._calls.append((function, args, kwargs or {}, out))
        return out

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for x, before in reversed(self._before):
            x.copy_(before)

    def pool(self) -> tuple[int, int]:
        return self.opened

    def reset(self) -> None:
        self._calls.clear()
        self._before.clear()

    @torch.no_grad()
    def replay(self) -> None:
        for function, args, kwargs, out in self._calls:
            found = tree_leaves(function(*args, **kwargs))
            for old, new in zip(tree_leaves(out), found, strict=True):
                if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


@pytest.fixture
def _graphs_of_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def record(
        graph: GraphOfOperators, pool: tuple[int, int], capture_error_mode: str
    ) -> Iterator[None]:
        assert capture_error_mode == "thread_local"
        graph.opened = pool
        with torch.no_grad(), torch.enable_grad(), graph:
            yield

    monkeypatch.setattr(torch.cuda, "CUDAGraph", GraphOfOperators)
    monkeypatch.setattr(torch.cuda, "graph", record)
    pools = itertools.count(1)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, next(pools)))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    reserved = itertools.count(start=7 * GRAPH_BYTES, step=GRAPH_BYTES)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: next(reserved))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (GRAPH_BYTES - 1, 1 << 40))


def trained_on_a_cpu(run: Run, *, captures: bool) -> list[Tensor]:
    """Losses and gradient norms of steps, with an evaluation in between, and the weights.

    With a loss scale too, which trains in fp16 on a GPU.
    """
    device = torch.device("cpu")
    source = open_source(run.data, run.model)
    with open_mesh(run.layout, World(0, 1, 0), device) as mesh:
        engine = open_engine(run, mesh, device, forward_context_of(run.train))
        assert isinstance(engine, NativeEngine)
        engine.loss_scale = LossScale(enabled=run.model.dropout > 0)
        if captures:
            engine._captured = CapturedPass(
                [p for p in engine.model.parameters() if p.requires_grad]
            )
        state = TrainState(engine, mesh, Guard(0.0, device))
        found = []
        with Prefetcher(source, run.train.seed, mesh.local_samples, device) as data:
            for step in range(STEPS):
                found += train_step(state, data, run.train, device)
                if step == STEPS - 3:
                    model = engine.inference_model
                    assert isinstance(model, nn.Module)
                    assert engine._captured is None or engine._captured._first is None
                    with torch.no_grad():
                        found.append(model(torch.arange(32)[None]))
        if captures:
            assert engine._captured is not None
            assert engine._captured._first is not None
    return [*found, *engine.model.parameters()]


@pytest.mark.usefixtures("_graphs_of_operators")
@pytest.mark.parametrize(
    "options",
    [
        [],
        ["model.dropout=0.2", "train.z_loss=1e-3", "train.ema=0.9"],
        [*DYNAMIC, "model.rope.original_context=16", "model.learnable_sinks=true"],
        ["model.lora.rank=2"],
        ["train.precision=bf16"],
        ["train.activation_checkpointing=selective", "model.linear=low_rank"],
        ["train.activation_checkpointing=full", 'train.freeze=["embedding.*"]'],
    ],
    ids=lambda x: " ".join(y.partition(".")[2] for y in x) or "plain",
)
def test_replayed_operators_take_the_same_steps(options: list[str]) -> None:
    run = load_run(None, [*SIZES, *options, "train.micro_batch=1"], world=1)
    run = resolve(run, torch.device("cpu"))
    launched, replayed = (trained_on_a_cpu(run, captures=captures) for captures in (False, True))
    for ours, theirs in zip(replayed, launched, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


@pytest.mark.usefixtures("_graphs_of_operators")
@pytest.mark.parametrize(
    ("free", "cached", "is_kept"),
    [(GRAPH_BYTES - 1, 0, False), (GRAPH_BYTES - 1, 1, True), (GRAPH_BYTES, 0, True)],
)
def test_memory_is_freed_where_there_is_no_room_for_another_pass(
    free: int, cached: int, is_kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = nn.Linear(4, 2)
    captured, run = CapturedPass([*layer.parameters()]), new_pass(layer)
    for _ in range(WARM_UP + 1):
        captured(run, (torch.ones(3, 4),), torch.ones(()))
        layer.zero_grad()
    first = captured._first
    assert first is not None
    left = [free]
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (sum(left), 1 << 40))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: left.append(cached))
    captured.make_room()
    assert captured._first is (first if is_kept else None)


def fail_at_the_end(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Have the end of a capture in which something fails do so too; return what is abandoned."""
    leave, abandoned = GraphOfOperators.__exit__, list[Any]()

    def fail(graph: GraphOfOperators, *error: Any) -> None:
        leave(graph, *error)
        if error[0] is not None:
            raise RuntimeError("the capture is invalid")

    monkeypatch.setattr(GraphOfOperators, "__exit__", fail)
    monkeypatch.setattr(captured_module, "abandon_capture", lambda *given: abandoned.append(given))
    monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: abandoned.append(stream))
    return abandoned


def failing_pass(layer: nn.Linear, error: BaseException | None, *, in_pass: int) -> Pass:
    """A pass that fails when it is captured, not launched; without an error by a value it reads."""
    done, new = itertools.count(1), new_pass(layer)

    def run(inputs: Inputs, scale: Tensor) -> Tensor:
        activations = torch.empty(3)
        ACTIVATIONS.append(weakref.ref(activations))
        loss = new(inputs, scale)
        if next(done) == in_pass:
            if error is not None:
                raise error
            assert loss.item() > 0
        return loss

    return run


def gradients_of_step(captured: CapturedPass, run: Pass, layer: nn.Linear) -> list[Tensor]:
    """Of two passes."""
    layer.zero_grad()
    device = layer.weight.device
    for _ in range(2):
        captured(run, (torch.ones(3, 4, device=device),), torch.ones((), device=device))
    return [parameter.grad for parameter in layer.parameters() if parameter.grad is not None]


FULL = torch.OutOfMemoryError("full")
ACTIVATIONS = list["weakref.ref[Tensor]"]()
"""Of failing passes."""


@pytest.mark.usefixtures("_graphs_of_operators")
@pytest.mark.parametrize("ends", [True, False])
@pytest.mark.parametrize("in_pass", [5, 6])
@pytest.mark.parametrize(("error", "why"), [(None, "a value is read"), (FULL, "full")])
def test_what_cannot_be_captured_is_launched_with_a_warning(
    error: Exception | None, why: str, in_pass: int, ends: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first graph, and the second; and if the end of the capture fails as well."""
    layer = nn.Linear(4, 2)
    abandoned = [] if ends else fail_at_the_end(monkeypatch)
    captured = CapturedPass([*layer.parameters()], must=False)
    run = failing_pass(layer, error, in_pass=in_pass)
    for _ in range(2):
        expected = gradients_of_step(captured, run, layer)
    with pytest.warns(UserWarning, match=rf"cannot be CUDA graphs \({why}\): they are launched"):
        found = gradients_of_step(captured, run, layer)
    again = gradients_of_step(captured, run, layer)  # without another warning
    for a, b, c in zip(expected, found, again, strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a, c)
    assert captured._first is None
    assert len(abandoned) == (0 if ends else 2)
    abandoned.clear()
    assert all(x() is None for x in ACTIVATIONS)


@pytest.mark.usefixtures("_graphs_of_operators")
def test_a_device_that_failed_before_a_capture_is_no_matter_of_graphs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layer, abandoned = nn.Linear(4, 2), list[Any]()
    monkeypatch.setattr(captured_module, "abandon_capture", lambda *given: abandoned.append(given))
    monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: None)
    captured, run = CapturedPass([*layer.parameters()]), new_pass(layer)
    for _ in range(2):
        gradients_of_step(captured, run, layer)

    def fail(*given: Any, **options: Any) -> None:
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "graph", fail)
    with pytest.raises(RuntimeError, match=r"^an illegal memory access was encountered$"):
        gradients_of_step(captured, run, layer)
    assert not abandoned


@pytest.mark.usefixtures("_graphs_of_operators")
@pytest.mark.parametrize("ends", [True, False])
@pytest.mark.parametrize(
    ("error", "must", "raised", "message"),
    [
        (None, True, UserError, r"graphs \(a value is read\): set train\.cuda_graphs = false"),
        (FULL, True, torch.OutOfMemoryError, "full"),
        (KeyboardInterrupt(), False, KeyboardInterrupt, None),
    ],
)
def test_what_must_be_captured_and_is_not_ends_a_run(
    error: BaseException | None,
    must: bool,
    raised: type[BaseException],
    message: str | None,
    ends: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layer = nn.Linear(4, 2)
    if not ends:
        fail_at_the_end(monkeypatch)
    captured = CapturedPass([*layer.parameters()], must=must)
    run = failing_pass(layer, error, in_pass=5)
    gradients_of_step(captured, run, layer)
    gradients_of_step(captured, run, layer)
    with pytest.raises(raised, match=message):
        gradients_of_step(captured, run, layer)


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


@pytest.mark.gpu
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
        ["train.precision=bf16", *DYNAMIC, "model.rope.original_context=512"],
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


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_gradients_are_those_of_passes_in_any_order(
    device: str, request: pytest.FixtureRequest
) -> None:
    """Of other shapes too, first in a step or not, released between steps, against float64."""
    if device == "cpu":
        request.getfixturevalue("_graphs_of_operators")
    torch.manual_seed(0)
    layer = nn.Linear(16, 4, device=device)
    run, captured = new_pass(layer), CapturedPass(list(layer.parameters()))
    exact = nn.Linear(16, 4, device=device, dtype=torch.float64)
    exact.load_state_dict(layer.state_dict())
    steps = [[8]] * (WARM_UP + 1) + [[8, 8, 8], [5, 8], [8, 5, 8], [5], [8, 8], [8]]
    for number, step in enumerate([*steps, *steps]):
        for model in (layer, exact):
            model.zero_grad()
        if number == len(steps):
            captured._release()
        for index, rows in enumerate(step):
            x = torch.randn(rows, 16, device=device)
            scale = torch.full((), index + 0.5, device=device)
            loss = captured(run, (x,), scale)
            expected = exact(x.double()).square().sum() * scale
            expected.backward()
            torch.testing.assert_close(loss.double(), expected.detach(), rtol=1e-5, atol=0)
        for ours, theirs in zip(layer.parameters(), exact.parameters(), strict=True):
            assert ours.grad is not None
            torch.testing.assert_close(ours.grad.double(), theirs.grad, rtol=1e-5, atol=1e-5)
    assert captured._first is not None
    assert captured._next is not None
    assert captured._next.pool() == captured._first.pool()


@pytest.mark.usefixtures("_graphs_of_operators")
def test_gradients_that_are_not_all_the_graphs_are_added_to_by_launches() -> None:
    layer = nn.Linear(4, 2)
    captured, run = CapturedPass([*layer.parameters()]), new_pass(layer)
    for _ in range(3):
        both = [gradient.clone() for gradient in gradients_of_step(captured, run, layer)]
    layer.zero_grad()
    captured(run, (torch.ones(3, 4),), torch.ones(()))
    assert captured._next is not None
    layer.bias.grad = torch.zeros(2)
    captured(run, (torch.ones(3, 4),), torch.ones(()))
    torch.testing.assert_close([layer.weight.grad, 2 * layer.bias.grad], both)


@pytest.mark.gpu
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


@pytest.mark.gpu
@pytest.mark.parametrize("in_pass", [5, 6])
def test_a_capture_that_becomes_invalid_leaves_no_memory_behind(in_pass: int) -> None:
    layer = nn.Linear(4, 2, device="cuda")
    captured = CapturedPass([*layer.parameters()], must=False)
    fails = failing_pass(layer, None, in_pass=in_pass)
    size = 256 << 20

    def run(inputs: Inputs, scale: Tensor) -> Tensor:
        held = torch.empty(size, dtype=torch.uint8, device="cuda")
        loss = fails(inputs, scale)
        del held
        return loss

    for _ in range(2):
        expected = gradients_of_step(captured, run, layer)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    with pytest.warns(UserWarning, match="they are launched"):
        found = gradients_of_step(captured, run, layer)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(gradients_of_step(captured, run, layer), expected)
    torch.rand(1, device="cuda")
    torch.cuda.empty_cache()
    # cuBLAS keeps a workspace for the stream of captures, 32 MiB for each of two threads.
    assert torch.cuda.memory_reserved() < before + size // 2
