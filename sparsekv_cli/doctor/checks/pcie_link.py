"""Each card's PCIe link has the generation and width that the profile counts with, while it works."""

from __future__ import annotations

from ..check import Check, Findings, error, ok, skip, unknown
from ..machine import Machine

CAUSE = "a riser, a slot behind the chipset, a second M.2 drive that takes lanes, or a BIOS setting"


def _run(machine: Machine) -> Findings:
    if not machine.needs_gpu or not machine.cards:
        yield skip("no GPU to look at")
        return
    wanted = machine.profile.hardware.pcie if machine.profile else None
    for gpu in machine.cards:
        probed = machine.probe.cards.get(gpu.uuid) if machine.measure else None
        generation, width = (probed.link_gen, probed.link_width) if probed else (None, None)
        limits = f"card and slot can do generation {gpu.link_gen_max or '?'} x{gpu.link_width_max or '?'}"
        if wanted and gpu.link_width_max and gpu.link_width_max < wanted.width:
            yield error(f"{gpu.label}: the slot has {gpu.link_width_max} lanes, the profile counts with {wanted.width}", cause=CAUSE)
        elif wanted and gpu.link_gen_max and gpu.link_gen_max < wanted.generation:
            yield error(f"{gpu.label}: PCIe generation {gpu.link_gen_max}, the profile counts with {wanted.generation}", cause=CAUSE)
        elif generation is None or width is None:
            yield unknown(
                f"{gpu.label}: the link was not seen under load; idle links slow down, so what they show then says nothing",
                limits,
                machine.probe.failure if machine.measure and machine.probe.failure else "",
            )
        elif wanted and (width < wanted.width or generation < wanted.generation):
            yield error(
                f"{gpu.label}: generation {generation} x{width} under load, the profile counts with {wanted.generation} x{wanted.width}",
                limits,
                cause=CAUSE,
                remedy=f"sudo lspci -vv -s {gpu.bus_id} | grep -e LnkCap: -e LnkSta:",
            )
        else:
            yield ok(f"{gpu.label}: PCIe generation {generation} x{width} under load")


CHECK = Check("pcie.link", "PCIe", "generation and width of each link under load", _run, limit_s=170)
