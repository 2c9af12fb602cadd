"""`longspan plan --check`: the plan against the training code, in a world without processes.

Some ranks of the planned world are built one after another, in this process. Their shards are
counted, and one step is run on tensors without memory, whose collectives are counted.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from longspan.attention import Heads, Mask, choose_shards
from longspan.attention.context_parallel.kv_exchange import KVExchange, plan_exchange
from longspan.attention.context_parallel.sharded import strategy_of
from longspan.config import Run
from longspan.costs import block_shapes, trains
from longspan.data import Batch
from longspan.device import autocast
from longspan.engines import DecoderSpec
from longspan.engines.native import NativeEngine
from longspan.errors import UserError
from longspan.models import Decoder, new_decoder
from longspan.models.decoder import SelfAttention
from longspan.parallel.collectives import all_reduce_loss
from longspan.parallel.grad_norm import clip_grad_norm
from longspan.parallel.mesh import ParallelMesh, open_mesh
from longspan.parallel.pipeline import PipelinedDecoder
from longspan.parallel.world import World
from longspan.planning.communication import communication
from longspan.planning.counting import counted_parameters
from longspan.planning.fake_world import fake_world
from longspan.planning.parameters import Degrees, ModelSplit, blocks_differ
from longspan.planning.recording import CollectiveRecorder, Group, Total, totals_of
from longspan.torch_internals import assume_static_shapes, fake_tensors
from longspan.wording import counted

CPU = torch.device("cpu")
TOLERANCE = 0.01
"""Of bytes that are communicated in a step. Calls and shards must be equal."""
BLOCKS_PER_STAGE, MICRO_BATCHES = 2, 2
"""So many of each are run, as all are the same; more micro-batches if a pipeline needs them."""


@dataclass(frozen=True)
class Check:
    """What was compared, and what differs."""

    gpus: int
    ranks: list[int]
    tensors: int
    """Parameters whose shards were compared."""
    collectives: int
    """Calls that were compared."""
    differences: list[str]
    seconds: float

    def __str__(self) -> str:
        ranks = ", ".join(f"{rank:,}" for rank in self.ranks)
        what = f"{'rank' if len(self.ranks) == 1 else 'ranks'} {ranks} of {self.gpus:,}"
        if not self.differences:
            calls = counted(self.collectives, "collective")
            return (
                f"check: {what}: {counted(self.tensors, 'shard')} and {calls} as planned "
                f"({self.seconds:.1f} s)"
            )
        return "\n".join([f"check: {what} differ from the plan:", *self.differences])


def check_plan(run: Run, gpus: int) -> Check:
    """Compare the plan of `run` with its first, middle and last rank, and those of the stages
    between.

    `run.train.precision` must be resolved. The process must have no process group.
    """  # fmt: skip
    if run.model.lora.rank:
        raise UserError(
            "plan --check does not count the collectives of model.lora, whose updates tensor "
            "parallelism splits by itself: check the run with model.lora.rank=0"
        )
    if run.train.chunk_tokens:
        raise UserError(
            "plan --check does not count the collectives of chunks: check the run with "
            "train.chunk_tokens=0"
        )
    model, freeze = run.model, run.train.freeze
    first = ["embedding.weight", *(f"blocks.0.{name}" for name in block_shapes(model, 0))]
    if not any(trains(model, freeze, name) for name in first):
        raise UserError(
            "plan --check counts a backward pass of every block, but train.freeze leaves the first "
            "without one: check the run without it"
        )
    start = time.perf_counter()
    degrees = Degrees.of(run.layout, gpus)
    per_stage = gpus // degrees.pipeline
    stages = sorted({0, degrees.pipeline // 2, degrees.pipeline - 1})
    inside = sorted({0, per_stage // 2, per_stage - 1})
    ranks = sorted({stage * per_stage + rank for stage in stages for rank in inside})
    differences, tensors, calls = [], 0, 0
    for rank in ranks:
        found, compared = _check_shards(run, gpus, rank)
        differences += found
        tensors += compared
    few = _fewer(run, degrees)
    if gpus > 1:
        # One rank of each stage, at another place in it.
        for i, stage in enumerate(stages):
            rank = stage * per_stage + inside[i % len(inside) if len(stages) > 1 else -1]
            found, compared = _check_collectives(few, gpus, rank)
            differences += found
            calls += compared
    return Check(gpus, ranks, tensors, calls, differences, time.perf_counter() - start)


def _check_shards(run: Run, gpus: int, rank: int) -> tuple[list[str], int]:
    """Differences in the parameters of a rank, and how many parameters it has."""
    planned = {p.name: p for p in ModelSplit(run, gpus).parameters(rank)}
    real = {p.name: p for p in counted_parameters(run, gpus, rank).parameters}
    found = [
        f"  rank {rank:,}: {name} is {'not planned' if name in real else 'planned, but not there'}"
        for name in planned.keys() ^ real.keys()
    ]
    for name in planned.keys() & real.keys():
        ours, counted_ones = planned[name], real[name]
        for what in ("local", "gathered", "copies"):
            x, y = getattr(ours, what), getattr(counted_ones, what)
            if x != y:
                found.append(
                    f"  rank {rank:,}: {name} has {y:,} {what} elements, planned were {x:,}"
                )
    return found, len(real)


def _check_collectives(run: Run, gpus: int, rank: int) -> tuple[list[str], int]:
    """Differences in the collectives of a step of a rank, and how many calls there were."""
    degrees = Degrees.of(run.layout, gpus)
    planned = totals_of(
        x
        for x in communication(
            run,
            gpus,
            pipeline_rank=rank * degrees.pipeline // gpus,
            sequence_rank=rank // degrees.tensor % degrees.sequence,
        )
        if x.purpose != "whether to stop or save"  # after the step
    )
    if 1 < gpus == degrees.replicate:
        return [], 0  # DDP reduces in C++, which has no tensors without memory
    real = step_collectives(run, gpus, rank)
    return compare(rank, planned, real), sum(total.calls for total in real.values())


def compare(rank: int, planned: Mapping[Group, Total], real: Mapping[Group, Total]) -> list[str]:
    """Say in words where collectives differ."""
    found = []
    for group in sorted(planned.keys() | real.keys()):
        x, y = planned.get(group, Total(0, 0)), real.get(group, Total(0, 0))
        if x.calls != y.calls or abs(x.bytes - y.bytes) > TOLERANCE * y.bytes:
            found.append(
                f"  rank {rank:,}: {group.collective} of {group.ranks:,} ranks: {y.calls:,} calls "
                f"with {y.bytes:,} bytes, planned were {x.calls:,} with {x.bytes:,}"
            )
    return found


def _fewer(run: Run, degrees: Degrees) -> Run:
    """The run with fewer layers and micro-batches, which are all the same."""
    stages = degrees.pipeline * run.layout.stages_per_rank
    layers = run.model.layers
    if not blocks_differ(run):
        layers = min(layers, BLOCKS_PER_STAGE * stages)
    samples = run.train.micro_batch * degrees.data
    least = degrees.pipeline if degrees.pipeline > 1 else MICRO_BATCHES
    batch = min(run.train.global_batch, samples * least)
    return run.model_copy(
        update={
            "model": run.model.model_copy(update={"layers": layers}),
            "train": run.train.model_copy(
                update={"global_batch": batch, "device": "cpu", "compile": False}
            ),
        }
    )


def step_collectives(run: Run, gpus: int, rank: int) -> dict[Group, Total]:
    """The collectives of one step of the training code on a rank, on tensors without memory."""
    fake = fake_tensors()
    with fake_world(rank, gpus), open_mesh(run.layout, World(rank, gpus, rank), CPU) as mesh:
        spec, context = _FakeSpec(new_decoder(run), fake), partial(autocast, run.train)
        engine = NativeEngine(spec, mesh, run.train, CPU, _no_optimizer, context, run.layout)
        if isinstance(engine.module, PipelinedDecoder):
            assume_static_shapes(engine.module.schedule)
        _only_exchange(spec.model, run, mesh)
        samples = run.train.global_batch // mesh.data_ranks
        recorder = CollectiveRecorder()
        with fake, recorder:
            tokens = torch.zeros(samples, run.data.context, dtype=torch.int64)
            batch = Batch(tokens, tokens, samples=torch.arange(samples))
            loss, _ = engine.backward(batch, torch.tensor(1.0))
            all_reduce_loss(mesh, loss)
            clip_grad_norm(engine.model, mesh, 1.0, CPU)
    return recorder.totals()


class _FakeSpec(DecoderSpec):
    """A decoder whose shards have no memory."""

    def __init__(self, model: Decoder, fake: AbstractContextManager[Any]) -> None:
        super().__init__(model)
        self._fake = fake

    def materialize(self, *args: Any, **kwargs: Any) -> nn.Module:
        with self._fake:
            return super().materialize(*args, **kwargs)


def _no_optimizer(_model: nn.Module) -> Any:
    return None


def _only_exchange(model: Decoder, run: Run, mesh: ParallelMesh) -> None:
    """Replace attention that needs the values of positions by its sparse KV exchange alone."""
    if mesh.sequence_group is None:
        return
    heads = Heads(*(n // mesh.ranks["tensor"] for n in (run.model.heads, run.model.kv_heads)))
    shards = choose_shards(model.patterns, model.context, mesh.ranks["sequence"], heads)
    group = mesh.sequence_group
    rank = dist.get_rank(group)

    def attend(
        exchange: KVExchange,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *_: Any,
        sink_logits: Tensor | None = None,
        **__: Any,
    ) -> Tensor:
        k_rows, v_rows = exchange.receive(k, v, group.group_name)
        out = q + k_rows.sum() + v_rows.sum()
        return out if sink_logits is None else out + sink_logits.sum()

    for module in model.modules():
        if isinstance(module, SelfAttention):
            mask = Mask(module.pattern)
            if strategy_of(mask, shards, heads, has_kernels=True).name == "sparse_kv":
                exchange = plan_exchange(module.pattern, shards, rank, heads, True, CPU)
                module.attend = partial(attend, exchange)
