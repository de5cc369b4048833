"""What the server did not have to compute again, and how full it is."""

from __future__ import annotations

from .data import Window
from .declare import Value, metric


@metric("Prefix hits", "%", "higher")
def prefix_hits(window: Window) -> Value:
    """Prompt tokens taken from the prefix cache / prompt tokens, by `cached_tokens` of the usage; without it by the server's counters
    vllm:prefix_cache_hits and vllm:external_prefix_cache_hits over vllm:prefix_cache_queries."""
    counted = [r for r in window.measured if r.input_tokens and r.cached_tokens is not None]
    if counted:
        return sum(r.cached_tokens or 0 for r in counted) / sum(r.input_tokens or 0 for r in counted)
    queries, hits = window.counter("vllm:prefix_cache_queries_total"), window.counter("vllm:prefix_cache_hits_total")
    if not queries or hits is None:
        return None
    return (hits + (window.counter("vllm:external_prefix_cache_hits_total") or 0.0)) / queries


@metric("Prefix hits possible", "%")
def prefix_hits_possible(window: Window) -> Value:
    """What a prefix cache without limits would hit: prompt tokens that the same agent had sent or received before / prompt tokens.
    Tokens that agents share (the opening of the system prompt) are left out, so a server may do slightly better."""
    counted = [r for r in window.measured if r.input_tokens]
    prompts = sum(r.input_tokens or 0 for r in counted)
    return sum(min(r.reusable_tokens, r.input_tokens or 0) for r in counted) / prompts if prompts else None


@metric("Prompt tokens loaded from another tier", "tok", "")
def tier_tokens(window: Window) -> Value:
    """Growth of vllm:prompt_tokens_by_source{source="external_kv_transfer"}: hits of the RAM tier that were not on the GPU."""
    return window.counter("vllm:prompt_tokens_by_source_total{source=external_kv_transfer}")


@metric("Preemptions", "", "lower", 0)
def preemptions(window: Window) -> Value:
    """Growth of vllm:num_preemptions: requests that lost their place and had to start again."""
    return window.counter("vllm:num_preemptions_total")


@metric("KV cache used", "%")
def kv_used(window: Window) -> Value:
    """vllm:kv_cache_usage_perc over the scrapes of the window."""
    return window.gauge("vllm:kv_cache_usage_perc")


@metric("Host pool used", "%")
def pool_used(window: Window) -> Value:
    """sparsekv_pool_tokens: used / (used + free) over the scrapes of the window."""
    used, free = window.gauge("sparsekv_pool_tokens{state=used}"), window.gauge("sparsekv_pool_tokens{state=free}")
    return [u / (u + f) for u, f in zip(used, free, strict=False) if u + f]


@metric("Acceptance length", "tok", "higher", 2)
def acceptance_length(window: Window) -> Value:
    """Tokens per decode step with speculation: 1 + accepted draft tokens / drafts, by vLLM's counters."""
    drafts, accepted = window.counter("vllm:spec_decode_num_drafts_total"), window.counter("vllm:spec_decode_num_accepted_tokens_total")
    return 1 + accepted / drafts if drafts and accepted is not None else None
