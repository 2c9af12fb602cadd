"""`longspan bench planner`: the planner's model of time and memory against measured runs.

Its constants are fitted to one half of the runs, or to one file, and its errors are those of runs
that it has not seen.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from longspan.benchmarks.chart import charts_svg
from longspan.benchmarks.measure import open_console, unwritable, write_result
from longspan.errors import UserError
from longspan.hardware import Device
from longspan.planning.fitting import as_dict, fit, quantiles
from longspan.planning.measured_runs import MeasuredRuns, read_measured_runs
from longspan.planning.run_memory import MemoryConstants, run_memory
from longspan.planning.step_time import SPREAD, Array, Efficiencies, step_time

SCALE = 0.05
"""Relative errors far beyond it are those of disturbed runs."""
FEWEST = 20
"""Runs to fit to: about as many as there are constants."""


def bench_planner(
    fit_file: Path,
    test_file: Path | None,
    device: Device,
    json_file: Path | None,
    plot_file: Path | None,
) -> None:
    """Fit, print the errors and write the files."""
    if problem := unwritable([file for file in (plot_file,) if file is not None]):
        raise UserError(problem)
    console = open_console(json_file)
    runs = read_measured_runs(fit_file)
    if test_file is None:
        half = np.arange(len(runs)) % 2 == 0
        seen, unseen = runs.take(half), runs.take(~half)
        how = f"every other run of {fit_file.name} is fitted, and the rest predicted"
    else:
        seen, unseen = runs, read_measured_runs(test_file)
        how = f"{fit_file.name} is fitted, and {test_file.name} predicted"
    if len(seen) < FEWEST:
        raise UserError(f"{len(seen)} runs are too few to fit to: give at least {FEWEST}")
    found = predict_unseen(seen, unseen, device)
    console.print(f"{device.title}: {how}", markup=False)
    for line in summary(found):
        console.print(line, markup=False)
    if json_file is not None:
        setting = {"device": device.name, "fitted": len(seen), "predicted": len(unseen)}
        write_result(json_file, {"machine": device.title, "setting": setting, **found})
    if plot_file is not None:
        plot_file.write_text(plot(unseen, found, f"{device.title}; {how}"), encoding="utf-8")


def predict_unseen(seen: MeasuredRuns, unseen: MeasuredRuns, device: Device) -> dict[str, Any]:
    """Fit to the runs of `seen`; return the constants, and the predictions and errors of `unseen`.

    An error is |predicted − measured| / measured.
    """
    rates = fit(
        lambda constants: step_time(seen.work, device, constants).total,
        seen.seconds,
        Efficiencies(),
        scale=SCALE,
        spread=SPREAD,
    )
    seconds = step_time(unseen.work, device, rates).total
    columns: dict[str, Array] = {
        "line": unseen.lines,
        "gpus": unseen.gpus,
        "measured_s": unseen.seconds,
        "predicted_s": seconds,
        "time_error": np.abs(seconds / unseen.seconds - 1),
        "measured_tokens_per_s": unseen.tokens_per_s,
        "predicted_tokens_per_s": unseen.work.step_tokens / seconds / unseen.gpus,
        "tokens_per_s_error": np.abs(unseen.seconds / seconds - 1),
    }
    constants = {"time": as_dict(rates)}
    if seen.memory is not None and unseen.memory is not None:
        fitted = fit(
            lambda c: run_memory(seen.work, c), seen.memory, MemoryConstants(), scale=SCALE
        )
        memory = run_memory(unseen.work, fitted)
        constants["memory"] = as_dict(fitted)
        columns["measured_gb"], columns["predicted_gb"] = unseen.memory / 1e9, memory / 1e9
        columns["memory_error"] = np.abs(memory / unseen.memory - 1)
    errors = {name: quantiles(values) for name, values in columns.items() if "_error" in name}
    rows = [
        {name: _rounded(values[index]) for name, values in columns.items()}
        for index in range(len(unseen))
    ]
    return {"errors": errors, "constants": constants, "rows": rows}


def _rounded(value: float) -> float | int:
    return int(value) if float(value).is_integer() else float(f"{value:.6g}")


def summary(found: dict[str, Any]) -> Sequence[str]:
    """The errors as a table, and the constants."""
    lines = [f"{len(found['rows']):,} runs  {'median':>8}{'mean':>8}{'9 of 10':>9}"]
    titles = {
        "tokens_per_s_error": "tokens/s",
        "time_error": "time",
        "memory_error": "memory",
    }
    for name, title in titles.items():
        if (row := found["errors"].get(name)) is not None:
            figures = f"{row['median']:>8.1%}{row['mean']:>8.1%}{row['p90']:>9.1%}"
            lines.append(f"{title:<{len(lines[0]) - 25}}{figures}")
    for kind, constants in found["constants"].items():
        text = ", ".join(f"{name} {value:g}" for name, value in constants.items())
        lines.append(f"constants of {kind}: {text}")
    return lines


def plot(unseen: MeasuredRuns, found: dict[str, Any], caption: str) -> str:
    """Predicted / measured by the number of GPUs: median, and the range of eight in ten."""
    charts = {"predicted / measured tokens/s": _ratios(unseen.gpus, found, "tokens_per_s")}
    if unseen.memory is not None:
        charts["predicted / measured memory"] = _ratios(unseen.gpus, found, "gb")
    return charts_svg(charts, caption, axis="GPUs", top=2.0)


def _ratios(gpus: Array, found: dict[str, Any], name: str) -> dict[str, list[tuple[float, float]]]:
    rows = found["rows"]
    ratios = np.array([row[f"predicted_{name}"] / row[f"measured_{name}"] for row in rows])
    lines: dict[str, list[tuple[float, float]]] = {"median": [], "10%": [], "90%": []}
    for count in np.unique(gpus):
        chosen: NDArray[np.bool_] = gpus == count
        for line, quantile in zip(lines.values(), (0.5, 0.1, 0.9), strict=True):
            line.append((float(count), min(2.0, float(np.quantile(ratios[chosen], quantile)))))
    return lines
