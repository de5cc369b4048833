"""Host memory, within the limits of a container, holds the row pool."""

from __future__ import annotations

from sparsekv.profiles.budget import Term, plan
from sparsekv.profiles.schema import Profile
from sparsekv.profiles.units import gib

from ..check import Check, Findings, error, info, ok, unknown, warn
from ..machine import Machine

LOADER_HEADROOM = 4 * 2**30
"""Weights pass through the page cache, and each rank's process has a few hundred MiB of its own."""


def _run(machine: Machine) -> Findings:
    total, available, limit = machine.meminfo.get("MemTotal"), machine.available, machine.memory_limit
    if total is None or available is None:
        yield unknown("/proc/meminfo cannot be read")
        return
    evidence = [f"{gib(total)} installed, {gib(available)} available"]
    if limit is not None and limit[0] < total:
        evidence.append(f"this {machine.container or 'group of processes'} may use {gib(limit[0])} ({limit[2]}), and uses {gib(limit[1])}")
    profile = machine.profile
    if profile is None:
        yield ok(f"{gib(available)} available", *evidence)
        return
    if profile.hardware.ram and total < profile.hardware.ram * 0.9:
        yield warn(f"{gib(total)} installed, the profile is for {gib(profile.hardware.ram)}", cause="the profile is for another machine")
    if profile.kv.placement != "host":
        yield ok(f"{gib(available)} available; the rows lie on the card", *evidence)
        return
    terms = plan(profile, machine.shape).host if machine.shape else _without_shape(profile)
    needed = int(sum(term.value for term in terms))
    evidence += [f"{term.name} {term.text} = {term.formula}" for term in terms]
    if available < needed:
        total_text = " + ".join(f"{term.name} {term.text}" for term in terms)
        yield error(
            f"the pool does not fit: {total_text} = {gib(needed)} needed, {gib(available)} available",
            *evidence,
            cause="other programs, the container's limit, or a profile for more memory",
            remedy=_smaller_pool(profile, available - needed),
        )
    elif available < needed + LOADER_HEADROOM:
        yield info(f"the pool fits with {gib(available - needed)} to spare; loading the weights may push programs into swap", *evidence)
    else:
        yield ok(f"the pool fits with {gib(available - needed)} to spare", *evidence)


def _without_shape(profile: Profile) -> tuple[Term, ...]:
    """What can be said where the model's folder is not there and the profile states no shape."""
    return Term("rows", profile.kv.pool, "kv.pool"), Term("headroom", profile.kv.headroom, "kv.headroom")


def _smaller_pool(profile: Profile, short: int) -> str:
    """The largest pool that fits, in quarters of a GiB. The sketch shrinks with it, so this errs to the safe side."""
    quarters = (profile.kv.pool + short) // 2**28
    return f"--set kv.pool={quarters / 4:g}GiB" if quarters > 0 else "free memory, or take a profile for a smaller machine"


CHECK = Check("memory.available", "Memory", "available host memory, within cgroup limits, against the pool", _run)
