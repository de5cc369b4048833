"""The row pool has room for the next request."""

from __future__ import annotations

from ..check import Check, Findings, ok, skip, warn
from ..machine import Machine

FULL = 0.95


def _run(machine: Machine) -> Findings:
    metrics = machine.metrics
    used, free = (metrics.total("sparsekv_pool_tokens", state=state) for state in ("used", "free"))
    if used is None or free is None or not used + free:
        yield skip("the server does not state its pool")
        return
    cached = metrics.total("sparsekv_pool_cached_tokens") or 0
    share = used / (used + free)
    evidence = f"{used:,.0f} of {used + free:,.0f} tokens are held by requests; {cached:,.0f} can be hit by later ones"
    if share > FULL:
        yield warn(f"the pool is {share:.0%} full", evidence, remedy="raise kv.pool, or take kv.dtype: int4, which halves a row")
    else:
        yield ok(f"the pool is {share:.0%} full", evidence)


CHECK = Check("live.pool", "Running server", "how full the row pool is", _run, limit_s=15)
