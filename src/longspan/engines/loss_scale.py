"""fp16 loss scaling: torch's GradScaler, and the same scale for an engine that unscales itself."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

from longspan.parallel.mesh import ParallelMesh


def grad_scaler(mesh: ParallelMesh, device: torch.device, *, enabled: bool) -> torch.amp.GradScaler:
    """A gradient scaler with which all ranks skip a step that overflows on any."""
    if mesh.device_mesh is None:
        return torch.amp.GradScaler(device.type, enabled=enabled)
    return ShardedGradScaler(device.type, enabled=enabled, process_group=dist.group.WORLD)


@dataclass
class LossScale:
    """GradScaler's scale: doubled after 2,000 steps without an overflow, halved after one.

    Its state is GradScaler's, so that a run can resume under either. Always 1 if not `enabled`.
    """

    enabled: bool
    scale: float = 2.0**16
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    steps: int = 0
    """Steps since the last change."""

    @property
    def factor(self) -> float:
        return self.scale if self.enabled else 1.0

    def update(self, *, overflows: bool) -> None:
        self.steps = 0 if overflows else self.steps + 1
        if overflows:
            self.scale *= self.backoff_factor
        elif self.steps == self.growth_interval:
            self.scale, self.steps = self.scale * self.growth_factor, 0

    def state(self) -> dict[str, float]:
        """Under GradScaler's names; empty if not enabled."""
        if not self.enabled:
            return {}
        return {
            "scale": self.scale,
            "growth_factor": self.growth_factor,
            "backoff_factor": self.backoff_factor,
            "growth_interval": self.growth_interval,
            "_growth_tracker": self.steps,
        }

    def load(self, state: dict[str, float]) -> None:
        if state and self.enabled:
            self.scale = float(state["scale"])
            self.growth_factor = float(state["growth_factor"])
            self.backoff_factor = float(state["backoff_factor"])
            self.growth_interval = int(state["growth_interval"])
            self.steps = int(state["_growth_tracker"])
