"""`longspan bench tracking`: what metrics and sinks cost of training, as a ratio within one run.

Blocks of `track.log_every` steps take turns: one ends with a line of metrics that is gathered,
printed, appended to metrics.jsonl and given to every sink that is installed, the other does not.
Beside the time of both blocks stand the time that the line itself takes, for which training waits,
and the CPU time of the sinks' threads and processes, which run beside it.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import torch

from longspan.benchmarks.measure import Rows, machine, open_console, write_json
from longspan.device import choose_device, resolve
from longspan.engines import open_engine
from longspan.parallel.mesh import ParallelMesh
from longspan.parallel.world import World
from longspan.progress import measuring
from longspan.runfile import load_run
from longspan.tracking import MetricsFile, Reporter, open_sinks
from longspan.tracking.sinks import PACKAGES
from longspan.training.guard import Guard
from longspan.training.rank_stats import RankStats
from longspan.training.state import TrainState
from longspan.training.step import forward_context_of, train_step
from longspan.training.task import task_of_run

BLOCKS = 8
"""Of each kind."""
POLL_S = 0.05


def bench_tracking(builtin: str, overrides: Sequence[str], json_file: Path | None) -> None:
    """Train, print a table and write JSON."""
    console, where = open_console(json_file), machine(builtin)
    run = load_run(None, ["track.prompt=", *overrides], builtin=builtin)
    device = choose_device(run)
    run = resolve(run, device)
    names = [name for name in PACKAGES if find_spec(name) is not None]
    mesh, every = ParallelMesh(run.layout, World()), run.track.log_every
    task = task_of_run(run, mesh)
    torch.manual_seed(run.train.seed)
    context = forward_context_of(run.train)
    engine = open_engine(run, mesh, device, context, task.spec, task.make_optimizer)
    state = TrainState(engine, mesh, Guard(run.train.grad_norm_spike, device))
    stats, meter = RankStats(mesh, device), task.meter(device, 0, 1)
    plain, tracked, lines = [], [], []
    with tempfile.TemporaryDirectory(prefix="longspan-tracking-", dir=".") as folder:
        os.environ.setdefault("TRACKIO_DIR", str(Path(folder).resolve() / "trackio"))
        with (
            measuring(f"training {(2 * BLOCKS + 1) * every} steps with {', '.join(names)}"),
            task.open_data(mesh, device) as data,
            _threads_of_training(partial(train_step, state, data, run.train, device)) as threads,
            open_sinks(
                names, Path(folder), project="bench", name="", config=run.model_dump(), step=0
            ) as sinks,
            MetricsFile(Path(folder) / "metrics.jsonl", step=0, sinks=sinks) as metrics,
            Reporter(steps=run.train.steps, done=0, silent=True) as reporter,
        ):
            before = 0.0
            for block in range(2 * BLOCKS + 1):
                is_tracked = block % 2 == 0
                start = time.perf_counter()
                for _ in range(every):
                    loss, norm = train_step(state, data, run.train, device)
                    if is_tracked:
                        meter.add(loss, norm)
                float(loss)  # waits for the device in both
                begin = time.perf_counter()
                if is_tracked:
                    line = meter.line(state, stats, data.waited_s)
                    metrics.write(line)
                    reporter.metrics(line, meter.seconds_left)
                end = time.perf_counter()
                if block == 0:  # warms up, and opens the sinks
                    while sinks.pending:
                        time.sleep(POLL_S)
                    before = _cpu_seconds(threads)
                elif is_tracked:
                    tracked.append(end - start)
                    lines.append(end - begin)
                else:
                    plain.append(end - start)
            while sinks.pending:
                time.sleep(POLL_S)
            cpu = _cpu_seconds(threads) - before
    step = statistics.median(plain) / every
    row = {
        "step_s": step,
        "line_s": statistics.median(lines),
        "line_share": statistics.median(lines) / (every * step),
        "sinks_cpu_s_per_line": cpu / BLOCKS,
        "sinks_cpu_share": cpu / BLOCKS / (every * step),
        "tracked_to_plain": statistics.median(tracked) / statistics.median(plain),
    }
    console.print(f"{where}; sinks: {', '.join(names)}; a line every {every} steps")
    columns = {"step ms": 9, "a line ms": 9, "share": 8, "sinks' CPU ms a line": 9}
    columns |= {"share of a core": 8, "steps with / without": 8}
    Rows(console, columns).add(
        f"{1e3 * row['step_s']:.1f}",
        f"{1e3 * row['line_s']:.2f}",
        f"{row['line_share']:.3%}",
        f"{1e3 * row['sinks_cpu_s_per_line']:.1f}",
        f"{row['sinks_cpu_share']:.3%}",
        f"{row['tracked_to_plain']:.3f}",
    )
    write_json(json_file, where, {"overrides": list(overrides), "sinks": names}, [row])


@contextmanager
def _threads_of_training(step: Callable[[], object]) -> Iterator[set[str]]:
    """Yield the threads that are not the sinks': a step starts autograd's and the compiler's."""
    step()
    yield set(_threads())


def _threads() -> list[str]:
    """The threads of this process and its child processes, as folders of /proc; empty elsewhere."""
    pid = os.getpid()
    try:
        found = [f"/proc/{pid}/task/{thread}" for thread in os.listdir(f"/proc/{pid}/task")]
        for process in filter(str.isdecimal, os.listdir("/proc")):
            if _stat(f"/proc/{process}")[1:2] == [str(pid)]:
                found.append(f"/proc/{process}")
    except OSError:
        return []
    return found


def _cpu_seconds(without: set[str]) -> float:
    """CPU time of all threads and child processes except those."""
    ticks = sum(sum(map(int, _stat(path)[11:13])) for path in set(_threads()) - without)
    return ticks / os.sysconf("SC_CLK_TCK")


def _stat(path: str) -> list[str]:
    """The fields after the name: state, parent, …; user and system time are the 12th and 13th."""
    try:
        return Path(path, "stat").read_text().rpartition(")")[2].split()
    except OSError:  # it has ended
        return []
