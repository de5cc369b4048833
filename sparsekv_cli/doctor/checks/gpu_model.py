"""There are the cards that the profile is for."""

from __future__ import annotations

from collections import Counter

from sparsekv.profiles.units import gib

from ..check import Check, Findings, error, info, ok, skip, unknown, warn
from ..gpus import same_model, short_name
from ..machine import Machine


def _run(machine: Machine) -> Findings:
    gpus, visible = machine.gpu_list.gpus, machine.visible
    if not machine.needs_gpu or not gpus:
        yield skip("no GPU to look at")
        return
    chosen = machine.host.environ.get("CUDA_VISIBLE_DEVICES")
    names = Counter(short_name(gpu.name) for gpu in visible)
    listed = ", ".join(f"{count} x {name}" for name, count in names.items()) or "none"
    if chosen is not None:
        yield from _visibility(machine, chosen)
    if machine.profile is None:
        yield ok(listed) if visible else skip("no visible GPU")
        return

    hardware = machine.profile.hardware
    cards = machine.cards
    evidence = [f"{gpu.label}: {gib(gpu.memory_total) if gpu.memory_total else 'memory unknown'}" for gpu in visible]
    nameless = [gpu for gpu in cards if hardware.gpu and same_model(gpu.name, hardware.gpu) is None]
    if len(cards) < hardware.gpus:
        yield error(
            f"the profile needs {hardware.gpus} x {hardware.gpu or 'GPU'}, visible: {listed}",
            *evidence,
            cause="the profile is for another machine; a Ti, laptop or D variant is another model",
            remedy="sparsekv profiles list",
        )
        return
    if nameless:
        yield unknown(
            f"{len(nameless)} card(s) carry a generic name, so that the model cannot be told",
            *(f"{gpu.label}: `{gpu.name}`" for gpu in nameless),
            cause="the driver is older than the card",
            remedy="update the NVIDIA driver",
        )
    small = [gpu for gpu in cards if gpu.memory_total and hardware.vram and gpu.memory_total < hardware.vram * 0.94]
    if small:
        yield error(f"{len(small)} card(s) have less memory than the profile's {gib(hardware.vram)}", *evidence)
    wrong = [gpu for gpu in cards if gpu.capability and hardware.compute_capability and gpu.capability != hardware.compute_capability]
    if wrong:
        yield error(
            f"compute capability {wrong[0].capability}, the profile is for {hardware.compute_capability}",
            *evidence,
            remedy=f"sparsekv profiles show {machine.loaded.name if machine.loaded else ''}",
        )
    if len(visible) > len(cards) and len(names) > 1:
        yield info(
            "there are other cards beside the profile's; the launch picks by UUID",
            *(f"used: {gpu.label} {gpu.uuid}" for gpu in cards),
        )
    if any(gpu.memory_total is None for gpu in cards):
        yield unknown("the driver does not state the memory of every card", *evidence)
    if not (nameless or small or wrong):
        yield ok(f"{len(cards)} x {short_name(cards[0].name)}")


def _visibility(machine: Machine, chosen: str) -> Findings:
    gpus = machine.gpu_list.gpus
    if not chosen.strip():
        yield error("CUDA_VISIBLE_DEVICES is set to nothing, which hides every GPU", remedy="unset CUDA_VISIBLE_DEVICES")
        return
    by_index = any(item.strip().isdigit() for item in chosen.split(","))
    mixed = len({gpu.name for gpu in gpus}) > 1
    if by_index and mixed and machine.host.environ.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
        yield warn(
            f"CUDA_VISIBLE_DEVICES={chosen} counts in CUDA's order, fastest first, which is not nvidia-smi's on this machine",
            *(f"{gpu.index}: {gpu.name} {gpu.uuid}" for gpu in gpus),
            remedy="export CUDA_DEVICE_ORDER=PCI_BUS_ID, or name cards by UUID",
        )
    if len(machine.visible) < len([item for item in chosen.split(",") if item.strip()]):
        yield error(f"CUDA_VISIBLE_DEVICES={chosen} names a card that is not there", *(f"{g.index}: {g.uuid}" for g in gpus))


CHECK = Check("gpu.model", "GPUs", "the cards are those of the profile", _run)
