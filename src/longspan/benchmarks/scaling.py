"""`longspan bench scaling`: how the time of a training step changes with the number of processes.

Every measurement is `longspan train` itself, on real processes. On CPUs each process has the same
number of cores in all of them, to which its threads are pinned: what is compared is one process
with k cores against N processes with k cores each.
"""

from __future__ import annotations

import csv
import math
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from longspan.benchmarks.chart import charts_svg
from longspan.benchmarks.measure import (
    WARM_UP,
    Rows,
    machine,
    open_console,
    unwritable,
    write_result,
)
from longspan.config import Run
from longspan.errors import UserError
from longspan.launching.local import run_processes
from longspan.launching.pinning import CAN_PIN, available_cores, pinned_environment
from longspan.progress import measuring
from longspan.runfile import dump_run, load_run
from longspan.tracking import read_metrics
from longspan.tracking.trace import FOLDER, SUMMARY, Summary, read_summary
from longspan.wording import counted

LAYOUTS = {"ddp": "replicate", "fsdp": "shard", "tensor": "tensor", "sequence": "sequence"}
"""What is measured, and the axis of the layout that has all processes."""
ALONE = "one process"
AXES = ("replicate", "shard", "tensor", "pipeline", "sequence")
PROFILED = 3
"""Steps after those that are timed, from which the share of communication is known."""


@dataclass(frozen=True)
class Row:
    """One layout on a number of processes.

    `step_ms`: the median over steps; `spread`: the range of the middle half of them, as a share of
    it. Shares are of a step, the mean over ranks: communication includes waiting for other ranks;
    what is exposed has no compute at the same time.
    """

    mode: str
    layout: str
    ranks: int
    cores_per_rank: int | None
    oversubscribed: bool
    global_batch: int
    context: int
    steps: int
    step_ms: float
    spread: float
    tokens_per_s: float
    efficiency: float
    communication: float
    exposed: float


@dataclass(frozen=True)
class Skipped:
    """A layout that the run does not fit, and why."""

    layout: str
    ranks: int
    why: str


@dataclass(frozen=True)
class Setting:
    """What to measure. `cores`: of each process; None on GPUs, and where nothing can be pinned."""

    mode: str
    layouts: tuple[str, ...]
    processes: tuple[int, ...]
    device: str
    cores: int | None
    steps: int


class _Measured(Exception):
    """All that is needed is written, and the run need not go on."""


def efficiency(mode: str, ranks: int, alone_s: float, together_s: float) -> float:
    """T1 / (N · TN) of the same work (strong); T1 / TN of N times the work (weak)."""
    return alone_s / (together_s * (ranks if mode == "strong" else 1))


def bench_scaling(
    file: Path | None,
    overrides: Sequence[str],
    setting: Setting,
    json_file: Path | None,
    csv_file: Path | None,
    plot_file: Path | None,
) -> None:
    """Measure, print a table and write the files."""
    if problem := unwritable([f for f in (csv_file, plot_file) if f is not None]):
        raise UserError(problem)
    console = open_console(json_file)
    base = base_run(file, overrides, setting)
    cores, where = available_cores(), machine(setting.device)
    pins = {} if setting.cores is None else pinned_environment(cores, setting.cores)
    console.print(f"{where}\n{compared(base, setting, cores)}", markup=False)
    rows, alone_s = list[Row](), 0.0
    with tempfile.TemporaryDirectory(prefix="longspan-scaling-") as folder:
        saved = Path(folder) / "run.toml"
        saved.write_text(dump_run(base), encoding="utf-8")
        skipped, points = plan_points(saved, base, setting)
        for each in skipped:
            text = f"{each.layout} on {each.ranks} processes is not measured: {each.why}"
            console.print(text, markup=False)
        table = Rows(console, COLUMNS)
        for layout, ranks, options in points:
            with measuring(f"training with {layout} on {counted(ranks, 'process')}"):
                run_dir = Path(folder) / f"{layout}-{ranks}"
                times, summary = _train(saved, options, ranks, run_dir, setting.steps, pins)
            run = load_run(saved, options, world=ranks)
            middle = statistics.median(times)
            alone_s = middle if ranks == 1 else alone_s
            communication, exposed = shares(summary)
            row = Row(
                mode=setting.mode,
                layout=layout,
                ranks=ranks,
                cores_per_rank=setting.cores,
                oversubscribed=setting.cores is not None and ranks * setting.cores > len(cores),
                global_batch=run.train.global_batch,
                context=run.data.context,
                steps=len(times),
                step_ms=1e3 * middle,
                spread=_middle_half(times) / middle,
                tokens_per_s=run.train.global_batch * run.data.context / middle,
                efficiency=efficiency(setting.mode, ranks, alone_s, middle),
                communication=communication,
                exposed=exposed,
            )
            rows.append(row)
            table.add(*_cells(row))
    if any(row.oversubscribed for row in rows):
        console.print("* needs more cores than there are: processes share them")
    described = {**asdict(setting), "compared": compared(base, setting, cores)}
    described |= {"available_cores": len(cores)}
    result = {"machine": where, "setting": described, "rows": [asdict(row) for row in rows]}
    result["skipped"] = [asdict(each) for each in skipped]
    write_result(json_file, result)
    if csv_file is not None:
        with csv_file.open("w", newline="") as stream:
            writer = csv.DictWriter(stream, [field.name for field in fields(Row)])
            writer.writeheader()
            writer.writerows(asdict(row) for row in rows)
    if plot_file is not None:
        cores_each = f"; {counted(setting.cores, 'core')} per process" if setting.cores else ""
        plot_file.write_text(draw(rows, where + cores_each))


def base_run(file: Path | None, overrides: Sequence[str], setting: Setting) -> Run:
    """The run that all measurements share, but for batch, context and layout.

    The built-in run is grown so that every layout fits it: the model must be the same in all.
    """
    common = math.lcm(*setting.processes)
    if file is not None:
        run = load_run(file, [*overrides, *_no_layout()], world=1)
        if run.model.factory:
            raise UserError(
                "bench scaling needs the decoder that a run file describes, but this run has "
                f'model.factory = "{run.model.factory}"'
            )
        return run
    # The same step must divide among the most processes; one that grows may begin with a sequence.
    batch = [f"train.global_batch={common if setting.mode == 'strong' else 1}"]
    grown = load_run(
        None,
        [*batch, "data.context=2048", *overrides, *_no_layout(), f"layout.tensor={common}"],
        builtin=setting.device,
        world=common,
    )
    return grown.model_copy(update={"layout": load_run(None, _no_layout(), world=1).layout})


def _no_layout() -> list[str]:
    return [f"layout.{axis}=1" for axis in AXES]


Point = tuple[str, int, list[str]]


def plan_points(file: Path, base: Run, setting: Setting) -> tuple[list[Skipped], list[Point]]:
    """What is not measured, and why; and what is: layout, ranks and overrides of `file`, the base.

    One process comes first and once: without others all layouts are the same.
    """
    skipped, points = list[Skipped](), list[Point]()
    for ranks in sorted(setting.processes):
        for layout in setting.layouts if ranks > 1 else (ALONE,):
            options = [f"train.device={setting.device}", *_no_layout()]
            if ranks > 1:
                options.append(f"layout.{LAYOUTS[layout]}={ranks}")
            if setting.mode == "weak" and layout == "sequence":
                options.append(f"data.context={base.data.context * ranks}")
            elif setting.mode == "weak":
                options.append(f"train.global_batch={base.train.global_batch * ranks}")
            options += _measured(setting.steps)
            try:
                load_run(file, options, world=ranks)
            except UserError as error:
                if ranks == 1:
                    raise
                problems = str(error).splitlines()[1:]
                skipped.append(Skipped(layout, ranks, "; ".join(map(str.strip, problems))))
                continue
            points.append((layout, ranks, options))
    return skipped, points


def _measured(steps: int) -> list[str]:
    """Overrides: every step has a line, profiled ones follow, and nothing else takes time."""
    total = WARM_UP + steps + 1 + PROFILED
    return [
        f"train.steps={total + 2}",  # rank 0 joins the profiles after the step that follows
        f"train.warmup_steps={total}",
        "train.eval_every=0",
        "train.eval_samples=1",
        "checkpoint.every=0",
        "track.log_every=1",
        "track.prompt=",
        "track.sinks=[]",
        f"track.profile.wait={WARM_UP + steps}",
        "track.profile.warmup=1",
        f"track.profile.active={PROFILED}",
        "track.profile.repeat=1",
    ]


def _train(
    file: Path,
    options: Sequence[str],
    ranks: int,
    run_dir: Path,
    steps: int,
    variables: Mapping[str, str],
) -> tuple[list[float], Summary | None]:
    """Train until `steps` are timed and others profiled; seconds per step, and the profile."""
    metrics, received = run_dir / "metrics.jsonl", list[int]()
    written = run_dir / FOLDER / SUMMARY

    def poll() -> None:
        if received:
            raise KeyboardInterrupt
        if written.exists():
            raise _Measured  # which ends the processes

    command = [sys.executable, "-m", "longspan", "train", str(file), *options]
    command += ["--run-dir", str(run_dir)]
    try:
        code = run_processes(
            command,
            ranks,
            run_dir / "logs",
            quiet=True,
            received=received,
            on_poll=poll,
            variables=variables,
        )
    except _Measured:
        code = 0
    if code:
        raise SystemExit(code)
    lines = [line for line in read_metrics(metrics) if "step_time_s" in line]
    times = [
        float(line["step_time_s"]) for line in lines if WARM_UP < line["step"] <= WARM_UP + steps
    ]
    assert len(times) == steps, f"{len(times)} of {steps} steps were timed"
    return times, read_summary(run_dir)


def shares(summary: Summary | None) -> tuple[float, float]:
    """Communication and exposed communication as shares of a step, the mean over ranks."""
    if summary is None:
        return 0.0, 0.0
    wall = statistics.fmean(rank.mean("wall_s") for rank in summary.ranks)
    names = ("communication_s", "exposed_communication_s")
    total, exposed = (
        statistics.fmean(rank.mean(name) for rank in summary.ranks) / wall for name in names
    )
    return total, exposed


def _middle_half(values: Sequence[float]) -> float:
    if len(values) < 2:
        return 0.0
    first, _, third = statistics.quantiles(values, n=4, method="inclusive")
    return third - first


def compared(base: Run, setting: Setting, cores: Sequence[int]) -> str:
    """What is compared with what, in words."""
    batch, context = base.train.global_batch, base.data.context
    work = {
        "strong": f"the same step on all: {counted(batch, 'sequence')} of {context:,} tokens; "
        "efficiency is T1 / (N TN)",
        "weak": f"N times the step of one process, {counted(batch, 'sequence')} of {context:,} "
        "tokens: N times the sequences (ddp, fsdp, tensor), N times the context (sequence); "
        "efficiency is T1 / TN",
    }[setting.mode]
    if setting.cores is not None:
        here = f"each process pinned to {counted(setting.cores, 'core')} of {len(cores)}, with "
        here += f"{counted(setting.cores, 'thread')}"
    elif setting.device == "cuda":
        here = "each process on a GPU"
    else:
        here = "processes not pinned to cores, which this system does not support"
    micro = f"micro-batch {base.train.micro_batch}"
    steps = f"median of {setting.steps} steps after {WARM_UP}, {PROFILED} more profiled"
    return f"{setting.mode} scaling, {work}; {micro}; {here}; {steps}"


COLUMNS = {
    "layout": -11, "processes": 9, "step ms": 10, "spread": 7, "tokens/s": 10, "efficiency": 10,
    "communication": 13, "exposed": 8,
}  # fmt: skip


def _cells(row: Row) -> tuple[str, ...]:
    return (
        row.layout,
        f"{row.ranks}{'*' if row.oversubscribed else ''}",
        f"{row.step_ms:,.1f}",
        f"{row.spread:.0%}",
        f"{row.tokens_per_s:,.0f}",
        f"{row.efficiency:.1%}",
        f"{row.communication:.1%}",
        f"{row.exposed:.1%}",
    )


def draw(rows: Sequence[Row], caption: str) -> str:
    """Efficiency and exposed communication over the number of processes, as SVG."""
    mode, alone = rows[0].mode, rows[0]
    efficiencies: dict[str, list[tuple[float, float]]] = {}
    exposed: dict[str, list[tuple[float, float]]] = {}
    for row in rows[1:]:
        efficiencies.setdefault(row.layout, [(1, alone.efficiency)]).append(
            (row.ranks, row.efficiency)
        )
        exposed.setdefault(row.layout, [(1, 0.0)]).append((row.ranks, row.exposed))
    if not efficiencies:
        efficiencies, exposed = {alone.layout: [(1, 1.0)]}, {alone.layout: [(1, 0.0)]}
    top = 1.0 if all(row.efficiency <= 1 for row in rows) else 2.0
    charts = {f"Efficiency, {mode} scaling": efficiencies, "Exposed communication": exposed}
    return charts_svg(charts, caption, axis="processes", top=top)


def default_cores(processes: Sequence[int]) -> int | None:
    """Cores of each process, so that the largest number of processes has its own."""
    return max(1, len(available_cores()) // max(processes)) if CAN_PIN else None
