"""Where Linux runs, and what follows from it."""

from __future__ import annotations

import re

from ..check import Check, Findings, error, info, ok, unknown, warn
from ..machine import Machine

WSL_MIN_KERNEL = (4, 19, 121)


def _run(machine: Machine) -> Findings:
    release = machine.kernel
    stated = machine.profile.hardware.platform if machine.profile else None
    virtual = "hypervisor" in (machine.host.read("/proc/cpuinfo") or "")
    found = "wsl2" if machine.is_wsl else "vm" if virtual else "native"
    if not release:
        yield unknown("the kernel does not state its release")
        return
    if machine.is_wsl:
        version = tuple(int(part) for part in re.findall(r"\d+", release)[:3])
        if version < WSL_MIN_KERNEL:
            yield error(f"WSL kernel {release} is too old for GPUs", remedy="wsl --update   (in Windows)")
        if machine.needs_gpu and machine.host.environ.get("VLLM_WSL2_ENABLE_PIN_MEMORY") != "1" and stated != "wsl2":
            yield warn(
                "vLLM does not page-lock memory under WSL2 by itself",
                remedy="set hardware.platform: wsl2 in the profile; serve then sets VLLM_WSL2_ENABLE_PIN_MEMORY=1",
            )
        yield info(
            "under WSL2 the driver moves data to host memory without a word when a card is full, 2 to 10 times slower",
            remedy="leave 2 GiB of the card free: memory.gpu_memory_utilization",
        )
    if stated is not None and stated != found and not (stated == "native" and found == "vm"):
        yield warn(f"the profile says `{stated}`, this is `{found}`", remedy=f"set hardware.platform: {found}")
    if found == "vm" and machine.needs_gpu:
        yield info("a virtual machine: the PCIe topology shown here is the hypervisor's, and peer access cannot be judged from inside")
    yield ok(f"Linux {release}" + (f" in {machine.container}" if machine.container else ""))


CHECK = Check("system.platform", "System", "native Linux, virtual machine, WSL2 or container", _run)
