"""Whether the cards reach each other's memory, and whether the profile's all-reduce can trust that."""

from __future__ import annotations

import re
from collections.abc import Mapping

from ..check import Check, Findings, error, ok, skip, unknown, warn
from ..machine import Machine


def _run(machine: Machine) -> Findings:
    if not machine.needs_gpu or len(machine.cards) < 2:
        yield skip("one card needs no peer")
        return
    answer = machine.host.run("nvidia-smi", "topo", "-p2p", "rw", seconds=8)
    links = machine.host.run("nvidia-smi", "topo", "-m", seconds=8)
    if not answer.succeeded:
        yield unknown("nvidia-smi does not show how the cards are connected", answer.first_line)
        return
    indices = [str(gpu.index) for gpu in machine.cards]
    pairs = _matrix(answer.stdout, indices)
    wires = _matrix(links.stdout, indices) if links.succeeded else {}
    evidence = tuple(f"GPU{a} - GPU{b}: {state}{f', {wires[a, b]}' if (a, b) in wires else ''}" for (a, b), state in pairs.items())
    if not pairs:
        yield unknown("the table of nvidia-smi is not understood", *answer.stdout.strip().splitlines()[:3])
        return
    peer = all(state == "OK" for state in pairs.values())
    nvlink = bool(wires) and all(wire.startswith("NV") for wire in wires.values())
    hazards = list(_hazards(machine, peer, nvlink, wires, evidence))
    yield from hazards
    if not hazards:
        how = "over NVLink" if nvlink else "over PCIe peer access" if peer else "through system memory"
        yield ok(f"the cards exchange data {how}", *evidence)


def _hazards(machine: Machine, peer: bool, nvlink: bool, wires: Mapping[tuple[str, str], str], evidence: tuple[str, ...]) -> Findings:
    if machine.profile is None:
        return
    parallel, memory, declared = machine.profile.parallel, machine.profile.memory, machine.profile.hardware.p2p
    off = "set parallel.custom_all_reduce: off"
    if parallel.custom_all_reduce:
        if memory.expandable_segments:
            yield error(
                "custom all-reduce and expandable segments do not go together: graph capture fails in custom_all_reduce.cuh",
                remedy="set memory.expandable_segments: off",
            )
        if not peer:
            yield error("custom all-reduce needs peer access, which these cards do not have", *evidence, remedy=off)
        elif not nvlink:
            separate = any(wire in ("PHB", "NODE", "SYS") for wire in wires.values())
            yield (error if separate else warn)(
                "custom all-reduce over patched PCIe peer access has returned wrong data"
                + (", and has reset machines whose cards hang on separate root ports" if separate else ""),
                *evidence,
                cause="the driver was rebuilt to allow peer access that NVIDIA switches off for these cards",
                remedy=f"{off}; NCCL loses little, the gain was 6 % where it worked",
            )
    if declared == "nvlink" and not nvlink:
        yield error("the profile counts with NVLink, and there is none", *evidence, remedy="set hardware.p2p: none")
    if peer and not nvlink and (units := machine.host.glob("/sys/class/iommu/*")):
        yield warn(
            "an IOMMU is on together with peer access over PCIe: NCCL may hang at start",
            *(f"/sys/class/iommu/{path.name}" for path in units[:2]),
            remedy="export NCCL_P2P_DISABLE=1, or boot with iommu=pt",
        )


def _matrix(text: str, indices: list[str]) -> dict[tuple[str, str], str]:
    """The upper half of a table with rows and columns `GPU0`, `GPU1`…, of the given cards."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", text)
    header: list[str] = []
    found = {}
    for line in text.splitlines():
        cells = line.split()
        if not header and len(cells) > 1 and all(re.fullmatch(r"GPU\d+", cell) for cell in cells[:2]):
            header = [cell for cell in cells if re.fullmatch(r"GPU\d+", cell)]
        elif header and cells and re.fullmatch(r"GPU\d+", cells[0]):
            for column, cell in zip(header, cells[1:], strict=False):
                a, b = cells[0][3:], column[3:]
                if a in indices and b in indices and indices.index(a) < indices.index(b):
                    found[a, b] = cell
    return found


CHECK = Check("pcie.p2p", "PCIe", "peer access between the cards, and what the all-reduce makes of it", _run, limit_s=25)
