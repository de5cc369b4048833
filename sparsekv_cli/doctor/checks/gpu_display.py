"""No screen hangs on a card that serves."""

from __future__ import annotations

from ..check import Check, Findings, ok, skip, unknown, warn
from ..machine import Machine


def _run(machine: Machine) -> Findings:
    if not machine.needs_gpu or not machine.cards:
        yield skip("no GPU to look at")
        return
    shown = [gpu for gpu in machine.cards if gpu.display]
    if shown:
        yield warn(
            f"{len(shown)} card(s) drive a display",
            *(gpu.label for gpu in shown),
            cause="the desktop takes memory of the card, more as windows open, and each frame waits for the model",
            remedy="connect the screen to the integrated graphics, or lower memory.gpu_memory_utilization to 0.88",
        )
    if silent := [gpu for gpu in machine.cards if gpu.display is None]:
        yield unknown("the driver does not say whether a display is active", *(gpu.label for gpu in silent))
    elif not shown:
        yield ok("no display on the cards")


CHECK = Check("gpu.display", "GPUs", "whether a screen hangs on a card", _run)
