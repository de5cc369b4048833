"""The cards have the free memory that the server will claim."""

from __future__ import annotations

from sparsekv.profiles.units import gib

from ..check import Check, Findings, error, ok, skip, unknown
from ..machine import Machine


def _run(machine: Machine) -> Findings:
    if not machine.needs_gpu or not machine.cards:
        yield skip("no GPU to look at")
        return
    share = machine.profile.memory.gpu_memory_utilization if machine.profile else 0.9
    short = False
    for gpu in machine.cards:
        if gpu.memory_total is None or gpu.memory_used is None:
            yield unknown(f"{gpu.label}: the driver does not state its memory", cause="MIG, a virtual GPU, or an old driver")
            short = True
            continue
        free, wanted = gpu.memory_total - gpu.memory_used, gpu.memory_total * share
        if free < wanted:
            short = True
            yield error(
                f"{gpu.label}: {gib(free)} free, the server claims {gib(wanted)}",
                f"{gib(gpu.memory_total)} x gpu_memory_utilization {share:g} = {gib(wanted)}; {gib(gpu.memory_used)} is in use",
                cause="another process or a display uses the card",
                remedy=f"free it, or lower memory.gpu_memory_utilization to {max(0.05, free / gpu.memory_total - 0.02):.2f}",
            )
    if not short:
        yield ok(f"{gib(min(g.memory_total - g.memory_used for g in machine.cards if g.memory_total and g.memory_used is not None))} free")


CHECK = Check("gpu.memory", "GPUs", "free memory of each card against what the server claims", _run)
