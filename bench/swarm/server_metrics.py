"""vLLM's and sparsekv's own counters, read from the server's /metrics."""

from __future__ import annotations

import re

GAUGES = frozenset(
    {
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
        "vllm:kv_cache_usage_perc",
        "sparsekv_pool_tokens",
        "sparsekv_pool_cached_tokens",
    }
)
COUNTERS = frozenset(
    {
        "vllm:prompt_tokens_total",
        "vllm:prompt_tokens_by_source_total",
        "vllm:generation_tokens_total",
        "vllm:prefix_cache_queries_total",
        "vllm:prefix_cache_hits_total",
        "vllm:external_prefix_cache_queries_total",
        "vllm:external_prefix_cache_hits_total",
        "vllm:num_preemptions_total",
        "vllm:spec_decode_num_drafts_total",
        "vllm:spec_decode_num_draft_tokens_total",
        "vllm:spec_decode_num_accepted_tokens_total",
        "sparsekv_decode_selected_tokens_total",
        "sparsekv_decode_context_tokens_total",
        "sparsekv_decode_selections_total",
        "sparsekv_decode_selected_mass_total",
        "sparsekv_decode_requests_total",
        "sparsekv_host_read_bytes_total",
        "sparsekv_hot_rows_total",
    }
)
_KEPT_LABELS = frozenset({"source", "path", "result", "state"})
"""Told apart; series that differ in other labels (engine, model) are summed."""
_LINE = re.compile(r"([a-zA-Z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)(?:\s+-?\d+)?$")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


def parse(text: str) -> dict[str, float]:
    """`name` or `name{label=value}` -> value, of the series above. Everything else, the histograms above all, costs one look."""
    values: dict[str, float] = {}
    for line in text.splitlines():
        if not line.startswith(("vllm:", "sparsekv_")):
            continue
        name = line.partition(" ")[0].partition("{")[0]
        if name not in COUNTERS and name not in GAUGES:
            continue
        match = _LINE.match(line)
        if match is None:
            continue
        labels = [f"{key}={value}" for key, value in _LABEL.findall(match[2] or "") if key in _KEPT_LABELS]
        key = f"{name}{{{','.join(labels)}}}" if labels else name
        try:
            values[key] = values.get(key, 0.0) + float(match[3])
        except ValueError:
            continue
    return values
