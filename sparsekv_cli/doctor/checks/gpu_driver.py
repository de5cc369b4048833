"""The NVIDIA driver answers and lists the cards."""

from __future__ import annotations

from ..check import Check, Findings, error, ok, skip
from ..gpus import Trouble
from ..machine import Machine

CPU_HINT = "for a look without a GPU: sparsekv doctor --profile cpu-demo"


def _run(machine: Machine) -> Findings:
    if not machine.needs_gpu:
        yield skip("the profile uses no GPU")
        return
    found = machine.gpu_list
    evidence = (found.message,) if found.message else ()
    match found.trouble:
        case Trouble.MISSING if machine.is_wsl:
            yield error(
                "nvidia-smi is not on the path",
                cause="WSL2 keeps it in /usr/lib/wsl/lib, provided by the Windows driver",
                remedy="export PATH=$PATH:/usr/lib/wsl/lib",
            )
        case Trouble.MISSING if machine.container:
            yield error(
                "nvidia-smi is not in this container",
                cause=f"the {machine.container} container was started without GPUs",
                remedy="docker run --gpus all --ipc host …",
            )
        case Trouble.MISSING:
            yield error("nvidia-smi is not installed", cause="there is no NVIDIA driver, or no NVIDIA GPU", remedy=CPU_HINT)
        case Trouble.TIMEOUT:
            yield error(
                "nvidia-smi does not answer",
                *evidence,
                cause="the driver hangs, as after a GPU error (Xid) or with a card that fell off the bus",
                remedy="sudo dmesg | grep -i -e xid -e nvrm | tail; then reboot",
            )
        case Trouble.FAILED if "mismatch" in found.message:
            yield error(
                "the driver's kernel module and its library differ in version",
                *evidence,
                cause="the driver was updated and the old module is still loaded",
                remedy="sudo reboot",
            )
        case Trouble.FAILED:
            yield error(
                "nvidia-smi fails",
                *evidence,
                cause="the kernel module is not loaded, or was built for another kernel",
                remedy="sudo modprobe nvidia && nvidia-smi",
            )
        case Trouble.NONE_FOUND:
            yield error(
                "the driver finds no GPU",
                *evidence,
                cause="the card is not seated or powered, hidden by the BIOS, or bound to another driver (vfio-pci, nouveau)",
                remedy="lspci -nnk -d 10de:",
            )
        case Trouble.LOST:
            yield error(
                f"a GPU is lost; {len(found.gpus)} still answer(s)",
                *evidence,
                cause="it fell off the bus: power, riser or overheating",
                remedy="sudo dmesg | grep -i xid | tail; then power the machine off and on",
            )
        case None:
            yield ok(f"driver {found.gpus[0].driver or 'of unknown version'}, {len(found.gpus)} GPU(s)")


CHECK = Check("gpu.driver", "GPUs", "the NVIDIA driver answers and lists the cards", _run, limit_s=20)
