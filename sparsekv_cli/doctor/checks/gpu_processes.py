"""No other process computes on the cards."""

from __future__ import annotations

from ..check import Check, Findings, ok, skip, unknown, warn
from ..gpus import number
from ..machine import Machine


def _run(machine: Machine) -> Findings:
    if not machine.needs_gpu or not machine.cards:
        yield skip("no GPU to look at")
        return
    answer = machine.host.run("nvidia-smi", "--query-compute-apps=gpu_uuid,pid,used_memory,process_name", "--format=csv,noheader")
    if not answer.succeeded:
        yield unknown("nvidia-smi does not list the processes", answer.first_line)
        return
    if machine.is_wsl:
        yield unknown("under WSL2 the driver does not show processes of Windows", remedy="look at Task Manager, Performance, GPU")
        return
    ours = {gpu.uuid: gpu for gpu in machine.cards}
    found = []
    for line in answer.stdout.splitlines():
        uuid, pid, used, name = ([part.strip() for part in line.split(", ", 3)] + ["", "", ""])[:4]
        if uuid in ours:
            size = number(used)
            found.append(f"{ours[uuid].label}: pid {pid}, {name}, {f'{size:.0f} MiB' if size is not None else 'memory unknown'}")
    if found:
        yield warn(
            f"{len(found)} process(es) use the cards",
            *found,
            cause="a server of an earlier run, or another program; the memory left differs from boot to boot",
            remedy="stop what you do not need: kill PID",
        )
    else:
        yield ok("no other process on the cards")


CHECK = Check("gpu.processes", "GPUs", "other processes that compute on the cards", _run)
