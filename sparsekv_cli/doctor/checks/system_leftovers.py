"""Nothing of an earlier server still runs."""

from __future__ import annotations

from ..check import Check, Findings, ok, warn
from ..machine import Machine

MARKS = ("vllm serve", "VLLM::EngineCore", "VLLM::Worker", "vllm.entrypoints")


def _run(machine: Machine) -> Findings:
    found = []
    for path in machine.host.glob("/proc/[0-9]*/cmdline"):
        try:
            command = path.read_bytes().replace(b"\0", b" ").decode("utf-8", "replace").strip()
            name = (path.parent / "comm").read_text(errors="replace").strip()
        except OSError:
            continue
        if any(mark in command for mark in MARKS) or name.startswith("VLLM"):
            # Only the program, never its arguments: those may hold a key.
            program = next(mark for mark in (*MARKS, name) if mark in command or mark == name)
            found.append(f"pid {path.parent.name}: {program}")
    if found:
        yield warn(
            f"{len(found)} process(es) of a vLLM server run",
            *found[:6],
            cause="a server that is meant to run, or workers that outlived theirs",
            remedy="if they are not wanted: kill PID",
        )
    else:
        yield ok("no other vLLM server runs")


CHECK = Check("system.leftovers", "System", "processes of earlier servers", _run)
