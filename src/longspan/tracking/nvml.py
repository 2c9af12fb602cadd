"""Utilisation, temperature and power of a GPU by NVML, where nvidia-ml-py is installed."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

INTERVAL_S = 5.0
"""How often the sensors are read; a reading may take milliseconds."""
SENSORS = ("gpu_utilization", "gpu_temperature_c", "gpu_power_w")


class GpuSensors:
    """The sensors of one GPU. Without NVML, or on any error of it, there are no readings."""

    def __init__(self, uuid: str | None) -> None:
        self._nvml: Any = None
        self._values: dict[str, float] = {}
        self._read = -math.inf
        if uuid is None:
            return
        try:
            import pynvml

            pynvml.nvmlInit()
            name = uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"
            self._handle = pynvml.nvmlDeviceGetHandleByUUID(name)
            self._nvml = pynvml
        except Exception:  # noqa: BLE001  no package, no driver, no permission: no readings
            return

    def read(self) -> dict[str, float]:
        """Percent of time busy, degrees Celsius and watts; the last reading if it is recent."""
        if self._nvml is None or time.monotonic() - self._read < INTERVAL_S:
            return self._values
        nvml, self._read = self._nvml, time.monotonic()
        readings: dict[str, Callable[[], float]] = {
            "gpu_utilization": lambda: nvml.nvmlDeviceGetUtilizationRates(self._handle).gpu,
            "gpu_temperature_c": lambda: nvml.nvmlDeviceGetTemperature(
                self._handle, nvml.NVML_TEMPERATURE_GPU
            ),
            "gpu_power_w": lambda: nvml.nvmlDeviceGetPowerUsage(self._handle) / 1000,
        }
        for name, reading in readings.items():
            try:
                self._values[name] = float(reading())
            except Exception:  # noqa: BLE001  a sensor that this GPU does not have
                self._values.pop(name, None)
        return self._values
