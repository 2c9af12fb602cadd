"""`longspan bench train`: tokens/s of whole training steps, beside a plain dense GPT.

Steps include the optimizer and the gradient norm; medians after a warm-up. MFU counts the FLOPs of
the pattern's attention; "as dense" counts those of dense attention, which a dense model would need
for the same tokens. The plain GPT has the depth, width, heads and vocabulary of the preset.
"""

from __future__ import annotations

import gc
import os
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from longspan.attention import Dense, patterns_of
from longspan.benchmarks.chart import charts_svg
from longspan.benchmarks.measure import (
    WARM_UP,
    Rows,
    Steps,
    machine,
    open_console,
    unwritable,
    write_result,
)
from longspan.benchmarks.plain_gpt import measure_plain
from longspan.benchmarks.step_time import GIB, load, measure
from longspan.config import Run
from longspan.errors import UserError
from longspan.flops import flops_per_sample
from longspan.hardware import find_device, peak_flops
from longspan.progress import measuring
from longspan.wording import counted

PLAIN = "plain GPT,"
STEPS = 10


@dataclass(frozen=True)
class Case:
    """A run: `kind` "dilated" has segments that double from 2,048 tokens until one has them all."""

    model: str
    context: int
    batch: int
    kind: str
    overrides: tuple[str, ...] = ()
    checkpointing: str = "none"
    recompute_layers: int = 0
    """With "full", of how many layers."""
    offload_gib: float = 0
    """Of activations, in CPU memory."""
    chunk: int = 0
    """Tokens of a chunk, if the context is walked in chunks."""
    tile: int = 0
    """Tokens of a tile, if MLPs are computed in tiles."""
    warm_up: int = WARM_UP
    """Steps before those that are timed; without any, the first is timed with its compilation."""
    is_beside_plain: bool = False

    @property
    def name(self) -> str:
        size = self.context
        length = str(size)
        if size >= 1 << 10:
            length = f"{size / 2**20:g}M" if size >= 1 << 20 else f"{size >> 10}K"
        how = " in chunks" * bool(self.chunk) + " in tiles" * bool(self.tile)
        how += " offloaded" * bool(self.offload_gib)
        return f"{self.model} {length} {self._rounded}{how}"

    @property
    def line(self) -> str:
        """The name of its line in the figure."""
        return f"{self.model} {self._rounded}"

    @property
    def _rounded(self) -> str:
        return self.kind + " in fp8" * (FP8 in self.overrides)

    def options(self, more: Sequence[str]) -> list[str]:
        """Overrides of the built-in run."""
        options = [
            f"data.context={self.context}",
            f"train.micro_batch={self.batch}",
            f"train.global_batch={self.batch}",
            f"train.activation_checkpointing={self.checkpointing}",
            f"attention.kind={self.kind}",
            *self.overrides,
        ]
        if self.recompute_layers:
            options.append(f"train.recompute_layers={self.recompute_layers}")
        if self.offload_gib:
            options.append("train.offload_activations=true")
            options.append(f"train.offload_limit_gib={self.offload_gib}")
        if self.chunk:
            options.append(f"train.chunk_tokens={self.chunk}")
        if self.tile:
            options.append(f"train.mlp_tile_tokens={self.tile}")
        if self.kind == "dilated":
            shortest = min(2048, self.context)
            rates = [1 << i for i in range(((self.context - 1) // shortest).bit_length() + 1)]
            segments = [shortest * rate for rate in rates]
            options += [
                f"attention.segment_lengths={segments}",
                f"attention.dilation_rates={rates}",
            ]
        return [*options, *more]

    def run(self, device: str, more: Sequence[str]) -> Run:
        return load(self.options(more), device)


def _gpu_case(preset: str, kib: int, batch: int, kind: str, *options: str, **more: Any) -> Case:
    overrides = (f"model.preset={preset}", "model.vocab=50304", *options)
    return Case(preset, kib << 10, batch, kind, overrides, **more)


BF16_STREAM, FP8 = "train.residual_precision=bf16", "train.fp8=true"


GPU_CASES = [
    _gpu_case("125m", 8, 8, "dense", is_beside_plain=True),
    _gpu_case("125m", 8, 8, "dilated"),
    _gpu_case("125m", 64, 1, "dilated", is_beside_plain=True),
    _gpu_case("125m", 1024, 1, "dilated", checkpointing="full", recompute_layers=8),
    _gpu_case("125m", 1024, 1, "dilated", BF16_STREAM, checkpointing="selective", tile=65536),
    _gpu_case("350m", 8, 8, "dilated", is_beside_plain=True),
    # With a residual stream in float32 more layers must be recomputed.
    _gpu_case("350m", 256, 1, "dilated", BF16_STREAM, checkpointing="full", recompute_layers=3),
    _gpu_case("1.3b", 8, 4, "dilated", is_beside_plain=True),
    _gpu_case("1.3b", 8, 4, "dilated", FP8),
    _gpu_case("1.3b", 128, 1, "dilated", BF16_STREAM, checkpointing="full", recompute_layers=6),
]
LLAMA = (
    "model.preset=llama3-8b",
    "train.optimizer=adamw8bit",
    BF16_STREAM,
)
DENSE_LLAMA = (*LLAMA, "train.parameter_precision=bf16")
LONGEST_GPU_CASES = [
    *(
        _gpu_case("125m", mib << 10, 1, "dilated", chunk=131072, warm_up=1)
        for mib in (1, 2, 4, 8, 16, 32)
    ),
    _gpu_case("1.3b", 4096, 1, "dilated", chunk=32768, warm_up=0),
    Case("llama3-8b", 1_572_864, 1, "dilated", LLAMA, "full", chunk=32768, warm_up=0),
    Case(
        "llama3-8b",
        501_760,
        1,
        "dense",
        DENSE_LLAMA,
        "full",
        offload_gib=88.5,
        tile=8192,
        warm_up=0,
    ),
]
CPU_CASES = [
    Case("built-in", 512, 2, "dense", is_beside_plain=True),
    Case("built-in", 512, 2, "dilated"),
]
LONGEST_CPU_CASES = [
    Case("built-in", 1024, 1, "dense", chunk=256, warm_up=0),
    Case("built-in", 1024, 1, "dilated", chunk=256, warm_up=1),
]


def bench_train(
    device: str,
    steps: int | None,
    only: Sequence[str],
    overrides: Sequence[str],
    json_file: Path | None,
    plot: Path | None,
    *,
    longest: bool = False,
) -> None:
    """Measure, print a table, write JSON and draw the figures.

    `steps`: by default STEPS; `only`: words of a case's name, of which one must occur; `overrides`
    of the run file apply to all runs; `longest`: the longest contexts instead, of which a step
    takes up to ten minutes, so that one is the default; the longest are timed without a warm-up.
    """
    if steps is None:
        steps = 1 if longest else STEPS
    if steps < 1:
        raise UserError(f"--steps must be at least 1, got {steps}")
    if longest:
        cases = LONGEST_GPU_CASES if device == "cuda" else LONGEST_CPU_CASES
    else:
        cases = GPU_CASES if device == "cuda" else CPU_CASES
    chosen = [case for case in cases if not only or any(word in case.name for word in only)]
    if not chosen:
        names = ", ".join(case.name for case in cases)
        raise UserError(f"--only {' '.join(only)} matches none of the cases: {names}")
    if plot and (problem := unwritable([plot])):
        raise UserError(problem)
    console, where = open_console(json_file), machine(device)
    timed = counted(steps, "step") + ("" if longest else f" after {WARM_UP}")
    console.print(f"{where}; medians of {timed}", markup=False)
    columns = {"run": -44, "tokens/s": 10, "ms": 9, "MFU": 6, "as dense": 8, "GiB": 6}
    columns |= {"MHz": 5, "W": 4}
    table, rows = Rows(console, columns), list[dict[str, Any]]()

    def add(name: str, run: Run, measured: Steps | None, is_dense: bool) -> None:
        rows.append(_row(name, run, measured, is_dense))
        table.add(*_cells(rows[-1]))

    for case in chosen:
        run = case.run(device, overrides)
        with measuring(f"training {case.name}"):
            measured = _measured(run, steps, case.warm_up)
        is_first = steps == 1 and not case.warm_up
        add(f"{case.name}{', first step' * is_first}", run, measured, case.kind == "dense")
        rows[-1] |= {"warm_up": case.warm_up, "line": case.line}
        rows[-1]["overrides"] = case.options(overrides)
        if case.is_beside_plain:
            with measuring(f"training a {PLAIN} {case.name}"):
                measured = _measured_plain(run, steps)
            add(f"{PLAIN} {case.name}", run, measured, True)
            rows[-1] |= {"warm_up": WARM_UP, "line": f"{case.model} plain GPT"}
    if limited := _power_limit(rows):
        console.print(limited, markup=False)
    allocator = {k: v for k, v in os.environ.items() if re.fullmatch("PYTORCH_.*ALLOC_CONF", k)}
    result = {"machine": where, "environment": allocator, "steps": steps, "rows": rows}
    write_result(json_file, result)
    if plot:
        plot.write_text(_chart(rows, where))


def _patterns(run: Run) -> Sequence[Any]:
    return patterns_of(run.attention, run.model.layers)


def _measured(run: Run, steps: int, warm_up: int) -> Steps | None:
    """None if it ran out of memory."""
    _forget()
    try:
        return measure(run, steps, warm_up)
    except torch.OutOfMemoryError:
        return None


def _measured_plain(run: Run, steps: int) -> Steps | None:
    _forget()
    device = torch.device(run.train.device)
    batch, context = run.train.micro_batch, run.data.context
    try:
        return measure_plain(run.model, context, batch, device, steps=steps, warm_up=WARM_UP)
    except torch.OutOfMemoryError:
        return None


def _forget() -> None:
    """Free the model and the compiled code of the run before."""
    torch.compiler.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _row(name: str, run: Run, measured: Steps | None, is_dense: bool) -> dict[str, Any]:
    """`is_dense`: the attention computes all pairs."""
    row: dict[str, Any] = {"run": name, "device": _device(run), "context": run.data.context}
    if measured is None:
        return {**row, "memory_bytes": 0, "error": "out of memory"}
    seconds = statistics.median(measured.seconds)
    row["memory_bytes"] = measured.memory_bytes
    if (clocks := measured.clocks) is not None:
        row |= {f"gpu_{key}": value for key, value in clocks._asdict().items()}
    samples = run.train.global_batch
    row |= {"step_s": seconds, "tokens_per_s": samples * run.data.context / seconds}
    peak = peak_flops(torch.cuda.get_device_name()) if run.train.device == "cuda" else None
    if peak is not None:
        dense = [Dense()] * run.model.layers
        ours = dense if is_dense else _patterns(run)
        for key, patterns in (("mfu", ours), ("mfu_as_dense", dense)):
            flops = sum(flops_per_sample(run.model, patterns, run.data.context))
            row[key] = flops * samples / seconds / peak
    return row


def _device(run: Run) -> str | None:
    """The name that the planner has for it."""
    if run.train.device == "cpu":
        return "cpu"
    found = find_device(torch.cuda.get_device_name())
    return None if found is None else found.name


def _cells(row: dict[str, Any]) -> list[str]:
    if "error" in row:
        return [row["run"], row["error"]]
    shares = [f"{row[key]:.1%}" if key in row else "–" for key in ("mfu", "mfu_as_dense")]
    memory = f"{row['memory_bytes'] / GIB:.1f}" if row["memory_bytes"] else "–"
    clocks = [f"{row[key]:.0f}" if key in row else "–" for key in ("gpu_mhz", "gpu_watts")]
    return [
        row["run"], f"{row['tokens_per_s']:,.0f}", f"{1e3 * row['step_s']:,.1f}", *shares, memory,
        *clocks,
    ]  # fmt: skip


def _power_limit(rows: Sequence[dict[str, Any]]) -> str | None:
    """A sentence on the runs that the GPU's power limit slowed for most of the time."""
    limited = [row for row in rows if row.get("gpu_limited", 0.0) > 0.5]
    if not limited:
        return None
    slowest = min(limited, key=lambda row: row["gpu_mhz"] / row["gpu_most_mhz"])
    return (
        f"The GPU's power limit slowed {len(limited)} of {len(rows)} runs, at most to "
        f"{slowest['gpu_mhz']:.0f} of {slowest['gpu_most_mhz']:.0f} MHz ({slowest['run']})"
    )


def _chart(rows: Sequence[dict[str, Any]], where: str) -> str:
    """Tokens/s over the context, a line for each model, ours and the plain one.

    Of several runs of a model and a context the fastest.
    """
    fastest: dict[str, dict[float, float]] = {}
    for row in rows:
        if "tokens_per_s" in row:
            line, context = fastest.setdefault(row["line"], {}), row["context"]
            line[context] = max(row["tokens_per_s"], line.get(context, 0.0))
    lines = {name: list(points.items()) for name, points in fastest.items()}
    return charts_svg({"tokens/s of training": lines}, where)
