"""The cards keep a little memory free after the start: servers that did not died with their first full batch."""

from __future__ import annotations

from urllib.parse import urlsplit

from ..check import Check, Findings, ok, skip, unknown, warn
from ..gpus import MIB
from ..machine import Machine
from .server_exposure import is_loopback

MIN_FREE = 440 * MIB
"""Reported from practice: 396 MiB free died, 436 MiB lived."""


def _run(machine: Machine) -> Findings:
    if not is_loopback(urlsplit(machine.url).hostname or "") or not machine.needs_gpu:
        yield skip("the server's cards are not on this machine")
        return
    if machine.metrics.failure:
        yield skip("no server to look at")
        return
    if not machine.cards:
        yield unknown("the cards cannot be looked at", machine.gpu_list.message)
        return
    free = {gpu: gpu.memory_total - gpu.memory_used for gpu in machine.cards if gpu.memory_total and gpu.memory_used is not None}
    tight = {gpu: size for gpu, size in free.items() if size < MIN_FREE}
    if tight:
        yield warn(
            f"{len(tight)} card(s) have less than {MIN_FREE // MIB} MiB free",
            *(f"{gpu.label}: {size // MIB} MiB" for gpu, size in tight.items()),
            cause="a full batch, or the first use of a kernel, needs a little more than the start did",
            remedy="lower memory.gpu_memory_utilization by 0.02",
        )
    elif len(free) < len(machine.cards):
        yield unknown("the driver does not state the memory of every card")
    else:
        yield ok(f"{min(free.values()) // MIB} MiB free on the fullest card")


CHECK = Check("live.vram", "Running server", "memory of the cards that stays free", _run, limit_s=25)
