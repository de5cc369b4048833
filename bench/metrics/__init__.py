"""Metrics as declarations: each a function with a title, a unit and its definition. Importing this package declares them all."""

from . import latency, throughput, fairness, quality, cache, sparsity, resources  # noqa: F401, I001  # their order is the report's
from .data import Run, Window, load
from .declare import METRICS, STATISTICS, Metric, evaluate, summarize
from .verdict import Verdict, judge

__all__ = ["METRICS", "STATISTICS", "Metric", "Run", "Verdict", "Window", "evaluate", "judge", "load", "summarize"]
