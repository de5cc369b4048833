"""Shares with their uncertainty: one arm alone, and two arms that were asked the same questions."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

Z = 1.959964
"""Two-sided 95 %."""
RESAMPLES = 2000


@dataclass(frozen=True)
class Share:
    """`right` of `n`, with the Wilson interval of 95 %."""

    right: int
    n: int

    @property
    def value(self) -> float:
        return self.right / self.n if self.n else math.nan

    @property
    def interval(self) -> tuple[float, float]:
        if not self.n:
            return 0.0, 1.0
        p, n = self.value, self.n
        centre, spread = p + Z * Z / (2 * n), Z * math.sqrt(p * (1 - p) / n + Z * Z / (4 * n * n))
        low, high = ((centre + sign * spread) / (1 + Z * Z / n) for sign in (-1, 1))
        return max(0.0, low), min(1.0, high)


@dataclass(frozen=True)
class Loss:
    """How much worse an arm is than its reference on the same questions, as a difference of shares."""

    mean: float
    low: float
    high: float
    worse: int
    """Questions that only the reference answers."""
    better: int
    """Questions that only the arm answers."""

    @property
    def p_value(self) -> float:
        """Exact two-sided McNemar test: the chance of so uneven a split if neither arm were better."""
        n, k = self.worse + self.better, min(self.worse, self.better)
        return min(1.0, 2 * sum(math.comb(n, i) for i in range(k + 1)) / 2**n) if n else 1.0


def paired_loss(reference: Sequence[bool], arm: Sequence[bool], contexts: Sequence[str]) -> Loss:
    """The loss with a 95 % interval, from resampled contexts: questions about one context stand or fall together.

    The three sequences run over the same questions; `contexts` names each question's context. Where resampling shows no
    spread at all, the interval is that of the rule of three: what m contexts never showed may still happen in 3 of m.
    """
    if not len(reference) == len(arm) == len(contexts) or not reference:
        raise ValueError("paired results must be of the same questions, at least one")
    differences: dict[str, list[int]] = {}
    for ours, theirs, context in zip(arm, reference, contexts, strict=True):
        differences.setdefault(context, []).append(int(theirs) - int(ours))
    groups = list(differences.values())
    n = len(reference)
    mean = sum(map(sum, groups)) / n
    rng = random.Random(0)
    resampled = []
    for _ in range(RESAMPLES):
        drawn = rng.choices(groups, k=len(groups))
        resampled.append(sum(map(sum, drawn)) / sum(map(len, drawn)))
    resampled.sort()
    low, high = resampled[int(0.025 * RESAMPLES)], resampled[int(0.975 * RESAMPLES) - 1]
    if low == high:
        margin = min(1.0, 3 / len(groups))
        low, high = max(-1.0, mean - margin), min(1.0, mean + margin)
    worse = sum(theirs and not ours for ours, theirs in zip(arm, reference, strict=True))
    better = sum(ours and not theirs for ours, theirs in zip(arm, reference, strict=True))
    return Loss(mean, low, high, worse, better)
