"""What a run takes on a device: tokens/s, hours, energy and cost, each with what is known of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from longspan.config import Run
from longspan.hardware import Device
from longspan.planning.rates import Band, band_of
from longspan.planning.run_time import RunTime, predict
from longspan.wording import counted

SMALL = 0.005
"""The share of a step below which a part is not printed."""


@dataclass(frozen=True)
class Forecast:
    """A prediction for a number of tokens."""

    time: RunTime
    band: Band | None
    """How far predictions for such devices were from measurements; None if nobody has measured."""
    tokens: int

    @property
    def hours(self) -> float:
        return self.tokens / self.time.tokens_per_s / 3600

    @property
    def gpu_hours(self) -> float:
        return self.hours * self.time.gpus

    @property
    def kwh(self) -> float | None:
        """Of the GPUs alone, at their power limit; None if that is unknown."""
        watts = self.time.device.watts
        return self.gpu_hours * watts / 1000 if watts else None

    @property
    def usd(self) -> float | None:
        """At the price of the table; None if there is none."""
        price = self.time.device.usd_per_h
        return None if price is None else self.gpu_hours * price

    def as_dict(self) -> dict[str, Any]:
        band, device = self.band, self.time.device
        error = None if band is None else {"median": band.median, "p90": band.p90, "of": band.of}
        return {
            **self.time.as_dict(),
            "error": error,
            "tokens": self.tokens,
            "hours": self.hours,
            "gpu_hours": self.gpu_hours,
            "kwh": self.kwh,
            "usd": self.usd,
            "usd_per_h": device.usd_per_h,
            "priced": device.priced or None,
        }

    def __str__(self) -> str:
        time, device = self.time, self.time.device
        parts = sorted(time.parts.items(), key=lambda part: -part[1])
        shares = [f"{name} {s / time.step_s:.0%}" for name, s in parts if s > SMALL * time.step_s]
        power = (
            "" if self.kwh is None else f", {self.kwh:,.3g} kWh at {device.watts:,.0f} W per GPU"
        )
        price = ", no price known"
        if self.usd is not None:
            price = f", {self.usd:,.2f} USD at {device.usd_per_h:,.2f} per GPU and hour"
            price += f" ({device.priced})" if device.priced else ""
        return "\n".join(
            [
                f"predicted time on {time.gpus:,} × {device.title}:",
                f"  {'tokens/s':<15}{time.tokens_per_s:,.0f}, {time.tokens_per_s / time.gpus:,.0f} "
                f"per device, MFU {time.mfu:.1%}, {time.step_s:,.3g} s per step",
                f"  {'step':<15}{', '.join(shares)}",
                f"  {'the run':<15}{self.tokens:,} tokens in {self.hours:,.3g} h"
                f"{power if device.name != 'cpu' else ''}{price if device.name != 'cpu' else ''}",
                f"  {'error':<15}{self._error()}",
            ]
        )

    def _error(self) -> str:
        band = self.band
        if band is None:
            devices = counted(self.time.gpus, "device")
            return f"unknown: no run of Longspan was measured on {devices} like this"
        return f"9 of 10 within {band.p90:.0%}, median {band.median:.1%}: {band.of}"


def forecast(run: Run, gpus: int, device: Device, tokens: int | None = None) -> Forecast:
    """The forecast of `run`, or of so many of its tokens."""
    time = predict(run, gpus, device)
    total = run.train.steps * time.step_tokens if tokens is None else tokens
    return Forecast(time, band_of(device, gpus), total)
