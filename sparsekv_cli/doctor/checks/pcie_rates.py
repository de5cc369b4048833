"""How fast rows reach each card: contiguous, and gathered in the profile's row size."""

from __future__ import annotations

from ..check import Check, Findings, ok, skip, unknown, warn
from ..machine import Machine

LANE_RATE = {1: 0.25e9, 2: 0.5e9, 3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.56e9}
"""Bytes per second of one lane after line coding."""
COPY_SHARE = 0.75
"""A healthy link carries this much of its raw rate in large copies."""


def _run(machine: Machine) -> Findings:
    if not machine.needs_gpu or not machine.cards:
        yield skip("no GPU to measure")
        return
    if not machine.measure:
        yield skip("not measured: `--quick`")
        return
    if machine.probe.failure:
        yield unknown("not measured", machine.probe.failure, remedy="free the cards and run `sparsekv doctor` again")
        return
    for gpu in machine.cards:
        probed = machine.probe.cards.get(gpu.uuid)
        if probed is None or probed.copy_rate is None:
            yield unknown(f"{gpu.label}: not measured", *(probed.problems if probed else ()))
            continue
        gathers = sorted((probed.gather_rates or {}).items())
        evidence = [f"gather of {size} B rows: {rate / 1e9:.1f} GB/s" for size, rate in gathers]
        found = f"{gpu.label}: copy {probed.copy_rate / 1e9:.1f} GB/s" + "".join(
            f", gather {rate / 1e9:.1f} GB/s" for _, rate in gathers[:1]
        )
        link = probed.link_gen, probed.link_width
        raw = LANE_RATE.get(link[0] or 0, 0) * (link[1] or 0)
        claimed = machine.profile.hardware.link_rate if machine.profile else None
        if raw and probed.copy_rate < COPY_SHARE * raw:
            yield warn(
                found,
                *evidence,
                f"the link (generation {link[0]} x{link[1]}) carries {raw / 1e9:.1f} GB/s",
                cause="memory of the other socket, single-channel RAM, an IOMMU in strict mode, or another transfer on the same root port",
                remedy="numactl --hardware; sudo dmidecode -t memory | grep -e Speed -e Locator",
            )
        elif claimed and gathers and gathers[0][1] < 0.85 * claimed:
            yield warn(
                found,
                *evidence,
                f"the profile counts with {claimed / 1e9:.1f} GB/s",
                remedy=f"set hardware.link_rate: {gathers[0][1] / 1e9:.1f}GB/s",
            )
        else:
            yield ok(found, *evidence)
        if not gathers or probed.problems:
            yield unknown(f"{gpu.label}: part of the measurement failed", *probed.problems)


CHECK = Check("pcie.rates", "PCIe", "copy and gather rates from page-locked memory, in the profile's row size", _run, limit_s=170)
