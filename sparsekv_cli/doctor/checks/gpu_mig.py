"""The cards are whole: no MIG partitions."""

from __future__ import annotations

from ..check import Check, Findings, error, ok, skip
from ..machine import Machine


def _run(machine: Machine) -> Findings:
    if not machine.needs_gpu or not machine.cards:
        yield skip("no GPU to look at")
        return
    # Consumer cards answer [N/A]: they have no MIG, which is as good as off.
    split = [gpu for gpu in machine.cards if gpu.mig]
    if split:
        yield error(
            f"MIG is on: {len(split)} card(s) are split, and a part has neither the memory nor the bus the profile counts with",
            *(gpu.label for gpu in split),
            remedy=f"sudo nvidia-smi -i {split[0].index} -mig 0",
        )
    else:
        yield ok("no MIG partitions")


CHECK = Check("gpu.mig", "GPUs", "whether the cards are split by MIG", _run)
