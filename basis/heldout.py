"""What a fitted sketch is worth on held-out text, beside the oracle and the controls that must lose to it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeVar

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

QUERIES = 64
"""Query positions per held-out sequence, spread over its second half."""

K = TypeVar("K")

Progress = Callable[[str, int, int], None]
"""Called with a stage's name, the sequences done, and their number."""


class Source(Protocol):
    """Something that runs the model and shows what its attention layers see."""

    config: Any

    def run(self, tokens: list[int], observer: Observer) -> None: ...


@dataclass
class Report:
    """Held-out measurements of every layer."""

    budget: int
    mass: dict[str, dict[int, torch.Tensor]]
    """Layer -> rank -> `[len(BUDGETS), Hkv, samples]`."""
    controls: dict[str, dict[str, torch.Tensor]]
    """Layer -> oracle or control -> `[Hkv, samples]` at `budget`."""
    touched: dict[str, float]
    """Distinct tokens over `CONSECUTIVE` steps at `budget`, relative to it."""

    def _row(self, key: str, rank: int) -> torch.Tensor:
        return self.mass[key][rank][BUDGETS.index(self.budget)]

    def share_ranks(self, mean_rank: int) -> dict[str, int]:
        """Ranks whose mean is at most `mean_rank`: the layers that gain most are paid for by those that lose least."""
        ranks = sorted(next(iter(self.mass.values())))
        value = {key: {rank: self._row(key, rank).mean().item() for rank in ranks} for key in self.mass}
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
        mass, row = self.mass[key][rank], self._row(key, rank)
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
        arms = {"basis": [self._row(key, rank) for key, rank in chosen.items()]}
        arms |= {name: [layer[name] for layer in self.controls.values()] for name in next(iter(self.controls.values()))}
        return {name: round(torch.cat([part.flatten() for part in parts]).mean().item(), 4) for name, parts in arms.items()}


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
    mass: dict[str, dict[int, list[torch.Tensor]]] = {key: {} for key in keys}
    controls: dict[str, dict[str, list[torch.Tensor]]] = {key: {} for key in keys}
    touched: dict[str, list[float]] = {key: [] for key in keys}
    spread = range(context // 2, context, max(1, context // (2 * QUERIES)))
    consecutive = range(context - CONSECUTIVE, context)
    positions = sorted({*spread, *consecutive})

    def use(key: str, attention: Attention) -> None:
        own = truncate(fitted[key], rank)
        other = truncate(fitted[keys[(keys.index(key) + len(keys) // 2) % len(keys)]], rank)
        rivals: dict[str, Scorer] = {"oracle": oracle, "recency": recency, "random": sketched(random_basis(own, 0), bits)}
        if len(keys) > 1:
            rivals["other_layer"] = sketched(other, bits)
        rivals["transposed"] = sketched(transposed_basis(own), bits)
        sampled = attention.at(spread)
        for r, found in measure(sampled, {r: sketched(truncate(fitted[key], r), bits) for r in ranks}, BUDGETS).items():
            mass[key].setdefault(r, []).append(found)
        for name, found in measure(sampled, rivals, [budget]).items():
            controls[key].setdefault(name, []).append(found[0])
        last = attention.at(consecutive)
        selected = select(sketched(own, bits)(last), last.positions, budget)
        touched[key].append(sum(len(head.unique()) for head in selected) / len(selected) / min(budget, context))

    for index, tokens in enumerate(sequences):
        progress("held-out test", index, len(sequences))
        source.run(tokens, Probe(len(tokens), positions, use))
    progress("held-out test", len(sequences), len(sequences))
    return Report(budget, _joined(mass), _joined(controls), {key: sum(values) / len(values) for key, values in touched.items()})


def _joined(parts: Mapping[str, Mapping[K, Sequence[torch.Tensor]]]) -> dict[str, dict[K, torch.Tensor]]:
    return {key: {arm: torch.cat(list(found), dim=-1) for arm, found in layer.items()} for key, layer in parts.items()}
