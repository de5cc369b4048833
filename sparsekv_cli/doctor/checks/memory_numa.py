"""Each card's rows lie in the memory next to it."""

from __future__ import annotations

from ..check import Check, Findings, ok, skip, unknown, warn
from ..machine import Machine


def _run(machine: Machine) -> Findings:
    nodes = [path.name for path in machine.host.glob("/sys/devices/system/node/node[0-9]*")]
    if len(nodes) < 2:
        yield ok("one memory node") if nodes else unknown("the kernel does not show its memory nodes")
        return
    if not machine.needs_gpu or not machine.cards:
        yield skip(f"{len(nodes)} memory nodes, and no GPU to relate them to")
        return
    homes = {}
    for gpu in machine.cards:
        text = (machine.host.read(f"/sys/bus/pci/devices/{gpu.bus_id}/numa_node") or "").strip()
        homes[gpu] = int(text) if text.lstrip("-").isdigit() else -1
    evidence = [f"{gpu.label}: node {home if home >= 0 else 'unknown'}" for gpu, home in homes.items()]
    if any(home < 0 for home in homes.values()):
        yield unknown(f"{len(nodes)} memory nodes, and the kernel does not say which card is at which", *evidence)
        return
    bound = machine.profile.hardware.numa_bind if machine.profile else False
    if len(set(homes.values())) > 1 and not bound:
        yield warn(
            "the cards hang on different memory nodes and the workers are not bound",
            *evidence,
            cause="rows in the memory of the other socket cross the socket link first",
            remedy="set hardware.numa_bind: on",
        )
    else:
        yield ok(f"{len(nodes)} memory nodes; the pool is placed at its card's", *evidence)


CHECK = Check("memory.numa", "Memory", "memory nodes of the cards", _run)
