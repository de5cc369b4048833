"""Looks once a second at the server's counters, the GPUs, the host and this client itself."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import time
from collections.abc import Callable, Sequence
from typing import Any

import psutil

from . import server_metrics
from .client import Client
from .gpus import Gpus
from .sender import AgentView, Clock

INTERVAL = 1.0
PROBE = 0.01
"""How often the event loop's lag is measured."""

COLUMNS = (
    "t", "phase", "output_tokens", "decoding", "reading", "lag_mean_ms", "lag_p99_ms", "lag_max_ms", "client_cpu",
    "host_cpu", "host_memory_bytes", "swap_bytes", "gpu_power_w", "gpu_energy_j",
    "gpu_memory_bytes", "gpu_utilization", "gpu_clock_mhz", "gpu_throttled", "gpu_power_capped",
    "pcie_rx_bytes_s", "pcie_tx_bytes_s",
)  # fmt: skip
"""Of timeseries.csv. `output_tokens` counts up over the run; `lag` is how late this client's event loop woke up in the last second;
`client_cpu` is the share of one core that it used."""


class Sampler:
    """Runs beside the load until cancelled."""

    def __init__(
        self,
        client: Client,
        clock: Clock,
        views: Sequence[AgentView],
        phase: Callable[[], str],
        gpus: Gpus,
        on_sample: Callable[[dict[str, Any]], None],
        on_metrics: Callable[[float, dict[str, float]], None],
        *,
        metrics: bool,
        local: bool,
    ) -> None:
        self._client, self._clock, self._views, self._phase, self._gpus = client, clock, views, phase, gpus
        self._on_sample, self._on_metrics, self._metrics, self._local = on_sample, on_metrics, metrics, local
        self._lags: list[float] = []
        self.latest: dict[str, Any] = {}
        self.latest_metrics: dict[str, float] = {}
        self.previous_metrics: dict[str, float] = {}

    async def run(self) -> None:
        probe = asyncio.create_task(self._probe())
        tick = time.perf_counter()
        try:
            while True:
                await self.sample()
                tick = max(tick + INTERVAL, time.perf_counter())
                await asyncio.sleep(tick - time.perf_counter())
        finally:
            probe.cancel()
            await asyncio.gather(probe, return_exceptions=True)

    async def sample(self) -> None:
        """One row of the time series and, where the server has them, of its metrics."""
        lags, self._lags = sorted(self._lags), []
        row: dict[str, Any] = {
            "t": round(self._clock.now(), 3),
            "phase": self._phase(),
            "output_tokens": sum(view.tokens for view in self._views),
            "decoding": sum(view.state == "decoding" for view in self._views),
            "reading": sum(view.state == "reading" for view in self._views),
            "lag_mean_ms": round(sum(lags) / len(lags) * 1e3, 3) if lags else None,
            "lag_p99_ms": round(lags[int(len(lags) * 0.99)] * 1e3, 3) if lags else None,
            "lag_max_ms": round(lags[-1] * 1e3, 3) if lags else None,
            "client_cpu": self._client_cpu(),
        }
        if self._local:
            row |= {
                "host_cpu": psutil.cpu_percent() / 100,
                "host_memory_bytes": psutil.virtual_memory().used,
                "swap_bytes": psutil.swap_memory().used,
            }
            row |= await asyncio.to_thread(self._gpus.sample) if len(self._gpus) else {}
        self.latest = row
        self._on_sample(row)
        if self._metrics:
            await self._scrape()

    async def _scrape(self) -> None:
        moment = self._clock.now()
        status, text = await self._client.get("/metrics", seconds=5)
        if status == 200:
            self.previous_metrics, self.latest_metrics = self.latest_metrics, server_metrics.parse(text)
            self._on_metrics((moment + self._clock.now()) / 2, self.latest_metrics)

    async def _probe(self) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            while True:
                before = time.perf_counter()
                await asyncio.sleep(PROBE)
                self._lags.append(max(0.0, time.perf_counter() - before - PROBE))

    _cpu_before: tuple[float, float] | None = None

    def _client_cpu(self) -> float | None:
        """Share of one core that this process used since the last call."""
        usage = resource.getrusage(resource.RUSAGE_SELF)
        now = (time.perf_counter(), usage.ru_utime + usage.ru_stime)
        before, self._cpu_before = self._cpu_before, now
        return None if before is None else round((now[1] - before[1]) / (now[0] - before[0]), 4)
