"""/dev/shm has room, and holds nothing of servers that are gone."""

from __future__ import annotations

from pathlib import Path

from sparsekv.profiles.units import gib

from ..check import Check, Findings, error, ok, unknown, warn
from ..machine import Machine

MIN_FREE = 2 * 2**30
"""Workers exchange batches and NCCL its buffers there; the row pool is private memory and not there."""


def _run(machine: Machine) -> Findings:
    folder = machine.host.path("/dev/shm")
    room = machine.host.disk(folder) if folder.is_dir() else None
    ranks = machine.profile.parallel.tensor if machine.profile else 1
    if room is None:
        yield unknown("/dev/shm is not there", cause="a container without it", remedy="docker run --ipc host …")
        return
    total, free = room
    if free < (MIN_FREE if ranks > 1 else MIN_FREE // 8):
        yield error(
            f"/dev/shm has {gib(free)} free of {gib(total)}",
            cause="Docker gives 64 MiB by default" if total < 2**28 else "it is full",
            remedy="docker run --ipc host …, or --shm-size 8g" if machine.container else "ls -lh /dev/shm",
        )
    left = _orphans(machine)
    if left:
        size = sum(size for _, size in left)
        yield warn(
            f"{len(left)} file(s) of servers that no longer run hold {gib(size)} of memory in /dev/shm",
            *(f"{path.name} ({gib(size)})" for path, size in left[:5]),
            cause="a server was killed before it could remove them",
            remedy="rm " + " ".join(f"/dev/shm/{path.name}" for path, _ in left[:5]),
        )
    if free >= MIN_FREE // 8 and not left:
        yield ok(f"{gib(free)} free in /dev/shm")


def _orphans(machine: Machine) -> list[tuple[Path, int]]:
    """Offload files of vLLM that no process maps or holds open."""
    candidates = [path for path in machine.host.glob("/dev/shm/vllm_offload_*.mmap") if path.is_file()]
    if not candidates:
        return []
    used: set[str] = set()
    for maps in machine.host.glob("/proc/[0-9]*/maps"):
        try:
            used.update(line.rsplit("/", 1)[-1] for line in maps.read_text(errors="replace").splitlines() if "vllm_offload_" in line)
        except OSError:
            continue
    return [(path, path.stat().st_size) for path in candidates if path.name not in used]


CHECK = Check("memory.shm", "Memory", "room in /dev/shm, and files left there by dead servers", _run)
