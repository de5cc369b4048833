"""Most selected rows are on the card already: `hits / (hits + misses)` of the hot set."""

from __future__ import annotations

from ..check import Check, Findings, info, ok, skip, warn
from ..machine import Machine

MIN_LOOKUPS = 100_000
FLOOR = 0.5
GOOD = 0.8


def _run(machine: Machine) -> Findings:
    hits, misses = (machine.metrics.total("sparsekv_hot_rows_total", result=result) for result in ("hit", "miss"))
    if hits is None or misses is None:
        yield skip("the server has no hot set")
        return
    total = hits + misses
    if total < MIN_LOOKUPS:
        yield info(f"only {total:,.0f} rows were looked up: too few to judge")
        return
    rate = hits / total
    evidence = f"{hits:,.0f} of {total:,.0f} selected rows were on the card"
    if rate < FLOOR:
        yield warn(
            f"hot-hit rate {rate:.0%}",
            evidence,
            cause="the hot set is smaller than what one step selects, so that each step drives out the rows of the one before",
            remedy="raise kv.hot; four times the rows of a step is a good size",
        )
    elif rate < GOOD:
        yield info(f"hot-hit rate {rate:.0%}: more kv.hot would still save transfers", evidence)
    else:
        yield ok(f"hot-hit rate {rate:.0%}", evidence)


CHECK = Check("live.hot-hits", "Running server", "hot-hit rate", _run, limit_s=15)
