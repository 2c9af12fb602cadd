"""`longspan bench step-time`: predicted against measured tokens/s and memory, on one device.

Each run takes a few steps in this process, on data that costs nothing. `--fit` fits the planner's
constants to what was measured before, and prints `planning/efficiencies.toml` with them.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import tomli_w
import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from longspan.benchmarks.measure import (
    WARM_UP,
    Rows,
    StepClock,
    Steps,
    machine,
    open_console,
    write_result,
)
from longspan.config import Run
from longspan.data import Prefetcher, open_source
from longspan.device import matmul_precision, resolve
from longspan.engines import open_engine
from longspan.errors import UserError, first_problem
from longspan.files import read_json_object
from longspan.hardware import Device, cpu_device, device_of, find_device
from longspan.nn.products import chosen_products
from longspan.parallel.mesh import open_mesh
from longspan.parallel.world import World
from longspan.planning.fitting import as_dict, fit, quantiles
from longspan.planning.memory import memory_per_rank
from longspan.planning.rates import RunRates, efficiencies, rates_of
from longspan.planning.run_time import predict
from longspan.progress import measuring
from longspan.runfile import load_run
from longspan.training.guard import Guard
from longspan.training.state import TrainState
from longspan.training.step import forward_context_of, train_step

GIB = 2**30
MAX_BYTES = 16 << 20
FEWEST = 10
"""Runs to fit to: about as many as there are constants that they determine."""
FILE_KEYS = ("model.from", "model.factory", "train.init_from", "data.source", "data.mix")
SCALE = 0.03
SPREAD = {
    "matmul": 0.1, "half_columns": 1.0, "dense": 0.05, "dilated": 0.25, "block_sparse": 0.1,
    "block_traffic": 0.5, "eager_traffic": 1.0, "loss_traffic": 0.7, "weight_traffic": 0.5,
    "host_s": 1.0, "eager_host": 1.0, "graph_gaps_s": 1.0, "chunk_overhead": 1.0,
    "tile_s": 1.0,
}  # fmt: skip
"""The constants that are fitted, and how far they may be from the present ones. Little where they
have benchmarks of their own: of matrix products, and of attention that is not by our kernels.
"""


def _gpu_run(preset: str, context: int, micro_batch: int, mode: str, *more: str) -> list[str]:
    return [
        f"model.preset={preset}", "model.vocab=50304", f"data.context={context}",
        f"train.micro_batch={micro_batch}", f"train.global_batch={micro_batch}",
        f"train.activation_checkpointing={mode}", *more,
    ]  # fmt: skip


LAUNCHED = "train.cuda_graphs=false"


GPU_RUNS = [
    _gpu_run("125m", 8192, 8, "none"),
    _gpu_run("125m", 8192, 8, "none", "attention.kind=dense"),
    _gpu_run("125m", 65536, 1, "none"),
    _gpu_run("125m", 524288, 1, "selective"),
    _gpu_run("125m", 2048, 1, "none"),
    _gpu_run("125m", 8192, 2, "none", "train.compile=false", LAUNCHED),
    _gpu_run("350m", 8192, 4, "none"),
    _gpu_run("350m", 8192, 4, "full"),
    _gpu_run("350m", 8192, 1, "none"),
    _gpu_run("350m", 8192, 1, "none", LAUNCHED),
    _gpu_run("350m", 65536, 1, "selective"),
    _gpu_run("350m", 8192, 4, "none", "train.compile=false", LAUNCHED),
    _gpu_run("1.3b", 8192, 1, "none"),
    _gpu_run("1.3b", 8192, 2, "selective"),
    _gpu_run("1.3b", 65536, 1, "full"),
    _gpu_run("1.3b", 131072, 1, "full"),
]
CPU_RUNS = [
    [f"data.context={context}", f"train.micro_batch={size}", f"train.global_batch={size}", *more]
    for context, size, more in (
        (512, 1, []),
        (512, 4, []),
        (2048, 1, []),
        (2048, 1, ["train.activation_checkpointing=full"]),
        (1024, 2, ["model.hidden=256", "model.layers=4"]),
    )
]


def bench_step_time(device: str, steps: int, json_file: Path | None) -> None:
    """Measure, print a table and write JSON."""
    if steps < 1:
        raise UserError(f"--steps must be at least 1, got {steps}")
    console, where = open_console(json_file), machine(device)
    hardware = _hardware(device)
    console.print(f"{where}; medians of {steps} steps after {WARM_UP}", markup=False)
    columns = {"tokens/s": 10, "predicted": 10, "error": 7, "GiB": 7, "planned": 8, "run": -1}
    table, rows = Rows(console, columns), list[dict[str, Any]]()
    for overrides in GPU_RUNS if device == "cuda" else CPU_RUNS:
        run = load(overrides, device)
        row: dict[str, Any] = {"device": hardware.name, "overrides": overrides}
        predicted = predict(run, 1, hardware).tokens_per_s
        planned = max(memory.on_device for memory in memory_per_rank(run, 1))
        row |= {"predicted_tokens_per_s": predicted, "planned_bytes": planned}
        gc.collect()  # the model of the run before
        try:
            with measuring(f"training {' '.join(overrides)}"):
                seconds, memory, _ = measure(run, steps)
        except torch.OutOfMemoryError:
            rows.append({**row, "error": "out of memory"})
            console.print(f"out of memory: {' '.join(overrides)}", markup=False)
            torch.cuda.empty_cache()
            continue
        rate = run.train.global_batch * run.data.context / statistics.median(seconds)
        row |= {"tokens_per_s": rate, "step_s": seconds, "memory_bytes": memory}
        rows.append(row)
        table.add(
            f"{rate:,.0f}", f"{predicted:,.0f}", f"{predicted / rate - 1:+.1%}",
            f"{memory / GIB:.2f}" if memory else "–", f"{planned / GIB:.2f}", " ".join(overrides),
        )  # fmt: skip
    errors = [abs(r["predicted_tokens_per_s"] / r["tokens_per_s"] - 1) for r in _measured(rows)]
    found = quantiles(errors)
    console.print(f"{len(errors)} runs, error: median {found['median']:.1%}, 9 of 10 within "
                  f"{found['p90']:.1%}")  # fmt: skip
    write_result(json_file, {"machine": where, "steps": steps, "errors": found, "rows": rows})


def load(overrides: Sequence[str], device: str) -> Run:
    """The built-in run of a device with `overrides`, on data that costs nothing."""
    options = [*overrides, "data.source=recall", f"train.device={device}"]
    run = load_run(None, options, builtin="cuda" if device == "cuda" else "cpu")
    return resolve(run, torch.device(device))


def _hardware(device: str) -> Device:
    if device == "cpu":
        return cpu_device(1)
    name = torch.cuda.get_device_name()
    if (found := find_device(name)) is None:
        raise UserError(f'"{name}" is not in the table of GPUs, so that nothing is predicted of it')
    return found


def measure(run: Run, steps: int, warm_up: int = WARM_UP) -> Steps:
    """`steps` steps of a run in this process after the warm-up.

    Without one, blocks are compiled in the first step. The moments are there before it, as they are
    in any later one.
    """
    device = torch.device(run.train.device)
    source = open_source(run.data, run.model)
    with (
        open_mesh(run.layout, World(0, 1, 0), device) as mesh,
        matmul_precision(run.train),
        chosen_products(run.train, device),
    ):
        engine = open_engine(run, mesh, device, forward_context_of(run.train))
        state = TrainState(engine, mesh, Guard(0.0, device))
        with Prefetcher(source, run.train.seed, mesh.local_samples, device) as data:
            if not warm_up:
                _make_moments(engine.optimizer)
            with StepClock(device, warm_up) as clock:
                for _ in range(warm_up + steps):
                    train_step(state, data, run.train, device)
                    clock.tick()
                return clock.steps()


def _make_moments(optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()


def _measured(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return [row for row in rows if "tokens_per_s" in row]


Override = Annotated[
    str, Field(pattern=r"^(model|attention|data|train)\.[^\p{C}]*$", max_length=200)
]


class MeasuredRow(BaseModel):
    """One run in a result of this benchmark or `bench train`: its overrides, what was measured."""

    model_config = ConfigDict(extra="ignore", frozen=True, strict=True, allow_inf_nan=False)

    device: Annotated[str, Field(max_length=100)] | None
    """None if it is not in the table of GPUs."""
    overrides: Annotated[tuple[Override, ...], Field(strict=False, max_length=50)]
    tokens_per_s: Annotated[float, Field(ge=1e-3, le=1e12)] | None = None
    """None if it ran out of memory."""

    @field_validator("overrides")
    @classmethod
    def _reads_no_files(cls, overrides: tuple[str, ...]) -> tuple[str, ...]:
        for override in overrides:
            if override.startswith(FILE_KEYS):
                raise ValueError(f"{override!r} names a file, which no measured run has: remove it")
        return overrides


class _Result(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True, strict=True)

    machine: Annotated[str, Field(max_length=1000)]
    rows: Annotated[list[MeasuredRow], Field(max_length=10_000)]

    @field_validator("rows", mode="before")
    @classmethod
    def _of_whole_steps(cls, rows: Any) -> Any:
        """`bench train` also has plain models, and first steps, with their compilation."""
        if not isinstance(rows, list):
            return rows
        return [row for row in rows if not isinstance(row, dict) or _is_of_whole_steps(row)]


def _is_of_whole_steps(row: Mapping[str, Any]) -> bool:
    return "overrides" in row and row.get("warm_up") != 0


def refit(files: Sequence[Path]) -> str:
    """`efficiencies.toml` with constants fitted to the runs of these results, and their errors."""
    results = [_read(file) for file in files]
    rows = [row for result in results for row in result.rows if row.tokens_per_s is not None]
    if len(rows) < FEWEST:
        raise UserError(f"{len(rows)} runs are too few to fit to: give at least {FEWEST}")
    names = {row.device or "one that is not in the table" for row in rows}
    if len(names) > 1 or not {row.device for row in rows}.isdisjoint(("cpu", None)):
        raise UserError(f"the runs must be of one GPU of the table, got {', '.join(sorted(names))}")
    (name,) = names
    rates, errors = fit_rates(rows, device_of(name))
    source = ", ".join(sorted({result.machine for result in results}))
    band = {"device": name, "gpus": 1, "runs": len(rows)}
    band |= {key: round(errors[key], 4) for key in ("median", "p90")}
    band["of"] = f"{len(rows)} runs on one {name.upper()}, to which the constants are fitted"
    others = [each for each in efficiencies()["band"] if each["device"] != name]
    measured = [
        {
            "device": name,
            "source": source,
            "tokens_per_s": round(row.tokens_per_s or 0),
            "overrides": list(row.overrides),
        }
        for row in rows
    ]
    table = {
        "gpu": as_dict(rates),
        "cpu": efficiencies()["cpu"],
        "band": [band, *others],
        "measured": measured,
    }
    head = "# Written by `longspan bench step-time --fit`; the keys are explained in rates.py.\n\n"
    return head + tomli_w.dumps(table)


def fit_rates(rows: Sequence[MeasuredRow], device: Device) -> tuple[RunRates, dict[str, float]]:
    """Constants that give the tokens/s of measured runs, and the errors that are left.

    From the present ones, which stay where these runs say nothing about them.
    """
    runs = [load_run(None, row.overrides, builtin="cuda", world=1) for row in rows]
    measured = np.array([row.tokens_per_s for row in rows], dtype=float)

    def predicted(rates: RunRates) -> np.ndarray[Any, np.dtype[np.float64]]:
        return np.array([predict(run, 1, device, rates).tokens_per_s for run in runs])

    spread = {field.name: SPREAD.get(field.name, 1e-4) for field in fields(RunRates)}
    rates = fit(predicted, measured, rates_of(device), scale=SCALE, spread=spread)
    return rates, quantiles(np.abs(predicted(rates) / measured - 1))


def _read(file: Path) -> _Result:
    try:
        return _Result.model_validate(read_json_object(file, MAX_BYTES))
    except ValidationError as error:
        raise UserError(
            f"{file} is not a result of longspan bench step-time or train: {first_problem(error)}"
        ) from error
