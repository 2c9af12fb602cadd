"""`longspan bench layouts`: the layout of `layout = "auto"` against others, tried by hand.

Each is `longspan train` on the same number of processes of this machine, one after the other.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from longspan.benchmarks.measure import WARM_UP, Rows, machine, open_console, write_result
from longspan.config import AXES, Run
from longspan.errors import UserError
from longspan.launching.local import run_processes
from longspan.planning.auto import this_device
from longspan.planning.search import candidate_of, layout_text
from longspan.progress import measuring
from longspan.runfile import dump_run, load_run
from longspan.tracking import read_metrics

TRIED = 10
"""Layouts besides the chosen one."""


def hand_tried(processes: int) -> list[dict[str, int]]:
    """Layouts that one would try: each axis alone, then two of them, ZeRO stages last."""
    rest = processes // 2
    halves = [("replicate", "shard"), ("shard", "tensor"), ("shard", "sequence")]
    halves += [("shard", "pipeline"), ("tensor", "pipeline"), ("sequence", "tensor")]
    found: list[dict[str, int]] = [{axis: processes} for axis in AXES]
    if processes % 2 == 0 and rest > 1:
        found += [{a: rest, b: 2} for a, b in halves]
    return [*found, *({"shard": processes, "zero": zero} for zero in (1, 2))]


def bench_layouts(
    file: Path | None,
    overrides: Sequence[str],
    processes: int,
    steps: int,
    json_file: Path | None,
    rounds: int = 2,
) -> None:
    """Train with each layout, print a table and write JSON.

    All are measured in each of `rounds`, and the fastest counts: other work on the machine slows
    down some of them.
    """
    if processes < 2 or steps < 1:
        raise UserError(
            f"--nproc must be at least 2 and --steps at least 1, got {processes}, {steps}"
        )
    console = open_console(json_file)
    chosen = load_run(file, [*overrides, "layout=auto"], world=processes)
    where = machine("cuda" if chosen.train.device == "cuda" else "cpu")
    how = f"medians of {steps} steps after {WARM_UP}, best of {rounds}"
    console.print(f"{where}; {processes} processes, {how}", markup=False)
    columns = {"tokens/s": 10, "of best": 8, "predicted": 10, "layout": -1}
    runs = {f'"auto": {layout_text(chosen, processes)}': chosen}
    for axes in hand_tried(processes):
        layout = chosen.layout.model_copy(update={**dict.fromkeys(AXES, 1), "zero": 3, **axes})
        run = chosen.model_copy(update={"layout": layout})
        text = dump_run(run)
        with tempfile.TemporaryDirectory() as folder:
            saved = Path(folder) / "run.toml"
            saved.write_text(text, encoding="utf-8")
            try:
                run = load_run(saved, world=processes)
            except UserError:
                continue
        name = layout_text(run, processes)
        if len(runs) <= TRIED and name != layout_text(chosen, processes):
            runs[name] = run
    rows = list[dict[str, Any]]()
    for _ in range(rounds):
        found = [_measured(name, run, processes, steps) for name, run in runs.items()]
        pairs = zip(rows or found, found, strict=True)
        rows = [max(pair, key=lambda row: row["tokens_per_s"]) for pair in pairs]
    best = max(row["tokens_per_s"] for row in rows)
    table = Rows(console, columns)
    for row in rows:
        row["of_best"] = row["tokens_per_s"] / best
        table.add(
            f"{row['tokens_per_s']:,.0f}", f"{row['of_best']:.1%}",
            f"{row['predicted_tokens_per_s']:,.0f}", row["layout"],
        )  # fmt: skip
    setting = {"processes": processes, "steps": steps, "overrides": list(overrides)}
    write_result(json_file, {"machine": where, "setting": setting, "rows": rows})


def _measured(name: str, run: Run, processes: int, steps: int) -> dict[str, Any]:
    options = [
        f"train.steps={WARM_UP + steps}", f"train.warmup_steps={WARM_UP + steps}",
        "train.eval_every=0", "train.eval_samples=1", "checkpoint.every=0", "track.log_every=1",
        "track.prompt=", "track.sinks=[]",
    ]  # fmt: skip
    predicted = candidate_of(run, processes, this_device(run, processes)).time.tokens_per_s
    with tempfile.TemporaryDirectory(prefix="longspan-layouts-") as folder, measuring(name):
        saved, run_dir = Path(folder) / "run.toml", Path(folder) / "run"
        saved.write_text(dump_run(run), encoding="utf-8")
        command = [sys.executable, "-m", "longspan", "train", str(saved), *options]
        command += ["--run-dir", str(run_dir)]
        code = run_processes(command, processes, run_dir / "logs", quiet=True)
        if code:
            raise SystemExit(code)
        lines = [x for x in read_metrics(run_dir / "metrics.jsonl") if "step_time_s" in x]
    seconds = [float(x["step_time_s"]) for x in lines if x["step"] > WARM_UP]
    rate = run.train.global_batch * run.data.context / statistics.median(seconds)
    return {"layout": name, "tokens_per_s": rate, "predicted_tokens_per_s": predicted}
