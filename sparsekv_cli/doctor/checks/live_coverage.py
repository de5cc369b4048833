"""The selected rows hold the attention: estimated mass per selection, and the share of rows read."""

from __future__ import annotations

from ..check import Check, Findings, info, ok, skip, warn
from ..machine import Machine

FLOOR = 0.9
MIN_SELECTIONS = 10_000
MANY_ROWS = 0.2


def _run(machine: Machine) -> Findings:
    metrics = machine.metrics
    mass, selections = metrics.total("sparsekv_decode_selected_mass_total"), metrics.total("sparsekv_decode_selections_total")
    rows, context = metrics.total("sparsekv_decode_selected_tokens_total"), metrics.total("sparsekv_decode_context_tokens_total")
    if not selections or mass is None:
        sparse = metrics.total("sparsekv_decode_requests_total", path="sparse") or 0
        dense = metrics.total("sparsekv_decode_requests_total", path="dense") or 0
        if dense and not sparse:
            yield info(f"all of {dense:,.0f} request-steps were dense: every context was shorter than selection.dense_below")
        else:
            yield skip("nothing was decoded sparsely yet")
        return
    floor = machine.profile.validation.recall_mean if machine.profile else FLOOR
    mean, share = mass / selections, (rows or 0) / context if context else None
    evidence = [f"{selections:,.0f} selections; estimated attention held, mean: {mean:.3f}"]
    if share is not None:
        evidence.append(f"rows read: {share:.2%} of the contexts")
    if selections < MIN_SELECTIONS:
        yield info(f"coverage {mean:.3f}, of only {selections:,.0f} selections", *evidence)
    elif mean < floor:
        yield warn(
            f"coverage {mean:.3f}, below {floor:g}",
            *evidence,
            cause="attention is spread wider than the budget, or the basis does not fit the text",
            remedy="raise selection.max_tokens; sparsekv validate recall; sparsekv refit-basis",
        )
    elif share is not None and share > MANY_ROWS:
        yield info(f"coverage {mean:.3f}, for {share:.0%} of the rows: sparse reading saves little here", *evidence)
    else:
        yield ok(f"coverage {mean:.3f}" + (f" with {share:.1%} of the rows" if share is not None else ""), *evidence)


CHECK = Check("live.coverage", "Running server", "estimated attention that the selected rows hold", _run, limit_s=15)
