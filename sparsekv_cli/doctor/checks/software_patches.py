"""The optional patches are whole, or there are none."""

from __future__ import annotations

from ..check import Check, Findings, error, info, ok, skip, warn
from ..machine import Machine


def _run(machine: Machine) -> Findings:
    from sparsekv.patches.operations import verify
    from sparsekv.patches.series import bundled_series
    from sparsekv.patches.status import State, status

    if machine.vllm is None:
        yield skip("vLLM is not installed")
        return
    series = bundled_series()
    found = status(machine.vllm, series)
    if any(patch.state is State.NOT_APPLICABLE for patch in found.patches):
        yield info(f"there are no patches for vLLM {machine.vllm.version}; the plug-in works without them")
    elif found.applied_at is None:
        active = [f"{patch.name}: {patch.without_it}" for patch in found.patches if not patch.in_effect]
        drifted = [f"{patch.name}: {patch.detail}" for patch in found.patches if patch.state is State.DRIFTED]
        if drifted:
            yield warn("vLLM's files differ from the release, and some patches would not fit", *drifted)
        yield ok(f"no patches are applied; {len(active)} work-around(s) of the plug-in are active", *active)
    else:
        problems = verify(machine.vllm, series)
        if problems:
            yield error("the patches are not in order", *problems, remedy="sparsekv patch apply")
        else:
            yield ok(f"{found.series} is applied and untouched")
    for name, patches in found.foreign.items():
        yield info(f"vLLM is also patched by {name}", *patches)
    if found.applied_at is None and any("interrupted" in note for note in found.notes):
        yield warn("a run of `sparsekv patch` was interrupted", *found.notes, remedy="sparsekv patch revert")


CHECK = Check("software.patches", "Software", "state of the optional patches", _run)
