"""What a fitted sketch is worth on held-out text, beside the oracle and the controls that must lose to it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch

from sparsekv.basis.fit import random_basis, transposed_basis, truncate
from sparsekv.basis.format import LayerFit
from sparsekv.basis.recall import Attention, Probe, Scorer, measure, oracle, recency, select, sketched
from sparsekv.basis.stats import Observer
from sparsekv.kernels.sketch import SketchBasis

BUDGETS = (64, 128, 192, 256, 320, 512, 768, 1024, 1536, 2048, 3072, 4096, 8192)
MASS_TARGET, MASS_TARGET_P1 = 0.97, 0.85
"""A layer's recommended budget is the smallest that reaches both on held-out text."""
CONSECUTIVE = 64
"""Decode steps over which hot slots are counted."""

Progress = Callable[[str, int, int], None]
"""Called with a stage's name, the sequences done, and their number."""


class Source(Protocol):
    """Something that runs the model and shows what its attention layers see."""

    config: Any

    def run(self, tokens: list[int], observer: Observer) -> None: ...


@dataclass
class Report:
    """Held-out measurements: per layer, arm (a rank, or a control's name) -> mass `[len(BUDGETS), Hkv, samples]`."""

    budget: int
    default_rank: int
    mass: dict[str, dict[str, torch.Tensor]]
    touched: dict[str, float]
    """Distinct tokens over `CONSECUTIVE` steps at `budget`, relative to it."""

    def _row(self, key: str, arm: str) -> torch.Tensor:
        return self.mass[key][arm][BUDGETS.index(self.budget)]

    def share_ranks(self, mean_rank: int) -> dict[str, int]:
        """Ranks whose mean is at most `mean_rank`: the layers that gain most are paid for by those that lose least."""
        ranks = sorted({int(arm) for arm in next(iter(self.mass.values())) if arm.isdigit()})
        value = {key: {rank: self._row(key, str(rank)).mean().item() for rank in ranks} for key in self.mass}
        chosen = dict.fromkeys(self.mass, ranks[0])
        spare = mean_rank * len(chosen) - sum(chosen.values())
        while True:
            steps = [
                ((value[key][rank] - value[key][now]) / (rank - now), key, rank)
                for key, now in chosen.items()
                for rank in ranks
                if now < rank <= now + spare
            ]
            if not steps or (best := max(steps))[0] <= 0:
                return chosen
            spare -= best[2] - chosen[best[1]]
            chosen[best[1]] = best[2]

    def layer_fit(self, key: str, rank: int) -> LayerFit:
        mass = self.mass[key][str(rank)]
        row = mass[BUDGETS.index(self.budget)]
        reached = [
            budget
            for budget, at in zip(BUDGETS, mass, strict=True)
            if at.mean() >= MASS_TARGET and at.flatten().quantile(0.01) >= MASS_TARGET_P1
        ]
        budget = reached[0] if reached else BUDGETS[-1]
        return LayerFit(
            rank=rank,
            recall_mean=tuple(round(value, 4) for value in row.mean(dim=1).tolist()),
            recall_p10=tuple(round(value, 4) for value in row.quantile(0.1, dim=1).tolist()),
            budget=budget,
            hot_slots=-(-int(budget * self.touched[key]) // 64) * 64,
        )

    def overall(self, chosen: Mapping[str, int]) -> dict[str, float]:
        def mean(arm: Callable[[str], str]) -> float:
            return round(torch.cat([self._row(key, arm(key)).flatten() for key in self.mass]).mean().item(), 4)

        controls = [arm for arm in next(iter(self.mass.values())) if not arm.isdigit()]
        return {"basis": mean(lambda key: str(chosen[key])), **{name: mean(lambda key, name=name: name) for name in controls}}  # type: ignore[misc]


def heldout_test(
    fitted: Mapping[str, SketchBasis],
    ranks: Sequence[int],
    rank: int,
    bits: Literal[4, 8],
    source: Source,
    sequences: Sequence[list[int]],
    progress: Progress,
) -> Report:
    context = len(sequences[0])
    budget = max((b for b in BUDGETS if b <= max(BUDGETS[0], context // 25)), default=BUDGETS[0])
    keys = list(fitted)
    parts: dict[str, list[dict[str, torch.Tensor]]] = {key: [] for key in keys}
    touched: dict[str, list[float]] = {key: [] for key in keys}
    consecutive = range(context - CONSECUTIVE, context)
    positions = sorted({*consecutive, *range(context // 2, context, max(1, context // 256))})

    def use(key: str, attention: Attention) -> None:
        own = truncate(fitted[key], rank)
        other = truncate(fitted[keys[(keys.index(key) + len(keys) // 2) % len(keys)]], rank)
        scorers: dict[str, Scorer] = {str(r): sketched(truncate(fitted[key], r), bits) for r in ranks}
        scorers |= {"oracle": oracle, "recency": recency, "random": sketched(random_basis(own, 0), bits)}
        if len(keys) > 1:
            scorers["other_layer"] = sketched(other, bits)
        scorers["transposed"] = sketched(transposed_basis(own), bits)
        parts[key].append(measure(attention, scorers, BUDGETS))
        last = Attention(attention.query[:, :, -CONSECUTIVE:], attention.key, attention.positions[-CONSECUTIVE:])
        selected = select(sketched(own, bits)(last), last.positions, budget)
        touched[key].append(sum(len(head.unique()) for head in selected) / len(selected) / min(budget, context))

    for index, tokens in enumerate(sequences):
        progress("held-out test", index, len(sequences))
        source.run(tokens, Probe(len(tokens), positions, use))
    progress("held-out test", len(sequences), len(sequences))
    mass = {key: {arm: torch.cat([part[arm] for part in parts[key]], dim=-1) for arm in parts[key][0]} for key in keys}
    return Report(budget, rank, mass, {key: sum(values) / len(values) for key, values in touched.items()})
