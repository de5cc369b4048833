"""The basis file is whole and belongs to the model."""

from __future__ import annotations

from pathlib import Path

from sparsekv.profiles.errors import SparsekvError

from ..check import Check, Findings, error, ok, skip, unknown, warn
from ..machine import Machine


def _run(machine: Machine) -> Findings:
    if machine.profile is None:
        yield skip("no profile, no basis")
        return
    from sparsekv.basis.header import check_identity, read_metadata

    sketch = machine.profile.sketch
    path = Path(sketch.basis)
    try:
        metadata = read_metadata(path)
    except SparsekvError as problem:
        yield error(problem.message, remedy=problem.hint or "")
        return
    if metadata.rank != sketch.rank or metadata.bits != sketch.bits:
        yield error(
            f"{path.name} is of rank {metadata.rank} with {metadata.bits} bits, the profile says rank {sketch.rank} with {sketch.bits}",
            remedy=f"set sketch.rank: {metadata.rank} and sketch.bits: {metadata.bits}",
        )
    if machine.model_config is None:
        yield unknown(f"{path.name} was not compared with the model, whose config.json cannot be read")
        return
    try:
        warnings = check_identity(metadata, machine.model_config, source=str(path))
    except SparsekvError as problem:
        yield error(problem.message, *problem.details, remedy=problem.hint or "")
        return
    except (KeyError, TypeError, ValueError) as problem:
        yield unknown(f"config.json lacks what the comparison with the basis needs: {problem}")
        return
    for text in warnings:
        yield warn(text)
    recall = metadata.recall.get("basis")
    yield ok(
        f"{path.name}: rank {metadata.rank}, {metadata.bits} bits, for this model",
        f"held-out attention mass at {metadata.recall_budget} tokens: {recall:.3f}" if recall else "no held-out measurement",
    )


CHECK = Check("model.basis", "Model", "whether the basis file is whole and of this model", _run, limit_s=60)
