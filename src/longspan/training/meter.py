"""Speed and memory of a run, from step to step."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from longspan.config import Run
from longspan.device import peak_memory
from longspan.hardware import peak_flops
from longspan.models import flops_per_sample
from longspan.training.state import State


class Meter:
    """Collects losses and time between two lines of metrics."""

    def __init__(self, run: Run, device: torch.device, step: int, world: int = 1) -> None:
        self._run, self._device = run, device
        self._flops = sum(flops_per_sample(run))
        self._peak = None  # of 16-bit products, so it says nothing of a float32 run
        if device.type == "cuda" and run.train.precision != "fp32":
            one = peak_flops(torch.cuda.get_device_name(device))
            self._peak = one * world if one else None
        self._step = step
        self._losses: list[Tensor] = []
        self._mark = time.perf_counter()
        self._rates: list[float] = []
        self.last_loss: float | None = None

    def add(self, loss: Tensor) -> None:
        self._losses.append(loss)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Time in here is not the training's."""
        start = time.perf_counter()
        yield
        self._mark += time.perf_counter() - start

    def line(self, state: State, grad_norm: Tensor) -> dict[str, Any]:
        """A line of metrics over the steps since the last one; `loss` is their mean."""
        losses = torch.stack(self._losses)  # of steps that were not taken, some are no numbers
        mean = losses.where(losses.isfinite(), torch.nan).nanmean().item()  # waits for the device
        self.last_loss = None if math.isnan(mean) else mean
        now = time.perf_counter()
        samples = len(self._losses) * self._run.train.global_batch
        samples_per_s = samples / (now - self._mark)
        self._mark, self._losses, self._step = now, [], state.step
        rate = samples_per_s * self._run.data.context
        self._rates.append(rate)
        return {
            "step": state.step,
            "tokens": state.samples * self._run.data.context,
            "loss": self.last_loss,
            "lr": float(state.engine.optimizer.param_groups[0]["lr"]),
            "grad_norm": norm if math.isfinite(norm := grad_norm.item()) else None,
            "skipped_steps": int(state.guard.skipped),
            "tokens_per_s": rate,
            "mfu": self._flops * samples_per_s / self._peak if self._peak else None,
            "memory_bytes": peak_memory(self._device),
        }

    @property
    def median_rate(self) -> float | None:
        """Tokens per second: the median of the lines, so that a slow first one hardly counts."""
        return statistics.median(self._rates) if self._rates else None

    @property
    def seconds_left(self) -> float:
        train = self._run.train
        left = (train.steps - self._step) * train.global_batch * self._run.data.context
        return left / self._rates[-1]
