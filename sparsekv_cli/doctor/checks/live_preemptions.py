"""Requests are not thrown out and read again."""

from __future__ import annotations

from ..check import Check, Findings, info, ok, skip, warn
from ..machine import Machine


def _run(machine: Machine) -> Findings:
    preempted = machine.metrics.total("vllm:num_preemptions_total")
    if preempted is None:
        yield skip("the server does not count preemptions")
        return
    finished = machine.metrics.total("vllm:request_success_total") or 0
    if preempted == 0:
        yield ok("no preemptions")
    elif preempted > max(2, finished / 20):
        yield warn(
            f"{preempted:,.0f} preemptions for {finished:,.0f} finished requests",
            cause="the pool or the recurrent states of all running requests do not fit together",
            remedy="raise kv.pool or memory.device_pool, or lower scheduler.max_num_seqs",
        )
    else:
        yield info(f"{preempted:,.0f} preemptions for {finished:,.0f} finished requests")


CHECK = Check("live.preemptions", "Running server", "preemptions per finished request", _run, limit_s=15)
