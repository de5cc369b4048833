"""Two runs, or two sets of repeats, side by side: what changed, and whether the change is more than their spread."""

from __future__ import annotations

import json
import math
import re
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparsekv.bench.metrics import METRICS, STATISTICS
from sparsekv.profiles.errors import SparsekvError

from .format import number
from .summary import SCHEMA_VERSION
from .tables import TITLES

SHOWN = ("p50", "p99")
"""Statistics of a distribution that stand in the table; a gate may name any."""
T_95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101)
"""Student's t, two-sided 95 %, for 1, 2, … degrees of freedom."""
MUST_MATCH = ("agents", "context", "turns", "answer_tokens", "decode_seconds", "intruder_tokens", "plan", "ignore_eos", "warm")


@dataclass(frozen=True)
class Change:
    """One figure on both sides. With repeats on both, `interval` is that of the difference of the means (Welch, 95 %)."""

    window: str
    metric: str
    statistic: str | None
    a: float | None
    b: float | None
    interval: tuple[float, float] | None

    @property
    def difference(self) -> float | None:
        return None if self.a is None or self.b is None else self.b - self.a

    @property
    def relative(self) -> float | None:
        return self.difference / abs(self.a) if self.difference is not None and self.a else None

    @property
    def beyond_spread(self) -> bool | None:
        """Whether the interval leaves 0 out; None without repeats."""
        return None if self.interval is None else not self.interval[0] <= 0 <= self.interval[1]

    def to_json(self) -> dict[str, Any]:
        return {
            "window": self.window, "metric": self.metric, "statistic": self.statistic, "a": self.a, "b": self.b,
            "difference": self.difference, "relative": self.relative, "interval_95": self.interval, "beyond_spread": self.beyond_spread,
        }  # fmt: skip


@dataclass(frozen=True)
class Gate:
    """`[WINDOW.]METRIC[.STATISTIC]` `<` or `>` a limit: `+5%` and `-3` are changes, `0.97` is B's own value."""

    text: str
    window: str | None
    metric: str
    statistic: str | None
    above: bool
    limit: float
    kind: str
    """relative, change or value."""

    def failed(self, changes: Sequence[Change]) -> str | None:
        """Why it fails, or None.

        Raises:
            SparsekvError: neither side has the figure: such a gate would always pass.
        """
        found = [c for c in changes if c.metric == self.metric and c.statistic == self.statistic and self.window in (None, c.window)]
        chosen = next((c for c in found if c.window in ("decode", "replay")), found[0] if found else None)
        if chosen is None:
            raise SparsekvError(f"--fail-if {self.text!r}: no run has this figure", hint="`sparsekv bench compare A B` lists those it has")
        unit = METRICS[self.metric].unit if self.metric in METRICS else ""
        value = {"relative": chosen.relative, "change": chosen.difference, "value": chosen.b}[self.kind]
        if value is None:
            return f"{self.text}: one of the runs lacks the figure, or it was 0"
        if not (value > self.limit if self.above else value < self.limit):
            return None
        if self.kind != "value" and chosen.beyond_spread is False:
            return None
        shown = f"{100 * value:+.1f} %" if self.kind == "relative" else number(value, unit, 3)
        return f"{self.text}: it is {shown} in {TITLES.get(chosen.window, chosen.window)}"


_GATE = re.compile(r"\s*([\w.]+?)\s*([<>])\s*([+-]?)(\d+(?:\.\d+)?)\s*(%?)\s*")


def parse_gate(text: str) -> Gate:
    """Reads a `--fail-if`.

    Raises:
        SparsekvError: it is not of that form, or names no metric.
    """
    hint = "for example `--fail-if tpot.p99>+5%` or `--fail-if 'recall<0.97'`"
    match = _GATE.fullmatch(text)
    if match is None:
        raise SparsekvError(f"--fail-if {text!r}: not a figure, `<` or `>`, and a limit", hint=hint)
    path, sign, minus, amount, percent = match.groups()
    names = path.split(".")
    statistic = names.pop() if names[-1] in STATISTICS else None
    if not 1 <= len(names) <= 2 or names[-1] not in METRICS:
        raise SparsekvError(f"--fail-if {text!r}: no metric {names[-1]!r}; there are {', '.join(METRICS)}", hint=hint)
    limit = float(minus + amount) * (0.01 if percent else 1.0)
    kind = "relative" if percent else "change" if minus else "value"
    return Gate(text, names[0] if len(names) == 2 else None, names[-1], statistic, sign == ">", limit, kind)


@dataclass
class Comparison:
    a: list[dict[str, Any]]
    b: list[dict[str, Any]]
    changes: list[Change]
    warnings: list[str]
    """Why the two may not be compared."""

    def to_json(self) -> dict[str, Any]:
        names = {side: [s["run"]["name"] for s in runs] for side, runs in (("a", self.a), ("b", self.b))}
        return {"schema_version": 1, **names, "warnings": self.warnings, "changes": [c.to_json() for c in self.changes]}

    def invalid(self) -> list[str]:
        return [s["run"]["name"] for s in (*self.a, *self.b) if not s["verdict"]["valid"]]

    def rows(self) -> Iterator[tuple[str, ...]]:
        """Window, figure, A, B, change, 95 % interval, judgement."""
        for c in self.changes:
            definition = METRICS.get(c.metric)
            unit, digits, better = (definition.unit, definition.digits, definition.better) if definition else ("", 3, "")
            title = (definition.title if definition else c.metric) + (f" {c.statistic}" if c.statistic else "")
            change = "–" if c.relative is None else f"{100 * c.relative:+.1f} %"
            interval = "–"
            if c.interval is not None and c.a:
                interval = " to ".join(f"{100 * end / abs(c.a):+.1f} %" for end in c.interval)
            values = (number(c.a, unit, digits), number(c.b, unit, digits))
            yield TITLES.get(c.window, c.window), title, *values, change, interval, _judge(c, better)


def compare(a: Path, b: Path) -> Comparison:
    """Compares two runs; each side is the folder of a run, its summary.json, or a folder of repeats.

    Raises:
        SparsekvError: a side holds no run.
    """
    left, right = summaries(a), summaries(b)
    return Comparison(left, right, list(_changes(left, right)), list(_warnings(left, right)))


def summaries(path: Path) -> list[dict[str, Any]]:
    """The summaries of a run or of all runs in a folder."""
    if path.is_dir():
        files = [path / "summary.json"] if (path / "summary.json").is_file() else sorted(path.glob("*/summary.json"))
    else:
        files = [path]
    if not files:
        raise SparsekvError(f"{path} holds no run", hint="give a run's folder, or a folder of runs of the same load")
    return [_read(file) for file in files]


def _read(file: Path) -> dict[str, Any]:
    try:
        summary = json.loads(file.read_text())
        version = summary["schema_version"]
    except OSError as error:
        raise SparsekvError(f"{file}: {error.strerror}") from None
    except (ValueError, TypeError, KeyError):
        raise SparsekvError(f"{file} is not the summary of a run") from None
    if version != SCHEMA_VERSION:
        raise SparsekvError(f"{file}: schema version {version}, this sparsekv reads {SCHEMA_VERSION}")
    return summary  # type: ignore[no-any-return]


def _changes(left: list[dict[str, Any]], right: list[dict[str, Any]]) -> Iterator[Change]:
    tables = [[_figures(summary) for summary in side] for side in (left, right)]
    keys = dict.fromkeys(key for side in tables for run in side for key in run)
    order = list(dict.fromkeys(window for window, _, _ in keys))
    for key in sorted(keys, key=lambda key: order.index(key[0])):
        a, b = ([run[key] for run in side if key in run] for side in tables)
        yield Change(*key, statistics.fmean(a) if a else None, statistics.fmean(b) if b else None, difference_interval(a, b))


def _figures(summary: dict[str, Any]) -> dict[tuple[str, str, str | None], float]:
    """(window, metric, statistic) -> value."""
    found: dict[tuple[str, str, str | None], float] = {}
    for window in summary["windows"]:
        for name, value in window["metrics"].items():
            if isinstance(value, dict):
                found |= {(window["name"], name, statistic): value[statistic] for statistic in STATISTICS if statistic in value}
            else:
                found[window["name"], name, None] = value
    return found


def difference_interval(a: Sequence[float], b: Sequence[float]) -> tuple[float, float] | None:
    """95 % interval of mean(b) - mean(a) (Welch 1947); None with less than two repeats on a side."""
    if len(a) < 2 or len(b) < 2:
        return None
    parts = [statistics.variance(side) / len(side) for side in (a, b)]
    difference, error = statistics.fmean(b) - statistics.fmean(a), math.sqrt(sum(parts))
    if error == 0:
        return difference, difference
    freedom = sum(parts) ** 2 / sum(part**2 / (len(side) - 1) for part, side in zip(parts, (a, b), strict=True))
    # Between whole degrees of freedom the wider interval; beyond the table the normal one is within 4 %.
    t = T_95[int(freedom) - 1] if int(freedom) <= len(T_95) else T_95[-1]
    return difference - t * error, difference + t * error


def _warnings(left: list[dict[str, Any]], right: list[dict[str, Any]]) -> Iterator[str]:
    runs = [*left, *right]
    for summary in runs:
        if not summary["verdict"]["valid"]:
            reasons = "; ".join(reason["text"] for reason in summary["verdict"]["reasons"])
            yield f"{summary['run']['name']} is INVALID: {reasons}"
    for name in MUST_MATCH:
        values = {json.dumps(s["run"]["options"].get(name)) for s in runs}
        if len(values) > 1:
            yield f"the loads differ in {name}: {', '.join(sorted(values))}"
    for title, values in (
        ("model", {s["run"]["server"]["model"] for s in runs}),
        ("kind of load", {s["run"]["kind"] for s in runs}),
        ("machine", {json.dumps([s["environment"]["cpu"], [g.get("name") for g in s["environment"]["gpus"]]]) for s in runs}),
    ):
        if len(values) > 1:
            yield f"the {title} differs: {', '.join(sorted(values))}"
    if len(left) < 2 or len(right) < 2:
        yield "one run on a side says nothing about spread: repeat each three times for an interval"


def _judge(change: Change, better: str) -> str:
    if change.beyond_spread is None or not better or not change.difference:
        return ""
    if not change.beyond_spread:
        return "within spread"
    return "better" if (change.difference > 0) == (better == "higher") else "worse"
