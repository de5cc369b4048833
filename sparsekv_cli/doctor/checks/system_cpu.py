"""The processor runs at speed and has cores for the ranks."""

from __future__ import annotations

from collections import Counter

from ..check import Check, Findings, ok, unknown, warn
from ..machine import Machine

CORES_PER_RANK = 2


def _run(machine: Machine) -> Findings:
    text = machine.host.read("/proc/cpuinfo") or ""
    cores = text.count("processor\t:") or text.count("processor :")
    model = next((line.split(":", 1)[1].strip() for line in text.splitlines() if line.startswith("model name")), "")
    if not cores:
        yield unknown("/proc/cpuinfo cannot be read")
        return
    allowed = _allowed(machine) or cores
    ranks = machine.profile.parallel.tensor if machine.profile else 1
    needed = CORES_PER_RANK * ranks + 1 if machine.needs_gpu else CORES_PER_RANK
    if allowed < needed:
        yield warn(
            f"{allowed} core(s) for {ranks} rank(s), the scheduler and the HTTP server",
            model,
            cause="a container's limit, or a small machine",
            remedy="docker run --cpus …" if machine.container else "",
        )
    governors = Counter((machine.host.read(f"/{p.relative_to(machine.host.root)}") or "").strip() for p in _governors(machine))
    if governors and governors.get("performance", 0) < sum(governors.values()) and "powersave" in governors:
        driver = (machine.host.read("/sys/devices/system/cpu/cpu0/cpufreq/scaling_driver") or "").strip()
        if "pstate" not in driver:  # with the pstate drivers `powersave` is an ordinary, dynamic setting
            yield warn(
                "the cores are held at their lowest frequency (governor `powersave`)",
                cause="each decode step waits for the processor between kernels",
                remedy="sudo cpupower frequency-set -g performance",
            )
            return
    if allowed >= needed:
        yield ok(f"{allowed} cores", model)


def _governors(machine: Machine) -> list:
    return machine.host.glob("/sys/devices/system/cpu/cpu[0-9]*/cpufreq/scaling_governor")


def _allowed(machine: Machine) -> int | None:
    """Cores that this process may use: its affinity, and the container's quota."""
    line = next((x for x in (machine.host.read("/proc/self/status") or "").splitlines() if x.startswith("Cpus_allowed_list")), "")
    ranges = line.partition(":")[2].strip()
    count = None
    if ranges:
        bounds = [part.split("-") for part in ranges.split(",") if part]
        count = sum(int(pair[-1]) - int(pair[0]) + 1 for pair in bounds)
    quota = (machine.host.read("/sys/fs/cgroup/cpu.max") or "").split()
    if len(quota) == 2 and quota[0].isdigit() and quota[1].isdigit():
        limit = max(1, int(quota[0]) // int(quota[1]))
        count = limit if count is None else min(count, limit)
    return count


CHECK = Check("system.cpu", "System", "cores, their limits and their frequency governor", _run)
