"""Running the GPU measurements in a process of their own, where a hanging driver or a failing kernel harms nobody else."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from .gpus import Gpu
from .host import Host

PROBE_SECONDS = 150.0


@dataclass(frozen=True)
class CardProbe:
    """One card's measurements; rates in bytes per second. What could not be measured is missing or None."""

    uuid: str
    pinned_bytes: int | None = None
    """Host memory that was page-locked and mapped for the card."""
    copy_rate: float | None = None
    """Contiguous copies from page-locked memory."""
    gather_rates: dict[int, float] | None = None
    """Rows read in place at random, by row size."""
    link_gen: int | None = None
    link_width: int | None = None
    """As the kernel reports them during the copies."""
    problems: tuple[str, ...] = ()


@dataclass(frozen=True)
class ProbeResult:
    """All cards, or the reason why nothing was measured."""

    cards: dict[str, CardProbe]
    failure: str = ""


def run_probe(host: Host, gpus: Sequence[Gpu], row_bytes: Sequence[int]) -> ProbeResult:
    """Measures each card in turn. Needs torch with CUDA; takes about ten seconds a card."""
    if not gpus:
        return ProbeResult({}, "there is no card to measure")
    cards = [[gpu.uuid, gpu.bus_id] for gpu in gpus]
    answer = host.run(
        sys.executable,
        "-P",
        "-m",
        "sparsekv_cli.doctor.probe_main",
        json.dumps({"cards": cards, "rows": list(row_bytes)}),
        seconds=PROBE_SECONDS,
    )
    if answer.failure == "timeout":
        return ProbeResult({}, f"the measurement did not end within {PROBE_SECONDS:.0f} s")
    found = {}
    for line in answer.stdout.splitlines():
        if line.startswith("{"):
            fields = json.loads(line)
            rates = fields.get("gather_rates")
            fields["gather_rates"] = {int(size): rate for size, rate in rates.items()} if rates else None
            fields["problems"] = tuple(fields.get("problems", ()))
            found[fields["uuid"]] = CardProbe(**fields)
    if found:
        return ProbeResult(found)
    return ProbeResult({}, (answer.stderr.strip().splitlines() or ["the measurement said nothing"])[-1])
