"""What a metric is: a function with a title and a unit, whose docstring is the definition that stands in every report."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from .data import Window

Value = float | Sequence[float] | None


@dataclass(frozen=True)
class Metric:
    """`compute` gives one number, the samples of a distribution, or None where the run does not say."""

    name: str
    title: str
    unit: str
    """s, tok/s, …; `%` for a share between 0 and 1."""
    better: str
    """higher, lower, or empty where neither is good in itself."""
    formula: str
    compute: Callable[[Window], Value]
    digits: int


METRICS: dict[str, Metric] = {}
"""In the order of their declaration, which is that of the report."""

STATISTICS = ("mean", "p50", "p90", "p95", "p99", "max", "n")


def metric(title: str, unit: str, better: str = "", digits: int = 1) -> Callable[[Callable[[Window], Value]], Callable[[Window], Value]]:
    """Declares the decorated function as a metric of its name."""

    def declare(compute: Callable[[Window], Value]) -> Callable[[Window], Value]:
        formula = " ".join(inspect.getdoc(compute).split())  # type: ignore[union-attr]
        METRICS[compute.__name__] = Metric(compute.__name__, title, unit, better, formula, compute, digits)
        return compute

    return declare


def evaluate(window: Window) -> dict[str, float | dict[str, float]]:
    """Every metric that the window has a value for; distributions as `STATISTICS`."""
    values: dict[str, float | dict[str, float]] = {}
    for name, each in METRICS.items():
        value = each.compute(window)
        if value is None or (not isinstance(value, float | int) and len(value) == 0):
            continue
        values[name] = float(value) if isinstance(value, float | int) else summarize(value)
    return values


def summarize(samples: Sequence[float]) -> dict[str, float]:
    """Percentiles by linear interpolation (numpy's default), over every sample."""
    array = np.asarray(samples, dtype=float)
    p50, p90, p95, p99 = (float(p) for p in np.percentile(array, (50, 90, 95, 99)))
    return {"mean": float(array.mean()), "p50": p50, "p90": p90, "p95": p95, "p99": p99, "max": float(array.max()), "n": len(array)}
