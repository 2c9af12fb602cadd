"""Fits the constants of a model of time or memory to measurements, by relative errors.

All constants are positive, so their logarithms are fitted: Gauss-Newton steps with Levenberg and
Marquardt's damping. Measurements far off count little (Cauchy's loss): on a shared network some
runs stall for reasons that no model knows. A prior keeps constants that the data say nothing about
where they were. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Array = NDArray[np.float64]
Constants = TypeVar("Constants", bound="DataclassInstance")
MAX_STEPS, MAX_TRIES = 100, 12
DIFFERENCE = 1e-4
"""Of a logarithm, for derivatives."""
LONGEST = 0.5
"""Step of a logarithm: beyond it the model is not linear."""


def fit(
    predict: Callable[[Constants], Array],
    measured: Array,
    start: Constants,
    *,
    scale: float,
    spread: Mapping[str, float] | None = None,
) -> Constants:
    """Return constants for which `predict` gives about what was `measured`.

    `scale`: relative errors far above it count as outliers. `spread`: by what factor, as a
    logarithm, some constants usually differ from those of `start`; 1 for the others.
    """
    names = [field.name for field in fields(start)]
    prior = np.array([(spread or {}).get(name, 1.0) for name in names])
    center = np.log(np.array([getattr(start, name) for name in names]))

    def constants(logs: Array) -> Constants:
        return replace(start, **dict(zip(names, map(float, np.exp(logs)), strict=True)))

    def residuals(logs: Array) -> Array:
        return np.log(predict(constants(logs)) / measured)

    def cost(errors: Array, logs: Array) -> float:
        distance: Array = (logs - center) / prior
        return float(np.log1p((errors / scale) ** 2).sum() + (distance**2).sum())

    logs, damping = center, 1e-2
    errors = residuals(logs)
    best = cost(errors, logs)
    for _ in range(MAX_STEPS):
        steps = DIFFERENCE * np.eye(len(names))
        jacobian = np.stack([(residuals(logs + s) - errors) / DIFFERENCE for s in steps], axis=1)
        weights = 1 / (scale**2 + errors**2)
        curvature = jacobian.T @ (jacobian * weights[:, None]) + np.diag(1 / prior**2)
        gradient = jacobian.T @ (weights * errors) + (logs - center) / prior**2
        for _ in range(MAX_TRIES):
            damped = curvature + damping * np.diag(np.diag(curvature))
            step = np.clip(-np.linalg.solve(damped, gradient), -LONGEST, LONGEST)
            tried = residuals(logs + step)
            if (found := cost(tried, logs + step)) < best * (1 - 1e-9):
                logs, errors, best = logs + step, tried, found
                damping = max(damping / 3, 1e-7)
                break
            damping *= 3
        else:
            break
    return constants(logs)


def as_dict(constants: Any) -> dict[str, float]:
    """Constants to four digits."""
    return {f.name: float(f"{getattr(constants, f.name):.4g}") for f in fields(constants)}


def quantiles(errors: Sequence[float] | Array) -> dict[str, float]:
    """Median, mean and the error that nine of ten do not exceed."""
    values = np.asarray(errors)
    median, most = np.quantile(values, [0.5, 0.9])
    return {"median": float(median), "mean": float(values.mean()), "p90": float(most)}
