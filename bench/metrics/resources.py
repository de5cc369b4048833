"""What it costs: energy, traffic, memory, and the client's own part in it."""

from __future__ import annotations

from .data import Window
from .declare import Value, metric


@metric("GPU power", "W", "lower")
def gpu_power(window: Window) -> Value:
    """Sum over the GPUs, sampled once a second."""
    return window.sampled("gpu_power_w")


@metric("Energy per output token", "J/tok", "lower", 3)
def joules_per_token(window: Window) -> Value:
    """Growth of the GPUs' energy counters (NVML) / output tokens in the window."""
    joules, tokens = window.grown("gpu_energy_j"), window.output_tokens()
    return joules / tokens if joules is not None and tokens else None


@metric("Energy per output token above idle", "J/tok", "lower", 3)
def net_joules_per_token(window: Window) -> Value:
    """The same, less the power measured before the run began x the length of the window."""
    joules, tokens = window.grown("gpu_energy_j"), window.output_tokens()
    idle = window.run.info.get("idle_power_w")
    return (joules - idle * window.seconds) / tokens if joules is not None and tokens and idle is not None else None


@metric("PCIe to the GPUs", "B/s")
def pcie_rx(window: Window) -> Value:
    """Sum over the GPUs by NVML's counter of received bytes, sampled once a second over some milliseconds."""
    return window.sampled("pcie_rx_bytes_s")


@metric("GPU memory", "B")
def gpu_memory(window: Window) -> Value:
    """Sum over the GPUs."""
    return window.sampled("gpu_memory_bytes")


@metric("Host memory", "B")
def host_memory(window: Window) -> Value:
    """Used memory of the machine, if the server is on this one."""
    return window.sampled("host_memory_bytes")


@metric("Client lag", "s", "lower", 4)
def client_lag(window: Window) -> Value:
    """How late the client's event loop woke up: the 99th percentile of each second. Every latency here may be too long by this much."""
    return [value / 1e3 for value in window.sampled("lag_p99_ms")]


@metric("Client CPU", "%", "lower")
def client_cpu(window: Window) -> Value:
    """Share of one core that the client used, by second."""
    return window.sampled("client_cpu")
