"""Throughput, MFU and memory of a run from step to step."""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from longspan.attention import Pattern
from longspan.config import Run
from longspan.flops import flops_per_sample
from longspan.hardware import known_device
from longspan.parallel.norms_by_layer import NormsByLayer
from longspan.training.out_of_memory import optimizer_bytes, parameter_bytes
from longspan.training.rank_stats import RankStats
from longspan.training.state import TrainState

RATES = 1000
"""Lines over which the median throughput is taken, the last ones."""


SamplesBySource = Callable[[int], dict[str, int]]
"""How many of the first samples of a run are from each source of its mixture, if it has one."""


class Meter:
    """Collects losses and time between two lines of metrics.

    `context`: tokens per sample, None if a sample has none; `flops`: of a step; `peak_flops`: per
    second of all devices, None if unknown.
    """

    def __init__(
        self,
        *,
        context: int | None,
        global_batch: int,
        steps: int,
        flops: float,
        peak_flops: float | None,
        device: torch.device,
        step: int,
        samples_by_source: SamplesBySource = lambda samples: {},
    ) -> None:
        self._unit = "samples" if context is None else "tokens"
        self._context, self._global_batch, self._steps = context or 1, global_batch, steps
        self._flops, self._peak_flops, self._device, self._step = flops, peak_flops, device, step
        self._samples_by_source = samples_by_source
        self._losses: list[Tensor] = []
        self._grad_norm = torch.tensor(math.nan)
        self._line: dict[str, Any] = {}
        self._mark = self._added = time.perf_counter()
        self._rates: deque[float] = deque(maxlen=RATES)
        self._save_s = 0.0
        self._held: dict[str, int] = {}
        self.last_loss: float | None = None

    def add(self, loss: Tensor, grad_norm: Tensor) -> None:
        self._losses.append(loss)
        self._grad_norm, self._added = grad_norm, time.perf_counter()

    def state(self) -> dict[str, Any]:
        """What the next line depends on, as JSON values."""
        losses, grad_norm = [float(loss) for loss in self._losses], float(self._grad_norm)
        seconds = self._added - self._mark
        return {
            "losses": losses,
            "grad_norm": grad_norm,
            "seconds": seconds,
            "save_s": self._save_s,
            "line": self._line,
        }

    def load(self, state: dict[str, Any]) -> None:
        """Continue from the `state` of another meter of the run."""
        self._losses = [torch.tensor(loss, device=self._device) for loss in state["losses"]]
        self._grad_norm, self._line = torch.tensor(state["grad_norm"]), state["line"]
        self._mark = time.perf_counter() - state["seconds"]
        self._save_s = state["save_s"]
        if self._line:
            self.last_loss = self._line["loss"]
            self._rates.append(self._line[f"{self._unit}_per_s"])

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Time in this context does not count as training."""
        start = time.perf_counter()
        yield
        self._mark += time.perf_counter() - start

    def saved(self, blocked_s: float) -> None:
        """Note that a save has blocked training for so long."""
        self._save_s += blocked_s

    def line(
        self,
        state: TrainState,
        stats: RankStats,
        waited_s: float,
        norms: NormsByLayer | None = None,
    ) -> dict[str, Any]:
        """A line of metrics over the steps since the last one; `loss` is their mean.

        `waited_s`: how long this rank has waited for data since its start; `norms`: those of each
        layer are reported, too. If there were no steps, it is the last line. Every rank calls this.
        """
        mean = math.nan
        if self._losses:
            losses = torch.stack(self._losses)  # non-finite for some of the skipped steps
            losses = losses.where(losses.isfinite(), torch.nan)
            mean = losses.nanmean().item()  # syncs with the device
        now, steps = time.perf_counter(), len(self._losses)
        # Before anything changes: after a recovery some ranks may have done this, others not.
        gathered = stats.gather(steps, now - self._mark, waited_s, self._held_bytes(state))
        if norms is not None:
            gathered["grad_norms"] = norms.gradients(self._grad_norm)
            gathered["param_norms"] = norms.parameters(state.engine.model)
        if not steps:
            return self._line
        self.last_loss = None if math.isnan(mean) else mean
        samples_per_s = steps * self._global_batch / (now - self._mark)
        self._mark, self._losses, self._step = now, [], state.step
        rate = samples_per_s * self._context
        self._rates.append(rate)
        mfu = None
        if self._peak_flops is not None:
            mfu = self._flops * samples_per_s / self._global_batch / self._peak_flops
        mixed = self._samples_by_source(state.samples)
        self._line = {
            "step": state.step,
            self._unit: state.samples * self._context,
            **({"samples_by_source": mixed} if mixed else {}),
            "loss": self.last_loss,
            "lr": float(state.engine.optimizer.param_groups[0]["lr"]),
            "grad_norm": norm if math.isfinite(norm := self._grad_norm.item()) else None,
            "skipped_steps": int(state.guard.skipped),
            f"{self._unit}_per_s": rate,
            "mfu": mfu,
            "save_s": self._save_s,
            "time": time.time(),
            **gathered,
        }
        self._save_s = 0.0
        return self._line

    def _held_bytes(self, state: TrainState) -> dict[str, int]:
        """Bytes of parameters and optimizer state, which stay as they are after the first step."""
        if not self._held.get("memory_optimizer_bytes"):
            self._held = {
                "memory_parameters_bytes": parameter_bytes(state),
                "memory_optimizer_bytes": optimizer_bytes(state),
            }
        return self._held

    @property
    def median_rate(self) -> float | None:
        """Tokens or samples per second: the median over lines, as the first may be slow."""
        return statistics.median(self._rates) if self._rates else None

    @property
    def peak_bytes(self) -> float | None:
        """Peak memory of the fullest rank, up to the last line."""
        return self._line.get("memory_bytes_max") or self._line.get("memory_bytes")

    @property
    def seconds_left(self) -> float:
        tokens = (self._steps - self._step) * self._global_batch * self._context
        return tokens / self._rates[-1]


def meter_of(
    run: Run,
    samples: Sequence[Sequence[Pattern]],
    device: torch.device,
    step: int,
    world: int,
    samples_by_source: SamplesBySource = lambda samples: {},
) -> Meter:
    """A meter for `run` on `world` devices, which has done `step` steps.

    FLOPs are the mean over `samples`, each with the patterns of all layers: those of some samples,
    where documents make them differ.

    The known peaks are those of 16-bit matrix products, so a float32 run has no MFU.
    """
    train, context = run.train, run.data.context
    flops = statistics.fmean(
        sum(flops_per_sample(run.model, patterns, context, train.freeze)) for patterns in samples
    )
    peak = None
    if device.type == "cuda" and train.precision != "fp32":
        known = known_device(train.gpu, torch.cuda.get_device_name(device))
        peak = known.half_flops if known else None
    return Meter(
        context=context,
        global_batch=train.global_batch,
        steps=train.steps,
        flops=flops * train.global_batch,
        peak_flops=peak * world if peak else None,
        device=device,
        step=step,
        samples_by_source=samples_by_source,
    )
