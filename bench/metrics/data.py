"""A run's folder read back: requests, samples and server counters, and what falls into a window of time."""

from __future__ import annotations

import bisect
import csv
import functools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from sparsekv.bench.swarm.records import RequestRecord
from sparsekv.profiles.errors import SparsekvError


@dataclass
class Run:
    """Everything a report is made of. The run may be over, cut short or still going on."""

    folder: Path
    info: dict[str, Any]
    """run.json: options, server, repository, phases, state."""
    environment: dict[str, Any]
    requests: list[RequestRecord]
    samples: list[dict[str, Any]]
    """Rows of timeseries.csv; numbers, None where a cell is empty, and the phase's name."""
    scrapes: list[tuple[float, dict[str, float]]]
    """Time and values of each reading of the server's metrics."""

    @property
    def agents(self) -> int:
        return int(self.info["options"]["agents"])

    @property
    def windows(self) -> list[Window]:
        return [window for phase in self.info["phases"] for window in _windows(self, phase)]

    @functools.cached_property
    def total(self) -> Window:
        """The whole run, ramps and drains included."""
        ends = [r.end for r in self.requests] + [s["t"] for s in self.samples] + [t for t, _ in self.scrapes]
        return Window(self, "run", 0.0, max(ends, default=0.0), self.requests)


@dataclass
class Window:
    """A stretch of a run. `requests` are all of the phase; rates count what fell between `start` and `end`."""

    run: Run
    name: str
    start: float
    end: float
    requests: list[RequestRecord]
    intruder: list[RequestRecord] = field(default_factory=list)
    before: Window | None = None
    """The calm before an intruder."""

    @property
    def seconds(self) -> float:
        return self.end - self.start

    @property
    def answered(self) -> list[RequestRecord]:
        return [r for r in self.requests if r.ok]

    @property
    def measured(self) -> list[RequestRecord]:
        """Answered, or stopped by us while all was well."""
        return [r for r in self.requests if not r.failed]

    @functools.cached_property
    def events(self) -> dict[int, tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Agent -> times, tokens and gaps before (NaN at a stream's first) of the events between start and end."""
        found: dict[int, list[tuple[np.ndarray, np.ndarray, np.ndarray]]] = {}
        for record in self.measured:
            if record.first is None or record.first >= self.end or (record.last or record.first) < self.start:
                continue
            gaps = np.array(record.gaps_ms) / 1e3
            times = record.first + np.concatenate([[0.0], np.cumsum(gaps)])
            inside = (times >= self.start) & (times < self.end)
            tokens = np.array(record.tokens_of_events)
            if inside.any():
                found.setdefault(record.agent, []).append((times[inside], tokens[inside], np.concatenate([[np.nan], gaps])[inside]))
        return {a: tuple(np.concatenate(part) for part in zip(*parts, strict=True)) for a, parts in sorted(found.items())}  # type: ignore[misc]

    @functools.cached_property
    def active(self) -> bool:
        """Whether any request was under way between start and end, be it in silence."""
        return any(r.sent < self.end and r.end > self.start for r in self.measured)

    def output_tokens(self, agent: int | None = None) -> float:
        """Output tokens whose event arrived in the window."""
        chosen = self.events.values() if agent is None else [self.events[agent]] if agent in self.events else []
        return float(sum(tokens.sum() for _, tokens, _ in chosen))

    def turns(self) -> Iterator[list[RequestRecord]]:
        """The requests of each turn that ended with an answer: retries, and the rounds of its tool calls."""
        found: dict[tuple[int, int], list[RequestRecord]] = {}
        for record in self.requests:
            found.setdefault((record.agent, record.turn), []).append(record)
        for records in found.values():
            records.sort(key=lambda r: r.sent)
            if records[-1].ok:
                yield records

    def counter(self, name: str) -> float | None:
        """How much a server counter grew in the window, between scrapes by straight lines; None if the server has no such counter."""
        start, end = self._value(name, self.start), self._value(name, self.end)
        return None if start is None or end is None else max(0.0, end - start)

    def ratio(self, part: str, whole: Sequence[str]) -> float | None:
        """Growth of `part` over the growth of all of `whole` together."""
        top, bottom = self.counter(part), [self.counter(name) for name in whole]
        total = sum(b for b in bottom if b is not None)
        return None if top is None or not total else top / total

    def gauge(self, name: str) -> list[float]:
        return [values[name] for t, values in self.run.scrapes if self.start <= t <= self.end and name in values]

    def sampled(self, column: str) -> list[float]:
        """Values of a column of the time series in the window; each row tells of the second before it."""
        rows = self.run.samples
        return [row[column] for row in rows if self.start < row["t"] <= self.end + 0.5 and row.get(column) is not None]

    def grown(self, column: str) -> float | None:
        """How much a column that counts up grew in the window, by straight lines."""
        points = [(row["t"], row[column]) for row in self.run.samples if row.get(column) is not None]
        return None if len(points) < 2 else _interpolate(points, self.end) - _interpolate(points, self.start)

    def _value(self, name: str, moment: float) -> float | None:
        points = [(t, values[name]) for t, values in self.run.scrapes if name in values]
        if not points:
            return None
        # A labelled counter appears with its first increment: it was 0 before.
        first = self.run.scrapes[0]
        if name not in first[1]:
            before = max(t for t, values in self.run.scrapes if t <= points[0][0] and name not in values)
            points.insert(0, (before, 0.0))
        return _interpolate(points, moment)


def load(folder: Path) -> Run:
    """Reads a run's folder, also one that is still being written or was cut in the middle of a line.

    Raises:
        SparsekvError: not the folder of a run.
    """
    try:
        info = json.loads((folder / "run.json").read_text())
        environment = json.loads((folder / "environment.json").read_text())
    except (OSError, ValueError) as error:
        raise SparsekvError(f"{folder} is not the folder of a run: {error}") from None
    requests = [RequestRecord.from_json(value) for value in _lines(folder / "requests.jsonl")]
    scrapes = [(value["t"], value["metrics"]) for value in _lines(folder / "server_metrics.jsonl")]
    return Run(folder, info, environment, requests, _samples(folder / "timeseries.csv"), scrapes)


def _windows(run: Run, phase: dict[str, Any]) -> Iterator[Window]:
    start = phase["window_start"]
    end = phase["window_end"] or phase["end"] or run.total.end
    if start is None or end <= start:
        return
    own = [r for r in run.requests if r.phase == phase["name"]]
    if phase["name"] != "intrusion":
        yield Window(run, phase["name"], start, end, own)
        return
    sent, first = phase["marks"].get("intruder_sent"), phase["marks"].get("intruder_first")
    others, intruder = [r for r in own if r.kind != "intrude"], [r for r in own if r.kind == "intrude"]
    before = Window(run, "before_intruder", start, sent or end, others)
    yield before
    if sent is not None:
        yield Window(run, "during_intruder", sent, first or end, others, intruder, before)
    if first is not None and end > first:
        yield Window(run, "after_intruder", first, end, others)


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    if not path.is_file():
        return
    with path.open() as file:
        for line in file:
            try:
                yield json.loads(line)
            except ValueError:
                continue  # cut short while it was written


def _samples(path: Path) -> list[dict[str, Any]]:
    if not path.is_file():
        return []
    rows = []
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            try:
                rows.append({k: v if k == "phase" else float(v) if v else None for k, v in row.items() if k})
            except (ValueError, TypeError):
                continue
    return [row for row in rows if row.get("t") is not None]


def _interpolate(points: Sequence[tuple[float, float]], moment: float) -> float:
    times = [t for t, _ in points]
    i = bisect.bisect_left(times, moment)
    if i == 0:
        return points[0][1]
    if i == len(points):
        return points[-1][1]
    (t0, v0), (t1, v1) = points[i - 1], points[i]
    return v0 + (v1 - v0) * (moment - t0) / (t1 - t0)
