"""What the engine counts, and its way to vLLM's /metrics under the prefix `sparsekv_`.

Workers count with tensor operations into one small tensor, so that a replayed CUDA graph counts too. Each step the
connector (`connector.py`) takes the difference, vLLM sums it over the ranks, carries it to the API server with its own
statistics, and hands it to `SparseKVPromMetrics` there.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from prometheus_client import Counter, Gauge
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats


@dataclass(frozen=True)
class Metric:
    """One exported series: its Prometheus name and help, and the label it carries, if any."""

    name: str
    help: str
    label: tuple[str, str] | None = None


COUNTERS = {
    "selected_tokens": Metric(
        "sparsekv_decode_selected_tokens_total", "Rows attended to by sparse decode steps, summed over layers and KV heads"
    ),
    "context_tokens": Metric(
        "sparsekv_decode_context_tokens_total", "Rows the same steps chose from: context length, summed over layers and KV heads"
    ),
    "selections": Metric("sparsekv_decode_selections_total", "Selections made: one per sparse request-step, layer and KV head"),
    "selected_mass": Metric(
        "sparsekv_decode_selected_mass_total",
        "Attention mass of the selections as the sketch estimates it; divided by the selections it is their mean",
    ),
    "sparse_bytes": Metric("sparsekv_host_read_bytes_total", "Bytes of rows read from the host pool", ("path", "sparse")),
    "dense_bytes": Metric("sparsekv_host_read_bytes_total", "Bytes of rows read from the host pool", ("path", "dense")),
    "sparse_requests": Metric("sparsekv_decode_requests_total", "Request-steps decoded, by how they were attended", ("path", "sparse")),
    "dense_requests": Metric("sparsekv_decode_requests_total", "Request-steps decoded, by how they were attended", ("path", "dense")),
    "hot_hits": Metric("sparsekv_hot_rows_total", "Selected rows looked up in the hot set", ("result", "hit")),
    "hot_misses": Metric("sparsekv_hot_rows_total", "Selected rows looked up in the hot set", ("result", "miss")),
}
"""Order is the order in the counting tensor. All sums run over the tensor-parallel ranks as well, `*_requests` apart."""

GAUGES = {
    "pool_used": Metric("sparsekv_pool_tokens", "Host pool in tokens: held by requests, or free to be given to them", ("state", "used")),
    "pool_free": Metric("sparsekv_pool_tokens", "Host pool in tokens: held by requests, or free to be given to them", ("state", "free")),
    "pool_cached": Metric("sparsekv_pool_cached_tokens", "Tokens of the host pool that a later request can hit, held or free"),
}

_INDEX = {key: index for index, key in enumerate(COUNTERS)}


class StepCounters:
    """Running totals of one worker process; `add` may be captured in a CUDA graph, `drain` must not."""

    def __init__(self, device: torch.device) -> None:
        self.totals = torch.zeros(len(COUNTERS), dtype=torch.float64, device=device)
        on_cuda = device.type == "cuda"
        self._copy = torch.zeros(len(COUNTERS), dtype=torch.float64, pin_memory=on_cuda)
        self._copied = torch.cuda.Event() if on_cuda else None
        self._reported = torch.zeros(len(COUNTERS), dtype=torch.float64)

    def add(self, key: str, amount: torch.Tensor | float) -> None:
        self.totals[_INDEX[key]] += amount

    def drain(self) -> dict[str, float]:
        """What was added since the last call. On CUDA the copy is not waited for: a step may be reported one step late."""
        if self._copied is None:
            self._copy.copy_(self.totals)
        elif not self._copied.query():
            return {}
        added = (self._copy - self._reported).tolist()
        self._reported.copy_(self._copy)
        if self._copied is not None:
            self._copy.copy_(self.totals, non_blocking=True)
            self._copied.record()
        return {key: value for key, value in zip(COUNTERS, added, strict=True) if value}


@functools.cache
def step_counters(device: torch.device) -> StepCounters:
    """The counters of this process."""
    return StepCounters(device)


class SparseKVStats(KVConnectorStats):
    """`data` maps keys of `COUNTERS` to what was added and keys of `GAUGES` to the value now."""

    def reset(self) -> None:
        self.data = {}

    def is_empty(self) -> bool:
        return not self.data

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        for key, value in other.data.items():
            self.data[key] = value if key in GAUGES else self.data.get(key, 0.0) + value
        return self

    def reduce(self) -> dict[str, int | float]:
        """The interval in vLLM's log line."""
        data = self.data
        line: dict[str, int | float] = {}
        if context := data.get("context_tokens"):
            line["Selected tokens (%)"] = round(100 * data.get("selected_tokens", 0.0) / context, 2)
        line["Sparse request-steps"] = int(data.get("sparse_requests", 0))
        line["Dense request-steps"] = int(data.get("dense_requests", 0))
        line["Host rows read (MB)"] = round((data.get("sparse_bytes", 0.0) + data.get("dense_bytes", 0.0)) / 1e6, 1)
        if looked_up := data.get("hot_hits", 0.0) + data.get("hot_misses", 0.0):
            line["Hot hits (%)"] = round(100 * data.get("hot_hits", 0.0) / looked_up, 1)
        if "pool_used" in data:
            line["Host pool used (tokens)"] = int(data["pool_used"])
        return line


class SparseKVPromMetrics(KVConnectorPromMetrics):
    """Registers the series in the API server and adds each step's statistics to them."""

    def __init__(self, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: dict[int, list[object]]) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        families: dict[str, Counter | Gauge] = {}
        self._series: dict[tuple[int, str], Any] = {}
        for key, metric in (COUNTERS | GAUGES).items():
            if metric.name not in families:
                labels = labelnames + ([metric.label[0]] if metric.label else [])
                if key in GAUGES:
                    families[metric.name] = self._gauge_cls(metric.name, metric.help, labels, multiprocess_mode="mostrecent")
                else:
                    families[metric.name] = self._counter_cls(metric.name, metric.help, labels)
            for engine, values in per_engine_labelvalues.items():
                labelled = values + ([metric.label[1]] if metric.label else [])
                self._series[engine, key] = families[metric.name].labels(*labelled)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for key, value in transfer_stats_data.items():
            series = self._series[engine_idx, key]
            series.set(value) if key in GAUGES else series.inc(value)
