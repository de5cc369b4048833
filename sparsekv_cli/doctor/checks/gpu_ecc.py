"""The cards' memory has no errors that ECC could not correct."""

from __future__ import annotations

from ..check import Check, Findings, error, info, ok, skip
from ..machine import Machine


def _run(machine: Machine) -> Findings:
    if not machine.needs_gpu or not machine.cards:
        yield skip("no GPU to look at")
        return
    broken = [gpu for gpu in machine.cards if gpu.ecc_errors]
    if broken:
        yield error(
            "uncorrected memory errors since the driver was loaded",
            *(f"{gpu.label}: {gpu.ecc_errors}" for gpu in broken),
            cause="the card's memory is failing, or too hot",
            remedy="nvidia-smi -q -d ECC,PAGE_RETIREMENT; reset the card with a reboot and watch the count",
        )
    elif all(gpu.ecc_errors is None for gpu in machine.cards):
        yield info("these cards have no ECC: memory errors show up as wrong output or as Xid 13 and 31 only")
    else:
        yield ok("no uncorrected memory errors")


CHECK = Check("gpu.ecc", "GPUs", "uncorrected memory errors", _run)
