"""Runs that others have measured, as CSV: shape, layout, and time or tokens/s and memory.

Imports no torch.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from longspan.errors import UserError
from longspan.files import read_bounded
from longspan.planning.step_time import Array, Workload

MAX_BYTES = 64 << 20
GPT_VOCAB = 51_200
"""Of Megatron's GPT, which a file without the column has."""
NEEDED = ("layers", "hidden", "heads", "seq_len", "gpus", "micro_batch", "dp", "tp", "pp")


@dataclass(frozen=True)
class MeasuredRuns:
    """Runs and what was measured of them."""

    work: Workload
    gpus: Array
    seconds: Array
    """Of a step."""
    memory: Array | None
    """Bytes on a GPU."""
    lines: Array
    """Of the file."""

    def __len__(self) -> int:
        return len(self.gpus)

    @property
    def tokens_per_s(self) -> Array:
        """Of one GPU."""
        return self.work.step_tokens / self.seconds / self.gpus

    def take(self, rows: NDArray[np.bool_]) -> MeasuredRuns:
        """Some of the runs."""
        return MeasuredRuns(
            self.work.take(rows),
            self.gpus[rows],
            self.seconds[rows],
            None if self.memory is None else self.memory[rows],
            self.lines[rows],
        )


def read_measured_runs(file: Path) -> MeasuredRuns:
    """Read a file with the columns of NEEDED, global_batch or grad_accum, and iteration_ms or
    tokens_per_s_per_gpu.

    memory_gb is optional. Without ffn the MLP has two matrices of 4 · hidden; without kv_heads,
    vocab or zero_stage the runs are of a GPT with as many key as query heads and no ZeRO.
    """
    try:
        text = read_bounded(file, MAX_BYTES).decode()
    except UnicodeDecodeError as error:
        raise UserError(f"{file} is not text: {error}") from error
    rows = list(csv.DictReader(text.splitlines()))
    if not rows:
        raise UserError(f"{file} has no runs: expected a line of column names, and a line per run")
    columns = _Columns(file, rows)
    one = np.ones(len(rows))
    hidden, heads = columns.of("hidden"), columns.of("heads")
    micro_batch, data = columns.of("micro_batch"), columns.of("dp")
    if "grad_accum" in columns:
        accumulation = columns.of("grad_accum")
    else:
        accumulation = columns.of("global_batch") / (micro_batch * data)
    work = Workload(
        layers=columns.of("layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=columns.of("kv_heads", heads),
        ffn=columns.of("ffn", 4 * hidden),
        is_gated=one if "ffn" in columns else 0 * one,
        vocab=columns.of("vocab", GPT_VOCAB * one),
        context=columns.of("seq_len"),
        micro_batch=micro_batch,
        accumulation=accumulation,
        data=data,
        tensor=columns.of("tp"),
        pipeline=columns.of("pp"),
        zero=columns.of("zero_stage", 0 * one, is_positive=False),
    )
    gpus = columns.of("gpus")
    if "iteration_ms" in columns:
        seconds = columns.of("iteration_ms") / 1e3
    else:
        seconds = work.step_tokens / (columns.of("tokens_per_s_per_gpu") * gpus)
    memory = 1e9 * columns.of("memory_gb") if "memory_gb" in columns else None
    return MeasuredRuns(work, gpus, seconds, memory, np.arange(2.0, len(rows) + 2))


class _Columns:
    """The columns of a file as numbers."""

    def __init__(self, file: Path, rows: Sequence[Mapping[str, str]]) -> None:
        self._file, self._rows = file, rows
        missing = [name for name in NEEDED if name not in self]
        for either in (("grad_accum", "global_batch"), ("iteration_ms", "tokens_per_s_per_gpu")):
            if not any(name in self for name in either):
                missing.append(" or ".join(either))
        if missing:
            raise UserError(f"{file} lacks the columns {', '.join(missing)}")

    def __contains__(self, name: str) -> bool:
        return name in self._rows[0]

    def of(self, name: str, default: Array | None = None, *, is_positive: bool = True) -> Array:
        if default is not None and name not in self:
            return default
        values = np.empty(len(self._rows))
        for index, row in enumerate(self._rows):
            text = row[name]
            try:
                values[index] = float(text)
            except (TypeError, ValueError):
                values[index] = np.nan
            is_right = values[index] > 0 if is_positive else values[index] >= 0
            if not is_right or values[index] > 1e15:
                what = "a positive number" if is_positive else "a number of at least 0"
                raise UserError(
                    f"{self._file}, line {index + 2}: {name} must be {what}, got {text!r}"
                )
        return values
