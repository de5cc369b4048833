"""Each card's power limit is the profile's, and will stay."""

from __future__ import annotations

from ..check import Check, Findings, info, ok, skip, unknown, warn
from ..machine import Machine


def _run(machine: Machine) -> Findings:
    if not machine.needs_gpu or not machine.cards:
        yield skip("no GPU to look at")
        return
    cap = machine.profile.hardware.power_cap if machine.profile else None
    fine = True
    for gpu in machine.cards:
        if gpu.power_limit is None:
            fine = False
            yield unknown(f"{gpu.label}: the driver does not state its power limit")
        elif cap is not None and abs(gpu.power_limit - cap) > 1:
            fine = False
            allowed = f"{gpu.power_min or 0:g} to {gpu.power_max:g} W" if gpu.power_max else "not stated"
            yield warn(
                f"{gpu.label}: the limit is {gpu.power_limit:g} W, the profile's is {cap:g} W",
                f"the card allows {allowed}; its default is {f'{gpu.power_default:g} W' if gpu.power_default else 'not stated'}",
                cause="a limit is forgotten at reboot, and without persistence mode whenever the driver unloads",
                remedy="sparsekv serve PROFILE --apply-power-cap",
            )
        elif cap is None and gpu.power_default and gpu.power_limit < gpu.power_default - 1:
            fine = False
            yield info(
                f"{gpu.label}: limited to {gpu.power_limit:g} W of {gpu.power_default:g} W, which costs speed",
                remedy=f"sudo nvidia-smi -i {gpu.index} -pl {gpu.power_default:g}",
            )
        if gpu.persistence is False and gpu.power_default and gpu.power_limit and abs(gpu.power_limit - gpu.power_default) > 1:
            fine = False
            yield warn(
                f"{gpu.label}: persistence mode is off, so the power limit is lost when no process uses the card",
                remedy=f"sudo nvidia-smi -i {gpu.index} -pm 1",
            )
    if fine:
        yield ok(f"power limit {', '.join(f'{gpu.power_limit:g} W' for gpu in machine.cards if gpu.power_limit)}")


CHECK = Check("gpu.power", "GPUs", "power limit of each card against the profile, and persistence mode", _run)
