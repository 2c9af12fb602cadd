"""The summary of a run that is printed once at its start."""

from __future__ import annotations

from torch import nn

from longspan.config import Run
from longspan.data import Source
from longspan.derived import derived_values
from longspan.models import count_parameters
from longspan.parallel.pipeline import PipelinedDecoder


def summary(run: Run, module: nn.Module, source: Source, world: int) -> dict[str, str]:
    """Model, data, derived values, pipeline, engine and device, as text."""
    train = run.train
    pipeline = {"pipeline": module.describe()} if isinstance(module, PipelinedDecoder) else {}
    engine = {} if run.engine.name == "native" else {"engine": run.engine.name}
    compiled = ", compiled" if train.compile else ""
    return {
        "model": f"{run.model.preset}, {count_parameters(run.model):,} parameters",
        "data": source.describe(),
        **derived_values(run, world),
        **pipeline,
        **engine,
        "device": f"{train.device}, {train.precision}{compiled}",
    }
