"""As much memory can be page-locked as the pool needs."""

from __future__ import annotations

from sparsekv.profiles.units import gib

from ..check import Check, Findings, error, info, ok, skip, unknown, warn
from ..machine import Machine


def _run(machine: Machine) -> Findings:
    profile = machine.profile
    if not machine.needs_gpu or (profile is not None and profile.kv.placement != "host"):
        yield skip("no rows in host memory that a GPU reads")
        return
    limit = machine.host.locked_memory_limit()
    pool = profile.kv.pool if profile else 0
    if limit is not None and limit < max(pool, 2**30):
        # The driver locks pages itself and is not bound by this limit on bare metal; containers and old drivers differ.
        yield info(
            f"`ulimit -l` allows {gib(limit)}; the NVIDIA driver does not need it, other libraries may", remedy="ulimit -l unlimited"
        )
    if machine.is_wsl:
        half = machine.meminfo.get("MemTotal", 0) // 2
        if pool > half:
            yield warn(
                f"WSL2 locks about half of its memory, {gib(half)}; the pool is {gib(pool)}",
                remedy="raise memory= in %USERPROFILE%\\.wslconfig, then wsl --shutdown",
            )
    if not machine.measure or not machine.cards:
        yield skip("no trial: not measured") if machine.cards else skip("no trial without a GPU")
        return
    if machine.probe.failure:
        yield unknown("no trial of page-locking", machine.probe.failure)
        return
    for gpu in machine.cards:
        probed = machine.probe.cards.get(gpu.uuid)
        if probed is None:
            yield unknown(f"{gpu.label}: no trial of page-locking")
        elif probed.pinned_bytes is None:
            yield error(
                f"{gpu.label}: page-locking failed",
                *probed.problems,
                cause="a container without the right to lock memory, a cgroup limit, or WSL2",
                remedy="docker run --ulimit memlock=-1 --ipc host …",
            )
        else:
            yield ok(f"{gpu.label}: {gib(probed.pinned_bytes)} page-locked and read by the card in a trial")


CHECK = Check("memory.pinned", "Memory", "limits of page-locked memory, with a trial", _run, limit_s=170)
