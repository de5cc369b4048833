"""Follow-ups find their beginning: `hits / queries` of the prefix cache, in tokens."""

from __future__ import annotations

from ..check import Check, Findings, info, ok, skip, warn
from ..machine import Machine

MIN_TOKENS = 20_000
FLOOR = 0.05


def _run(machine: Machine) -> Findings:
    queries, hits = (machine.metrics.total(f"vllm:prefix_cache_{name}_total") for name in ("queries", "hits"))
    finished = machine.metrics.total("vllm:request_success_total") or 0
    if not queries or hits is None:
        yield skip("no prompt was looked up yet, or prefix caching is off")
        return
    rate = hits / queries
    evidence = f"{hits:,.0f} of {queries:,.0f} prompt tokens were known"
    if queries < MIN_TOKENS or finished < 4:
        yield info(f"prefix-hit rate {rate:.0%}: too few requests to judge", evidence)
    elif rate < FLOOR:
        yield warn(
            f"prefix-hit rate {rate:.0%}",
            evidence,
            cause="prompts that share nothing, shorter than two blocks of 128 tokens, or whose beginning changes (a date, a random id); "
            "or states of recurrent layers that were driven out",
            remedy="put what changes behind what stays; raise memory.device_pool or recurrent.retention_interval",
        )
    else:
        yield ok(f"prefix-hit rate {rate:.0%}", evidence)


CHECK = Check("live.prefix-cache", "Running server", "prefix-hit rate", _run, limit_s=15)
