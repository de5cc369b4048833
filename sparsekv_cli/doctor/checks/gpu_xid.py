"""The kernel's log names no GPU error since boot."""

from __future__ import annotations

import re

from ..check import Check, Findings, ok, skip, unknown, warn
from ..machine import Machine

MEANING = {
    13: "a kernel accessed memory wrongly: a software error, or overclocked memory",
    31: "a kernel accessed an address that is not mapped: reported with speculation on long prompts; `--set speculation.method=none`",
    43: "the GPU stopped a process",
    45: "a process was stopped after an earlier error",
    48: "a memory error that ECC could not correct",
    62: "the card's power controller halted",
    63: "a memory page was retired",
    74: "an NVLink error",
    79: "the card fell off the bus: power, riser or heat",
    94: "a contained memory error",
    95: "an uncontained memory error: reset the card",
    119: "the GPU's system processor did not answer: reboot",
}


def _run(machine: Machine) -> Findings:
    if not machine.needs_gpu or not machine.gpu_list.gpus:
        yield skip("no GPU to look at")
        return
    for command in (("dmesg", "--time-format", "iso"), ("journalctl", "-k", "-b", "--no-pager", "-o", "short-iso", "-q")):
        answer = machine.host.run(*command, seconds=6)
        if answer.succeeded and answer.stdout.strip():
            break
    else:
        yield unknown(
            "the kernel's log cannot be read without root", remedy="sudo dmesg | grep -i xid   (no output: no GPU error since boot)"
        )
        return
    found = [line for line in answer.stdout.splitlines() if re.search(r"NVRM: Xid", line)]
    if not found:
        yield ok("no GPU error in the kernel's log")
        return
    numbers = sorted({int(match[1]) for line in found if (match := re.search(r"Xid \(.*?\): (\d+)", line))})
    yield warn(
        f"{len(found)} GPU error(s) since boot: Xid {', '.join(map(str, numbers))}",
        *(re.sub(r"pid=\S+, name=\S+", "pid=…", line.strip())[:160] for line in found[-3:]),
        cause="; ".join(f"Xid {number}: {MEANING[number]}" for number in numbers if number in MEANING),
        remedy="https://docs.nvidia.com/deploy/xid-errors/ lists the others",
    )


CHECK = Check("gpu.xid", "GPUs", "GPU errors in the kernel's log since boot", _run, limit_s=15)
