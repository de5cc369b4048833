"""vLLM will find the plug-in."""

from __future__ import annotations

from importlib import metadata

from ..check import Check, Findings, error, ok
from ..machine import Machine

GROUP = "vllm.general_plugins"
NAME = "sparsekv"


def _run(machine: Machine) -> Findings:
    points = [point for point in metadata.entry_points(group=GROUP) if point.name == NAME]
    if not points:
        yield error(
            "vLLM will not find the plug-in: the entry point `sparsekv` is missing",
            cause="sparsekv is not installed in this environment, only on its path",
            remedy="pip install -e .",
        )
        return
    allowed = machine.host.environ.get("VLLM_PLUGINS")
    if allowed is not None and NAME not in [name.strip() for name in allowed.split(",")]:
        yield error(f"VLLM_PLUGINS={allowed} keeps the plug-in out", remedy=f"export VLLM_PLUGINS={f'{allowed},' if allowed else ''}{NAME}")
        return
    others = sorted({p.name for p in metadata.entry_points(group=GROUP)} - {NAME})
    yield ok("the plug-in is visible to vLLM", points[0].value, *(f"other plug-in: {name}" for name in others))


CHECK = Check("software.plugin", "Software", "whether vLLM finds the plug-in", _run)
