"""Which kernel module drives the cards: stock, rebuilt for peer access, or changed in another way."""

from __future__ import annotations

from ..check import Check, Findings, info, ok, skip, unknown
from ..machine import Machine


def _run(machine: Machine) -> Findings:
    if not machine.needs_gpu or not machine.gpu_list.gpus:
        yield skip("no GPU to look at")
        return
    modules = [line.split()[0] for line in (machine.host.read("/proc/modules") or "").splitlines() if line.strip()]
    version = (machine.host.read("/proc/driver/nvidia/version") or "").strip().splitlines()
    unlock = [name for name in modules if "unlock" in name.lower()]
    if unlock:
        yield info(
            f"kernel module `{unlock[0]}` is loaded and changes the rates of the cards: what is measured here is not what stock cards do"
        )
    license_ = machine.host.run("modinfo", "-F", "license", "nvidia")
    if license_.succeeded:
        kind = "open" if "MIT" in license_.stdout or "GPL" in license_.stdout else "proprietary"
        yield ok(f"{kind} kernel module", *version[:1])
    elif version:
        yield ok("kernel module loaded", version[0])
    else:
        yield unknown("the kernel module cannot be looked at from here", cause="a container or WSL2")


CHECK = Check("gpu.module", "GPUs", "which kernel module drives the cards", _run)
