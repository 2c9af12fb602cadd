"""The sections [checkpoint], [track] and [track.profile]: what a run writes."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from longspan.config.section import NonNegative, Positive, Section


class Checkpoint(Section):
    every: NonNegative = 500
    """Steps between checkpoints; the last step is always saved."""
    keep: Positive = 2
    """Number of newest checkpoints to keep."""
    keep_every: NonNegative = 0
    """Steps between checkpoints that are never deleted; 0 means none are exempt."""
    async_save: bool = True
    """Writes checkpoints in the background; training waits only while tensors are copied to CPU
    memory."""
    key_file: str = ""
    """Path of a file with a secret key of at least 32 bytes, which signs checkpoints (HMAC-SHA256);
    those that are not signed with it are refused."""


Sink = Literal["tensorboard", "wandb", "mlflow", "trackio"]


class Profile(Section):
    wait: NonNegative = 5
    """Steps after the start of the run, and between two cycles, that are not profiled."""
    warmup: NonNegative = 1
    """Steps before the profiled ones in which the profiler runs without a trace, since its start
    takes time."""
    active: NonNegative = 0
    """Number of steps to profile in a cycle; 0 turns profiling off."""
    repeat: Positive = 1
    """Number of cycles of `wait`, `warmup` and `active` steps."""

    @property
    def steps(self) -> int:
        """The steps that all cycles take."""
        return (self.wait + self.warmup + self.active) * self.repeat if self.active else 0


class Track(Section):
    log_every: Positive = 10
    """Steps between lines of metrics (loss, gradient norm, tokens per second, MFU, memory)."""
    prompt: str = "def "
    """Prompt for the sample generated at the end of a run; empty generates none."""
    sinks: Annotated[tuple[Sink, ...], Field(strict=False)] = ()
    """Where metrics go besides the console and metrics.jsonl: "tensorboard", "wandb", "mlflow" and
    "trackio", each of which must be installed."""
    project: Annotated[str, Field(min_length=1, max_length=128)] = "longspan"
    """Project of the run in wandb and trackio; its experiment in MLflow."""
    run_name: str = ""
    """Name of the run in wandb, trackio and MLflow; empty uses the name of the run folder."""
    per_layer_norms: bool = False
    """Log the norms of the gradients and of the parameters of each layer, too."""
    profile: Profile = Profile()
    """Which steps the profiler records, in the table [track.profile]."""
    memory_snapshot: bool = False
    """Records CUDA allocations. Snapshots for torch's memory viewer are written after
    the profiled steps, or at the end of a run without them, and when a step runs out of memory."""
