"""What NVML says of a GPU, where nvidia-ml-py is installed: utilisation, temperature, power."""

from __future__ import annotations

import math
import statistics
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

INTERVAL_S = 5.0
"""How often the sensors are read; a reading may take milliseconds."""
SENSORS = ("gpu_utilization", "gpu_temperature_c", "gpu_power_w")
SAMPLE_S = 0.05
"""How often `ClockSampler` reads."""


def open_nvml(uuid: str) -> tuple[Any, Any] | None:
    """NVML and its handle of a GPU; None without package, driver or permission."""
    try:
        import pynvml

        pynvml.nvmlInit()
        name = uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"
        return pynvml, pynvml.nvmlDeviceGetHandleByUUID(name)
    except Exception:  # noqa: BLE001  no package, no driver, no permission: nothing is known
        return None


def driver_version() -> tuple[str, str] | None:
    """The version of the driver, and of the newest CUDA that it supports; None without NVML."""
    try:
        import pynvml

        pynvml.nvmlInit()
        version, cuda = pynvml.nvmlSystemGetDriverVersion(), pynvml.nvmlSystemGetCudaDriverVersion()
        return str(version), f"{cuda // 1000}.{cuda % 1000 // 10}"
    except Exception:  # noqa: BLE001  as above
        return None


class GpuSensors:
    """The sensors of one GPU. Without NVML, or on any error of it, there are no readings."""

    def __init__(self, uuid: str | None) -> None:
        self._nvml: Any = None
        self._values: dict[str, float] = {}
        self._read = -math.inf
        if uuid is not None and (opened := open_nvml(uuid)):
            self._nvml, self._handle = opened

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


class Clocks(NamedTuple):
    """How fast a GPU ran, and whether its power limit slowed it."""

    mhz: float
    most_mhz: float
    watts: float
    limited: float
    """The fraction of the time in which the clock was below its maximum to keep the power limit."""


class ClockSampler:
    """Reads the SM clock and the power of a GPU in a thread of its own, until it is stopped."""

    def __init__(self, uuid: str) -> None:
        self._opened, self._stop = open_nvml(uuid), threading.Event()
        self._most = math.nan
        self._samples: list[tuple[float, float, float, bool]] = []
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()

    def since(self, start: float) -> Clocks | None:
        """Means over the samples from `time.monotonic()` = start on; None if there are none."""
        samples = [values for at, *values in self._samples if at >= start]
        if not samples:
            return None
        mhz, watts, limited = (statistics.mean(values) for values in zip(*samples, strict=True))
        return Clocks(mhz, self._most, watts, limited)

    def _run(self) -> None:
        if self._opened is None:
            return
        nvml, handle = self._opened
        while not self._stop.wait(SAMPLE_S):
            try:
                self._most = float(nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_SM))
                clock = nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)
                watts = nvml.nvmlDeviceGetPowerUsage(handle) / 1000
                reasons = nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)
                limited = bool(reasons & nvml.nvmlClocksThrottleReasonSwPowerCap)
            except Exception:  # noqa: BLE001  a sensor that this GPU does not have, or not now
                continue
            self._samples.append((time.monotonic(), clock, watts, limited))
