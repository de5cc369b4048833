"""How much comes out."""

from __future__ import annotations

from sparsekv.bench.swarm.records import RequestRecord

from .data import Window
from .declare import Value, metric


@metric("Output tokens per second, total", "tok/s", "higher")
def output_rate(window: Window) -> Value:
    """Output tokens whose event arrived in the window / length of the window. Tokens are the server's count; a request that failed
    contributes none."""
    return window.output_tokens() / window.seconds if window.active else None


@metric("Output tokens per second, per agent", "tok/s", "higher")
def agent_rate(window: Window) -> Value:
    """The same for each agent alone; the statistics are over the agents."""
    agents = range(window.run.agents)
    return [window.output_tokens(agent) / window.seconds for agent in agents] if window.active else None


@metric("Output tokens per second, per GPU", "tok/s", "higher")
def gpu_rate(window: Window) -> Value:
    """Total output rate / GPUs of the server."""
    gpus = window.run.info["server"].get("gpus")
    return window.output_tokens() / window.seconds / gpus if gpus and window.active else None


@metric("Prompt tokens per second", "tok/s", "higher")
def input_rate(window: Window) -> Value:
    """Prompt tokens of the requests whose first output arrived in the window, prefix hits included / length of the window."""
    done = _begun(window)
    return sum(r.input_tokens or 0 for r in done) / window.seconds if done else None


@metric("New prompt tokens per second", "tok/s", "higher")
def prefill_rate(window: Window) -> Value:
    """As above, less what the server took from its prefix cache, by `cached_tokens` of its usage or, without it, by its counters."""
    done = _begun(window)
    if done and all(r.cached_tokens is not None for r in done):
        return sum((r.input_tokens or 0) - (r.cached_tokens or 0) for r in done) / window.seconds
    computed = window.counter("vllm:prompt_tokens_by_source_total{source=local_compute}")
    return None if computed is None else computed / window.seconds


@metric("Turns per minute", "1/min", "higher")
def turns_per_minute(window: Window) -> Value:
    """Turns whose last answer ended in the window / length of the window."""
    ended = [records for records in window.turns() if window.start <= records[-1].end < window.end]
    return 60 * len(ended) / window.seconds if ended else None


@metric("Goodput", "1/s", "higher", 3)
def goodput(window: Window) -> Value:
    """Requests that ended in the window and meet every limit of the SLO (TTFT, TPOT) / length of the window, if an SLO was given."""
    ended = _ended(window)
    return None if ended is None else sum(ended) / window.seconds


@metric("Share of good requests", "%", "higher")
def good_share(window: Window) -> Value:
    """Requests that ended in the window and meet the SLO / all that ended in it, failed ones included."""
    ended = _ended(window)
    return sum(ended) / len(ended) if ended else None


def _begun(window: Window) -> list[RequestRecord]:
    """Requests whose first output arrived in the window."""
    return [r for r in window.measured if r.first is not None and window.start <= r.first < window.end and r.input_tokens is not None]


def _ended(window: Window) -> list[bool] | None:
    """Whether each request that ended in the window was good; None without an SLO."""
    slo = window.run.info["options"].get("slo") or {}
    if not any(slo.values()):
        return None
    return [_good(r, slo) for r in window.requests if r.status != "stopped" and window.start <= r.end < window.end]


def _good(record: RequestRecord, slo: dict[str, float | None]) -> bool:
    if not record.ok or record.first is None:
        return False
    ttft, tpot = slo.get("ttft"), slo.get("tpot")
    return (ttft is None or record.first - record.sent <= ttft) and (tpot is None or (record.tpot or 0.0) <= tpot)
