"""How long a collective takes: latency and bandwidth fitted to `longspan bench collectives`.

    seconds = alpha + bus bytes / bandwidth

The bus bytes of a collective are those that cross the busiest link, by the definition of NVIDIA's
nccl-tests: the bandwidth is then that of the link, whatever the collective and the number of ranks.
Imports no torch.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from longspan.errors import UserError

BUS_FACTORS: dict[str, Callable[[int], float]] = {
    "send_recv": lambda n: 1.0,
    "broadcast": lambda n: 1.0,
    "all_gather": lambda n: (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_to_all": lambda n: (n - 1) / n,
    "all_reduce": lambda n: 2 * (n - 1) / n,
}
"""Bus bytes per byte of a collective's size on n ranks. The size is that of the larger of a rank's
input and output: of `all_gather` the gathered tensor, of `reduce_scatter` the one before."""

GB = 1e9
REPETITIONS = 50
"""Of reweighting; it converges in about ten."""
HUBER = 1.345
"""Residuals beyond so many standard deviations count linearly, not squared."""


@dataclass(frozen=True)
class CollectiveFit:
    """The latency `alpha_s` in seconds and the bus bandwidth in bytes/s of one collective."""

    collective: str
    ranks: int
    alpha_s: float
    bandwidth: float
    error: float
    """Median of |fitted − measured| / measured: a model of two numbers cannot follow an algorithm
    that changes with the size."""

    def seconds(self, size: int) -> float:
        """The time of this collective of `size` bytes, on the ranks that were measured."""
        return self.alpha_s + BUS_FACTORS[self.collective](self.ranks) * size / self.bandwidth

    def as_dict(self) -> dict[str, Any]:
        return {
            "collective": self.collective,
            "ranks": self.ranks,
            "alpha_s": self.alpha_s,
            "bus_gb_s": self.bandwidth / GB,
            "error": self.error,
        }


@dataclass(frozen=True)
class Network:
    """What `longspan bench collectives --json FILE` found about the network between ranks."""

    machine: str
    backend: str
    ranks: int
    fits: Mapping[str, CollectiveFit]


def ring_bound_s(size: int, ranks: int, bandwidth: float) -> float:
    """The least time of a ring all-reduce, 2 (N−1) D / (N · B): every link is always busy."""
    return 2 * (ranks - 1) * size / (ranks * bandwidth)


def fit_collective(
    collective: str, ranks: int, sizes: Sequence[int], seconds: Sequence[float]
) -> CollectiveFit | None:
    """Fit latency and bandwidth to measured times; None if they do not determine both.

    Least squares of relative errors, since sizes span six orders of magnitude, with Huber's
    weights, so that a few disturbed measurements do not count as much.
    """
    factor = BUS_FACTORS[collective](ranks)
    points = [(factor * size, t) for size, t in zip(sizes, seconds, strict=True) if t > 0]
    if len({x for x, _ in points}) < 2:
        return None
    weights = [1.0] * len(points)
    alpha = beta = 0.0
    for _ in range(REPETITIONS):
        alpha, beta = _least_squares(points, weights)
        residuals = [(alpha + beta * x - t) / t for x, t in points]
        # Of a normal distribution the median of |x| is 0.6745 standard deviations.
        scale = max(statistics.median(map(abs, residuals)) / 0.6745, 1e-9)
        weights = [min(1.0, HUBER * scale / max(abs(r), 1e-12)) for r in residuals]
    if beta <= 0:  # all are so small that only the latency shows
        return None
    error = statistics.median(abs(alpha + beta * x - t) / t for x, t in points)
    return CollectiveFit(collective, ranks, alpha, 1 / beta, error)


def _least_squares(
    points: Sequence[tuple[float, float]], weights: Sequence[float]
) -> tuple[float, float]:
    """α and β that minimise Σ w ((α + β x − t) / t)²; no latency is negative."""
    w0 = w1 = w2 = v0 = v1 = 0.0
    for (x, t), weight in zip(points, weights, strict=True):
        w = weight / t**2
        w0, w1, w2 = w0 + w, w1 + w * x, w2 + w * x * x
        v0, v1 = v0 + w * t, v1 + w * x * t
    determinant = w0 * w2 - w1 * w1
    beta = (w0 * v1 - w1 * v0) / determinant
    alpha = (v0 - w1 * beta) / w0
    return (alpha, beta) if alpha >= 0 else (0.0, v1 / w2)


def read_network(file: Path) -> Network:
    """Read what `longspan bench collectives --json FILE` wrote; raises UserError if it is not."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"cannot read {file}: {error.strerror}") from error
    except ValueError as error:
        raise UserError(f"{file} is not JSON: {error}") from error

    def expected(what: str, got: object) -> UserError:
        return UserError(
            f"{file} is not a result of longspan bench collectives: expected {what}, got "
            f"{repr(got)[:80]}"
        )

    if not isinstance(content, dict):
        raise expected("an object", content)
    setting, fits = content.get("setting"), content.get("fits")
    if not isinstance(setting, dict) or not isinstance(setting.get("backend"), str):
        raise expected("setting.backend, a string", setting)
    ranks = setting.get("ranks")
    if not isinstance(ranks, int) or isinstance(ranks, bool) or ranks < 2:
        raise expected("setting.ranks of at least 2", ranks)
    if not isinstance(fits, list):
        raise expected("fits, a list", fits)
    found: dict[str, CollectiveFit] = {}
    for row in fits:
        if not isinstance(row, dict) or row.get("collective") not in BUS_FACTORS:
            raise expected(f"a fit of one of {', '.join(BUS_FACTORS)}", row)
        if row.get("ranks") != ranks or row["collective"] in found:
            raise expected(f"one fit of {row['collective']} on {ranks} ranks", row)
        alpha, rate, misfit = (_number(row.get(k)) for k in ("alpha_s", "bus_gb_s", "error"))
        if not (alpha >= 0 and rate > 0 and misfit >= 0):  # also of NaN
            raise expected("alpha_s and error of at least 0 and bus_gb_s above 0", row)
        name = row["collective"]
        found[name] = CollectiveFit(name, ranks, alpha, rate * GB, misfit)
    return Network(str(content.get("machine", "")), setting["backend"], ranks, found)


def _number(value: object) -> float:
    """A finite number; NaN for anything else."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and math.isfinite(value) else math.nan  # type: ignore[arg-type]
