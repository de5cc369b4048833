"""Swap neither hides a shortage of memory nor is missing where a short peak would kill the server."""

from __future__ import annotations

from sparsekv.profiles.units import gib

from ..check import Check, Findings, info, ok, unknown, warn
from ..machine import Machine


def _run(machine: Machine) -> Findings:
    total, free = machine.meminfo.get("SwapTotal"), machine.meminfo.get("SwapFree")
    if total is None or free is None:
        yield unknown("/proc/meminfo does not state the swap")
        return
    used = total - free
    if used > max(2**30, total // 4):
        yield warn(
            f"{gib(used)} of {gib(total)} swap is in use",
            cause="more memory is asked for than there is; whatever was swapped out stalls when it is touched",
            remedy="free memory before the server starts; sudo swapoff -a && sudo swapon -a brings pages back",
        )
    elif total == 0:
        yield info("there is no swap: a short peak while the weights load ends a process instead of slowing it")
    else:
        yield ok(f"{gib(used)} of {gib(total)} swap in use")


CHECK = Check("memory.swap", "Memory", "swap and how much of it is in use", _run)
