"""What the engine counts, and its way to vLLM's /metrics under the prefix `sparsekv_`.

Each step the connector (`connector.py`) takes what the workers counted, vLLM sums it over the ranks, carries it to the
API server with its own statistics, and hands it to `SparseKVPromMetrics` there.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from prometheus_client import Counter, Gauge
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from sparsekv.kernels.tally import FIELDS


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
    "query_tokens": Metric("sparsekv_prefix_query_tokens_total", "Tokens of requests that started or resumed: what could have been known"),
    "hit_pool": Metric("sparsekv_prefix_hit_tokens_total", "Tokens not computed again, by what it took to know them", ("source", "pool")),
    "hit_checkpoint": Metric(
        "sparsekv_prefix_hit_tokens_total", "Tokens not computed again, by what it took to know them", ("source", "checkpoint")
    ),
    "evicted_tokens": Metric("sparsekv_pool_evicted_tokens_total", "Tokens whose rows gave way to others"),
    "checkpoints_evicted": Metric("sparsekv_checkpoint_evictions_total", "Recurrent states that gave way to others or lost their rows"),
    "checkpoints_refused": Metric("sparsekv_checkpoint_refusals_total", "Recurrent states worth keeping that found no slot"),
    "checkpoint_store_bytes": Metric("sparsekv_checkpoint_bytes_total", "Recurrent states copied", ("copy", "store")),
    "checkpoint_load_bytes": Metric("sparsekv_checkpoint_bytes_total", "Recurrent states copied", ("copy", "load")),
    "checkpoint_store_seconds": Metric("sparsekv_checkpoint_seconds_total", "Time of these copies", ("copy", "store")),
    "checkpoint_load_seconds": Metric("sparsekv_checkpoint_seconds_total", "Time of these copies", ("copy", "load")),
}
"""All but `*_requests` are summed over the tensor-parallel ranks as well."""

GAUGES = {
    "pool_used": Metric("sparsekv_pool_tokens", "Host pool in tokens: held by requests, or free to be given to them", ("state", "used")),
    "pool_free": Metric("sparsekv_pool_tokens", "Host pool in tokens: held by requests, or free to be given to them", ("state", "free")),
    "pool_cached": Metric("sparsekv_pool_cached_tokens", "Tokens of the host pool that a later request can hit, held or free"),
    "pool_eviction_age": Metric("sparsekv_pool_eviction_age_seconds", "Time from the last use of the rows evicted last to their eviction"),
    "checkpoints_used": Metric("sparsekv_checkpoints", "Slots for recurrent states: holding one, or free", ("state", "used")),
    "checkpoints_free": Metric("sparsekv_checkpoints", "Slots for recurrent states: holding one, or free", ("state", "free")),
    "checkpoints_oldest": Metric("sparsekv_checkpoint_oldest_seconds", "Age of the oldest recurrent state kept"),
}


class StepCounters:
    """Running totals of one worker process.

    Sparse decode counts on the device through `tally` and the hot set's own counters, also inside a captured graph.
    Dense attention is never captured; it counts on the host with `add`.
    """

    def __init__(self, device: torch.device) -> None:
        self.decode = torch.zeros(2, len(FIELDS), dtype=torch.float64, device=device)
        """Row 0 is for the one layer whose requests are counted, row 1 for all others: a request is one request in every layer."""
        self.hot: torch.Tensor | None = None
        """`HotSet.counters` where there is a hot set."""
        self.row_bytes = 0
        self._added: dict[str, float] = {}
        self._reported = [0.0] * (2 * len(FIELDS) + 3)
        self._copy: torch.Tensor | None = None
        self._copied: torch.cuda.Event | None = None

    def add(self, key: str, amount: float) -> None:
        self._added[key] = self._added.get(key, 0.0) + amount

    def drain(self) -> dict[str, float]:
        """What was added since the last call, by key of `COUNTERS`. A GPU is not waited for: it reports a step late."""
        added, self._added = self._added, {}
        now = self._snapshot()
        if now is not None:
            step = [a - b for a, b in zip(now, self._reported, strict=True)]
            self._reported = now
            first, others = step[: len(FIELDS)], step[len(FIELDS) : 2 * len(FIELDS)]
            for field, a, b in zip(FIELDS, first, others, strict=True):
                added[field] = added.get(field, 0.0) + (a if field.endswith("_requests") else a + b)
            added["hot_hits"], added["hot_misses"], _ = step[2 * len(FIELDS) :]
            read = added["selected_tokens"] if self.hot is None else added["hot_misses"]
            added["sparse_bytes"] = read * self.row_bytes
        return {key: value for key, value in added.items() if value}

    def _snapshot(self) -> list[float] | None:
        """The device's totals: those of now on the CPU, else those of the last call, or None while their copy is under way."""
        hot = torch.zeros(3) if self.hot is None else self.hot
        totals = torch.cat([self.decode.flatten(), hot.to(self.decode)])
        if not totals.is_cuda:
            return totals.tolist()
        if self._copied is None:
            self._copy, self._copied = torch.zeros(totals.shape, dtype=totals.dtype, pin_memory=True), torch.cuda.Event()
        elif not self._copied.query():
            return None
        assert self._copy is not None
        before = self._copy.tolist()
        self._copy.copy_(totals, non_blocking=True)
        self._copied.record()
        return before


def step_counters(device: torch.device) -> StepCounters:
    """The counters of this process; a worker has one device, however it is written (`cuda`, `cuda:0`)."""
    return _step_counters(device.type)


@functools.cache
def _step_counters(device_type: str) -> StepCounters:
    return StepCounters(torch.device(device_type))


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
        if query := data.get("query_tokens", 0.0):
            line["Prefix hits (%)"] = round(100 * (data.get("hit_pool", 0.0) + data.get("hit_checkpoint", 0.0)) / query, 1)
        if "pool_used" in data:
            line["Host pool used (tokens)"] = int(data["pool_used"])
        if data.get("checkpoints_used"):
            line["Checkpoints"] = int(data["checkpoints_used"])
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
