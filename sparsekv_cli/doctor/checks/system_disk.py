"""There is room for compile caches, converted models and logs."""

from __future__ import annotations

from pathlib import Path

from sparsekv.profiles.env import cache_dir
from sparsekv.profiles.units import gib

from ..check import Check, Findings, error, ok, unknown, warn
from ..machine import Machine

NEEDED = 5 * 2**30
MODEL_BUILD = 45 * 2**30
"""Converting the 27B checkpoint needs about this much beside it."""


def _run(machine: Machine) -> Findings:
    environ = machine.host.environ
    places = {
        "vLLM's compile cache": Path(environ.get("VLLM_CACHE_ROOT") or Path(environ.get("HOME", "/root"), ".cache/vllm")),
        "sparsekv's cache": cache_dir(environ),
        "temporary files": Path(environ.get("TMPDIR", "/tmp")),
    }
    fine = []
    for name, path in places.items():
        room = machine.host.disk(path)
        if room is None:
            yield unknown(f"{name}: the disk does not say how full it is", str(path))
        elif room[1] < NEEDED // 10:
            yield error(
                f"{name}: {gib(room[1])} free", str(path), cause="a full disk ends the start of the server half-way", remedy=f"df -h {path}"
            )
        elif room[1] < NEEDED:
            yield warn(f"{name}: {gib(room[1])} free", str(path), remedy=f"df -h {path}")
        else:
            fine.append(room[1])
    if len(fine) == len(places):
        note = "" if min(fine) >= MODEL_BUILD else f"; converting a 27B model needs {gib(MODEL_BUILD)}"
        yield ok(f"{gib(min(fine))} free{note}")


CHECK = Check("system.disk", "System", "free space of caches and temporary files", _run)
