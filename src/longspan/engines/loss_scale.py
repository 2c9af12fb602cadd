"""fp16 loss scaling by the rule of torch's GradScaler.

GradScaler itself unscales a list of gradients in one call, which fails where tensor parallelism
mixes DTensors with plain tensors. Here `clip_grad_norm` unscales, and a step overflows if the
gradient norm is not finite: it is reduced over all ranks, so all of them decide the same.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class LossScale:
    """The scale: doubled after 2,000 steps without an overflow, halved after one.

    Its state has GradScaler's names. The factor is always 1 if not `enabled`.
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
