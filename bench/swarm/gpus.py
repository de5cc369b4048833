"""The GPUs of this machine through NVML: power, energy, clocks, memory and PCIe traffic; empty where there are none."""

from __future__ import annotations

import contextlib
from typing import Any

# nvml.h: reasons for which a GPU runs slower than it could.
_POWER_CAP = 0x4
_SLOWDOWN = 0x8 | 0x20 | 0x40 | 0x80
"""Hardware slowdown, software and hardware thermal limit, power brake."""


class Gpus:
    """Reads all GPUs of the machine. What a GPU does not tell is absent, never 0."""

    def __init__(self) -> None:
        self._handles: list[Any] = []
        try:
            import pynvml
        except ImportError:
            return
        try:
            pynvml.nvmlInit()
            self._handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        except pynvml.NVMLError:
            return
        self._nvml = pynvml

    def __len__(self) -> int:
        return len(self._handles)

    def facts(self) -> list[dict[str, Any]]:
        """What does not change: name, memory, power limits, link."""
        n = self._n
        return [
            _known(
                name=n("nvmlDeviceGetName", h),
                memory_bytes=getattr(n("nvmlDeviceGetMemoryInfo", h), "total", None),
                power_limit_w=_scaled(n("nvmlDeviceGetEnforcedPowerLimit", h)),
                power_limit_default_w=_scaled(n("nvmlDeviceGetPowerManagementDefaultLimit", h)),
                pcie_gen=n("nvmlDeviceGetCurrPcieLinkGeneration", h),
                pcie_width=n("nvmlDeviceGetCurrPcieLinkWidth", h),
                pcie_gen_max=n("nvmlDeviceGetMaxPcieLinkGeneration", h),
                pcie_width_max=n("nvmlDeviceGetMaxPcieLinkWidth", h),
                driver=self._text(n("nvmlSystemGetDriverVersion")),
            )
            for h in self._handles
        ]

    def sample(self) -> dict[str, float]:
        """Sums over the GPUs (power, energy, memory, traffic), means (utilization, clock) and shares (throttled, power-capped)."""
        if not self._handles:
            return {}
        n = self._n
        rows = []
        for h in self._handles:
            utilization, reasons = n("nvmlDeviceGetUtilizationRates", h), n("nvmlDeviceGetCurrentClocksEventReasons", h)
            if reasons is None:
                reasons = n("nvmlDeviceGetCurrentClocksThrottleReasons", h)
            rows.append(
                _known(
                    gpu_power_w=_scaled(n("nvmlDeviceGetPowerUsage", h)),
                    gpu_energy_j=_scaled(n("nvmlDeviceGetTotalEnergyConsumption", h)),
                    gpu_memory_bytes=getattr(n("nvmlDeviceGetMemoryInfo", h), "used", None),
                    pcie_rx_bytes_s=_scaled(n("nvmlDeviceGetPcieThroughput", h, 1), 1024.0),
                    pcie_tx_bytes_s=_scaled(n("nvmlDeviceGetPcieThroughput", h, 0), 1024.0),
                    gpu_utilization=_scaled(getattr(utilization, "gpu", None), 0.01),
                    gpu_clock_mhz=n("nvmlDeviceGetClockInfo", h, 1),
                    gpu_throttled=None if reasons is None else float(bool(reasons & _SLOWDOWN)),
                    gpu_power_capped=None if reasons is None else float(bool(reasons & _POWER_CAP)),
                )
            )
        result: dict[str, float] = {}
        for key in rows[0]:
            values = [row[key] for row in rows if key in row]
            mean = key in ("gpu_utilization", "gpu_clock_mhz", "gpu_throttled", "gpu_power_capped")
            if len(values) == len(rows):
                result[key] = sum(values) / len(values) if mean else sum(values)
        return result

    def close(self) -> None:
        if self._handles:
            with contextlib.suppress(self._nvml.NVMLError):
                self._nvml.nvmlShutdown()

    def _n(self, name: str, *args: Any) -> Any:
        """One NVML call; None where this GPU, driver or binding lacks it."""
        function = getattr(self._nvml, name, None)
        try:
            return None if function is None else function(*args)
        except self._nvml.NVMLError:
            return None

    @staticmethod
    def _text(value: Any) -> str | None:
        return value.decode() if isinstance(value, bytes) else value


def _scaled(value: float | None, factor: float = 1e-3) -> float | None:
    """NVML gives mW, mJ and KB/s."""
    return None if value is None else value * factor


def _known(**values: Any) -> dict[str, Any]:
    return {key: value.decode() if isinstance(value, bytes) else value for key, value in values.items() if value is not None}
