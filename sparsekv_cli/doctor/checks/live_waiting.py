"""Requests run instead of waiting."""

from __future__ import annotations

from ..check import Check, Findings, info, ok, skip, warn
from ..machine import Machine


def _run(machine: Machine) -> Findings:
    metrics = machine.metrics
    running, waiting = metrics.total("vllm:num_requests_running"), metrics.total("vllm:num_requests_waiting")
    if running is None or waiting is None:
        yield skip("the server does not state its queue")
        return
    reasons = {
        labels.get("reason", "?"): value for labels, value in metrics.samples.get("vllm:num_requests_waiting_by_reason", ()) if value
    }
    evidence = [f"{running:.0f} running, {waiting:.0f} waiting"] + [
        f"waiting for {reason}: {value:.0f}" for reason, value in reasons.items()
    ]
    if waiting and not running:
        yield warn(
            f"{waiting:.0f} request(s) wait and none runs",
            *evidence,
            cause="a request that does not fit the pool, or an engine that stopped stepping",
            remedy="look at the server's log; lower the prompt or raise kv.pool",
        )
    elif waiting > running:
        yield warn(
            f"{waiting:.0f} request(s) wait behind {running:.0f}",
            *evidence,
            remedy="raise scheduler.max_num_seqs if the pool has room, else limit the queue with scheduler.max_queued_requests",
        )
    elif waiting:
        yield info(f"{waiting:.0f} request(s) wait", *evidence)
    else:
        yield ok(f"{running:.0f} request(s) run, none waits")


CHECK = Check("live.waiting", "Running server", "running and waiting requests", _run, limit_s=15)
