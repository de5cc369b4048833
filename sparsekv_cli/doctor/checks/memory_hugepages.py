"""The kernel may use huge pages for the pool: rows scattered over gigabytes otherwise cost address translation."""

from __future__ import annotations

import re

from ..check import Check, Findings, ok, unknown, warn
from ..machine import Machine


def _run(machine: Machine) -> Findings:
    text = machine.host.read("/sys/kernel/mm/transparent_hugepage/enabled")
    match = re.search(r"\[(\w+)\]", text or "")
    if match is None:
        yield unknown("the kernel does not state its huge-page setting")
    elif match[1] == "never":
        yield warn(
            "transparent huge pages are switched off",
            cause="the pool is then made of 4 KiB pages, and random rows cost address translation",
            remedy="echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled",
        )
    else:
        yield ok(f"transparent huge pages: {match[1]}")
    reserved = machine.meminfo.get("HugePages_Total", 0) * machine.meminfo.get("Hugepagesize", 0)
    if reserved > 2**30:
        yield warn(
            f"{reserved / 2**30:.0f} GiB is reserved as huge pages, which the pool does not use and nobody else gets",
            remedy="echo 0 | sudo tee /proc/sys/vm/nr_hugepages",
        )


CHECK = Check("memory.hugepages", "Memory", "transparent huge pages, and memory reserved for others", _run)
