"""From records to cells, comparisons and a verdict: plain data that every report is made of."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from sparsekv.bench.recall.arms import ARMS
from sparsekv.bench.recall.ask import Record
from sparsekv.bench.recall.plan import CONVERSATION
from sparsekv.bench.recall.stats import Share, paired_loss

PUBLISHED = 300
"""Items a cell needs before its figure is worth quoting."""


@dataclass(frozen=True)
class Floor:
    """What a run must reach."""

    max_loss: float = 0.02
    """Of an arm under its reference, on any task."""
    mass_mean: float | None = None
    """Attention mass on the selected rows; None where it was not measured."""
    mass_p1: float | None = None


def summarise(records: Sequence[Record], floor: Floor, mass: dict[str, Any] | None, run: dict[str, Any]) -> dict[str, Any]:
    """The whole result of a run.

    Args:
        mass: the part `mass` of the result (`bench/recall/simulated.py`), where it was measured.
        run: what was asked of whom; stands in the result as it is.
    """
    arms = [name for name in ARMS if any(record.arm == name for record in records)]
    comparisons = [row for name in arms for row in _compare(records, name)]
    return {
        "schema_version": 1,
        "run": run,
        "verdict": _verdict(comparisons, floor, mass),
        "cells": [row for name in arms for row in _cells(records, name)],
        "comparisons": comparisons,
        "follow_ups": [row for name in arms for row in _follow_ups(records, name)],
        "depths": [row for name in arms for row in _depths(records, name)],
        "mass": mass,
    }


def _cells(records: Sequence[Record], arm: str) -> Iterable[dict[str, Any]]:
    """Right answers of an arm by task and length, cold and on a prefix hit, alone and under load."""
    mine = [record for record in records if record.arm == arm]
    for cell, length, load in sorted({(r.cell, r.length, r.load) for r in mine}):
        chosen = [r for r in mine if (r.cell, r.length, r.load) == (cell, length, load)]
        row: dict[str, Any] = {"arm": arm, "cell": cell, "length": length, "load": load, **_share(chosen)}
        for name, part in (("cold", [r for r in chosen if not r.cached_tokens]), ("hit", [r for r in chosen if r.cached_tokens])):
            row[name] = _share(part) if part else None
        yield row


def _compare(records: Sequence[Record], arm: str) -> Iterable[dict[str, Any]]:
    """The loss of an arm on each task and length, on the questions that its reference was asked too."""
    reference = ARMS[arm].reference
    asked = {(r.load, r.key): r for r in records if r.arm == reference}
    if not reference or not asked:
        return
    mine = [r for r in records if r.arm == arm]
    for cell, length in sorted({(r.cell, r.length) for r in mine}):
        # Under load the reference may not have been asked: what it says alone is what it says.
        pairs = [
            (before, r)
            for r in mine
            if (r.cell, r.length) == (cell, length) and (before := asked.get((r.load, r.key)) or asked.get((1, r.key)))
        ]
        if not pairs:
            continue
        loss = paired_loss([a.right for a, _ in pairs], [b.right for _, b in pairs], [b.context for _, b in pairs])
        yield {
            "arm": arm, "reference": reference, "cell": cell, "length": length, "n": len(pairs),
            "reference_share": sum(a.right for a, _ in pairs) / len(pairs), "share": sum(b.right for _, b in pairs) / len(pairs),
            "loss": loss.mean, "low": loss.low, "high": loss.high, "worse": loss.worse, "better": loss.better, "p_value": loss.p_value,
        }  # fmt: skip


def _follow_ups(records: Sequence[Record], arm: str) -> Iterable[dict[str, Any]]:
    """First questions of conversations against all later ones."""
    mine = [r for r in records if r.arm == arm and r.cell == CONVERSATION]
    for length in sorted({r.length for r in mine}):
        chosen = [r for r in mine if r.length == length]
        yield {
            "arm": arm, "length": length,
            "first": _share([r for r in chosen if r.turn == 0]), "later": _share([r for r in chosen if r.turn > 0]),
        }  # fmt: skip


def _depths(records: Sequence[Record], arm: str) -> Iterable[dict[str, Any]]:
    """Right answers by length and depth, over all tasks whose answer lies in one place."""
    mine = [r for r in records if r.arm == arm and r.depth is not None]
    for length, depth in sorted({(r.length, r.depth or 0.0) for r in mine}):
        yield {"arm": arm, "length": length, "depth": depth, **_share([r for r in mine if (r.length, r.depth) == (length, depth)])}


def _share(records: Sequence[Record]) -> dict[str, Any]:
    share = Share(sum(r.right for r in records), len(records))
    low, high = share.interval
    return {"n": share.n, "right": share.right, "share": share.value if share.n else None, "low": low, "high": high}


def _verdict(comparisons: Sequence[dict[str, Any]], floor: Floor, mass: dict[str, Any] | None) -> dict[str, Any]:
    reasons, notes = [], []
    gated = [row for row in comparisons if row["reference"] == "dense"]
    for row in gated:
        where = f"{row['arm']} on {row['cell']} at {row['length']} tokens"
        if row["loss"] > floor.max_loss:
            reasons.append(
                f"{where}: {100 * row['loss']:.1f} points under {row['reference']} (95 %: {100 * row['low']:.1f} to {100 * row['high']:.1f}), "
                f"allowed {100 * floor.max_loss:.1f}"
            )
    if mass is not None:
        for name, least in (("mean", floor.mass_mean), ("p1", floor.mass_p1)):
            if least is not None and mass["sparse"][name] < least:
                reasons.append(f"the selected rows hold {mass['sparse'][name]:.4f} of the attention ({name}), the profile wants {least:g}")
    if thin := [row for row in gated if row["n"] < PUBLISHED]:
        notes.append(f"{len(thin)} of {len(gated)} cells have fewer than {PUBLISHED} items: their figures are for orientation")
    if blind := sorted({row["cell"] for row in gated if row["reference_share"] < 0.2}):
        notes.append(f"the model itself fails at {', '.join(blind)}: no loss can show there")
    if not gated and mass is None:
        reasons.append("nothing was compared")
    return {"passed": not reasons, "reasons": reasons, "notes": notes, "floor": {"max_loss": floor.max_loss, "mass_mean": floor.mass_mean, "mass_p1": floor.mass_p1}}  # fmt: skip
