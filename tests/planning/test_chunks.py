"""The plan of context in time: rows, memory against the live tensors of a step, and time."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from longspan.attention import Dilated, Heads, Pattern, Shards
from longspan.attention.context_parallel.chunk_plan import (
    count_rows,
    kept_rows,
    open_rows,
    without_blocks,
)
from longspan.config import Run
from longspan.data import Batch
from longspan.device import autocast
from longspan.engines import DecoderSpec
from longspan.engines.native import NativeEngine
from longspan.engines.optimizer import build_optimizer
from longspan.errors import UserError
from longspan.hardware import device_of
from longspan.models import new_decoder
from longspan.parallel.dtensor import to_local
from longspan.parallel.mesh import open_mesh
from longspan.parallel.world import World
from longspan.planning.check import check_plan
from longspan.planning.fake_world import fake_world
from longspan.planning.ladder import ladder
from longspan.planning.memory import memory_per_rank
from longspan.planning.run_time import predict
from longspan.planning.search import usable_memory
from longspan.planning.tracing import LiveMemory
from longspan.runfile import dump_run, load_run
from tests.attention.context_parallel.test_chunks import CHUNKED
from tests.planning.test_peak import CPU, run_of
from tests.slow import slow

DOUBLING = [
    "attention.segment_lengths=[64,128,256,512,1024]",
    "attention.dilation_rates=[1,2,4,8,16]",
]


@pytest.mark.parametrize("pattern", CHUNKED.values(), ids=CHUNKED.keys())
def test_rows_are_counted_without_listing_them(pattern: Pattern) -> None:
    tokens, heads = 120, Heads(6, 3)
    chunk = 20 if isinstance(pattern, Dilated) and 20 in pattern.segment_lengths else 16
    if isinstance(pattern, Dilated) and 45 in pattern.segment_lengths:
        return  # segments that are not aligned with chunks
    rows = without_blocks(pattern)
    shards = Shards((*range(0, tokens, chunk), tokens))
    kept, most = count_rows(pattern, tokens, chunk, heads)
    assert kept == sum(map(len, kept_rows(rows, shards, heads)))
    found = [open_rows(rows, stop, tokens, heads) for stop in shards.boundaries]
    assert most == max(sum(map(len, x)) for x in found)


@pytest.mark.parametrize(
    ("world", "options"),
    [
        (1, DOUBLING),
        (1, ["attention.kind=dense", "model.kv_heads=2"]),
        pytest.param(
            2,
            ["layout.sequence=2", *DOUBLING, "train.activation_checkpointing=full"],
            marks=slow("parity"),
        ),
        (2, ["layout.sequence=2", "attention.kind=dense", "model.kv_heads=2"]),
    ],
    ids=["dilated", "dense", "sequence 2", "sequence 2, dense"],
)
def test_the_peak_of_a_step_in_chunks_is_planned(world: int, options: list[str]) -> None:
    """Against the tensors of a real step: those of a fake one have no positions.

    Of several ranks there is one, whose collectives return at once.
    """
    with fake_world(0, world) if world > 1 else nullcontext():
        _compare_peak(world, options)


def _compare_peak(world: int, options: list[str]) -> None:
    fixed = ["train.precision=fp32", "data.context=1024", "train.chunk_tokens=128"]
    run = run_of(world, [*options, *fixed])
    (planned,) = memory_per_rank(run, world)
    spec, context = DecoderSpec(new_decoder(run)), partial(autocast, run.train)
    make = partial(build_optimizer, train=run.train)
    with open_mesh(run.layout, World(0, world, 0), CPU) as mesh:
        engine = NativeEngine(spec, mesh, run.train, CPU, make, context, run.layout)
        tokens = torch.zeros(1, run.data.context, dtype=torch.int64)
        with LiveMemory() as memory:
            memory.add(*(to_local(p) for p in engine.model.parameters()))
            for _ in range(2):
                memory.reset_peak()
                engine.backward(Batch(tokens, tokens), torch.tensor(1.0))
                engine.optimizer.step()
                engine.optimizer.zero_grad()
    assert 0.9 * memory.peak <= planned.allocated <= 1.15 * memory.peak


def test_a_hundred_million_tokens_are_planned_on_one_gpu() -> None:
    lengths, rates = [2048 << i for i in range(17)], [1 << i for i in range(17)]
    options = [
        *["model.preset=125m", "model.vocab=50304", f"data.context={1 << 27}"],
        *[f"attention.segment_lengths={lengths}", f"attention.dilation_rates={rates}"],
        *["train.micro_batch=1", "train.global_batch=1", "data.source=recall"],
        *["train.precision=bf16", "train.chunk_tokens=131072"],
    ]
    run, h200 = load_run(None, options, builtin="cuda"), device_of("h200")
    (memory,) = memory_per_rank(run, 1)
    assert memory.peak["rows of earlier chunks"] == 12 * 12 * (2**27 // 128 * 2 // 3) * 2 * 64 * 2
    assert memory.on_device < h200.memory
    (offloaded,) = memory_per_rank(_with(run, offload_chunk_rows=True), 1)
    assert offloaded.on_device < memory.on_device - (20 << 30)
    time, short = predict(run, 1, h200), predict(_with(run, context=1 << 20), 1, h200)
    assert time.step_tokens == 2**27
    assert time.tokens_per_s > 0.95 * short.tokens_per_s  # it is flat in the context
    whole = predict(_with(run, context=1 << 20, chunk_tokens=0), 1, h200)
    assert 0.6 * whole.tokens_per_s < short.tokens_per_s < 0.9 * whole.tokens_per_s


def _with(run: Run, **values: Any) -> Run:
    data = {key: values.pop(key) for key in ("context",) if key in values}
    return run.model_copy(
        update={
            "data": run.data.model_copy(update=data),
            "train": run.train.model_copy(update=values),
        }
    )


def test_chunks_are_not_checked_against_the_training_code() -> None:
    run = run_of(2, ["train.chunk_tokens=1024", "train.precision=fp32"])
    with pytest.raises(UserError, match="does not count the collectives of chunks"):
        check_plan(run, 2)


def test_auto_takes_the_largest_chunks_that_fit(tmp_path: Path) -> None:
    options = ["model.preset=125m", "data.source=recall", "train.micro_batch=1"]
    options += ["train.global_batch=1", "train.chunk_tokens=auto", "train.offload_chunk_rows=true"]

    def found(context: int, world: int | None = 1, layout: str = "layout.sequence=1") -> Run:
        more = [*options, f"data.context={context}", layout]
        return load_run(None, more, builtin="cuda", world=world, hardware="h200")

    short, long = found(65536), found(1 << 23)
    assert (short.train.chunk_tokens, short.train.offload_chunk_rows) == (0, False)
    chunk = long.train.chunk_tokens
    assert chunk >= 131072
    lengths = long.attention.segment_lengths
    assert all(chunk % w == 0 or w % chunk == 0 for w in lengths)
    assert needed_by(_bf16(long)) <= usable_memory(device_of("h200"))
    assert needed_by(_with(_bf16(long), chunk_tokens=2 * chunk)) > usable_memory(device_of("h200"))
    two = _with(_bf16(long), chunk_tokens=2 * chunk)  # which two sequence ranks can hold
    two = two.model_copy(update={"layout": two.layout.model_copy(update={"sequence": 2})})
    assert max(x.on_device for x in memory_per_rank(two, 2)) <= usable_memory(device_of("h200"))
    assert found(1 << 23, world=2, layout="layout.sequence=2").train.chunk_tokens >= 2 * chunk
    unresolved = dump_run(found(1 << 23, world=None))
    assert 'chunk_tokens = "auto"' in unresolved
    (tmp_path / "run.toml").write_text(unresolved)
    again = load_run(tmp_path / "run.toml", [], world=1, hardware="h200")
    assert again.train.chunk_tokens == chunk
    assert f"chunk_tokens = {chunk}" in dump_run(again)
    with pytest.raises(UserError, match=r"do not fit .* in chunks of 1,024"):
        load_run(
            None,
            ["model.preset=7b", *options[1:], "data.context=65536"],
            builtin="cuda",
            hardware="rtx4090",
        )


def test_chunks_are_a_rung_of_the_ladder() -> None:
    options = ["model.preset=125m", "data.source=recall", "train.micro_batch=1"]
    options += ["train.global_batch=1", "data.context=8388608", "train.precision=bf16"]
    run, h200 = load_run(None, options, builtin="cuda"), device_of("h200")
    found = ladder(run, 1, h200, int(usable_memory(h200)))
    assert found is not None
    (rung,) = [x for x in found.rungs if x["setting"].startswith("train.chunk_tokens")]
    assert rung["setting"] == "train.chunk_tokens=4194304"
    assert 0.6 < rung["speed"] < 0.9
    assert found.together is not None
    assert any(x.startswith("train.chunk_tokens=") for x in found.together.settings)


def _bf16(run: Run) -> Run:
    return _with(run, precision="bf16")


def needed_by(run: Run) -> int:
    return max(memory.on_device for memory in memory_per_rank(run, 1))
