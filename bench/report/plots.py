"""The plots of a report as SVG text that scales with the page and takes its colours for text and lines from it."""

from __future__ import annotations

import io
import itertools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from sparsekv.bench.metrics import Run, Window

from .summary import by_context
from .tables import TITLES

INK = "#010203"
"""Stands for the page's own text colour in the SVG."""
COLORS = {
    "fill": "#8a8f98", "warm": "#2f7ed8", "decode": "#1a9850", "replay": "#1a9850",
    "before_intruder": "#12838a", "during_intruder": "#d7301f", "after_intruder": "#8250c4", "intrusion": "#d7301f",
}  # fmt: skip
STYLE: Any = {
    "svg.fonttype": "none", "svg.hashsalt": "sparsekv", "font.family": "sans-serif", "font.size": 11,
    "text.color": INK, "axes.labelcolor": INK, "axes.edgecolor": INK, "xtick.color": INK, "ytick.color": INK,
    "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.2, "grid.color": INK,
    "axes.titlesize": 12, "axes.titleweight": "bold", "legend.frameon": False, "legend.fontsize": 10, "figure.constrained_layout.use": True,
}  # fmt: skip
MAX_POINTS = 4000
"""Of one scatter or curve; more would only make the page heavy."""
MIN_GAP_MS = 0.1
"""Events that came in one packet are drawn here, since a logarithm has no 0."""


@dataclass(frozen=True)
class Plot:
    name: str
    title: str
    svg: str


def draw_all(run: Run) -> list[Plot]:
    """Every plot that the run has data for."""
    plots = []
    with matplotlib.rc_context(STYLE):
        for number, (name, title, draw) in enumerate(_PLOTS):
            figure = Figure(figsize=(5.7, 3.7))
            axes = figure.add_subplot()
            if draw(axes, run):
                axes.set_title(title, loc="left")
                plots.append(Plot(name, title, _svg(figure, f"p{number}")))
    return plots


def _rates(axes: Axes, run: Run) -> bool:
    """Output rate by second, with the phases behind it."""
    points = [(s["t"], s["output_tokens"]) for s in run.samples if s.get("output_tokens") is not None]
    if len(points) < 3:
        return False
    times, counts = (np.array(column) for column in zip(*points, strict=True))
    axes.plot(times[1:], np.diff(counts) / np.maximum(np.diff(times), 1e-9), color=INK, linewidth=1)
    for window in run.windows:
        axes.axvspan(
            window.start, window.end, color=COLORS.get(window.name, "#888888"), alpha=0.15, linewidth=0, label=TITLES.get(window.name)
        )
    axes.set_xlabel("time (s)")
    axes.set_ylabel("output tok/s")
    axes.set_ylim(bottom=0)
    axes.margins(x=0)
    _legend(axes)
    return True


def _lanes(axes: Axes, run: Run) -> bool:
    """One lane per agent: waiting for the first token, then decoding."""
    requests = [r for r in run.requests if r.first is not None or r.failed][-6000:]
    if not requests:
        return False
    parts: dict[str, tuple[str, list[tuple[int, float, float]]]] = {
        "reading": ("#f0a030", []),
        "decoding": ("#1a9850", []),
        "failed": ("#d7301f", []),
    }
    for r in requests:
        middle = r.first if r.first is not None else r.end
        parts["reading"][1].append((r.agent, r.sent, middle - r.sent))
        if not r.failed:
            parts["decoding"][1].append((r.agent, middle, max(0.0, r.end - middle)))
        else:
            parts["failed"][1].append((r.agent, middle, max(r.end - middle, 0.002 * run.total.end)))
    for label, (color, bars) in parts.items():
        if bars:
            lanes, left, width = zip(*bars, strict=True)
            axes.barh(lanes, width, left=left, height=0.8, color=color, linewidth=0, label=label)
    highest = max(r.agent for r in requests)
    axes.set_ylim(highest + 0.6, -0.6)
    axes.set_yticks(range(0, highest + 1, max(1, (highest + 8) // 8)))
    axes.set_xlabel("time (s)")
    axes.set_ylabel("agent")
    axes.margins(x=0)
    _legend(axes)
    return True


def _ttft(axes: Axes, run: Run) -> bool:
    points = [(r.phase, r.input_tokens, r.first - r.sent) for r in run.requests if r.ok and r.first is not None and r.input_tokens]
    if not points:
        return False
    for phase in dict.fromkeys(p for p, _, _ in points):
        own = _thin([(x, y) for p, x, y in points if p == phase])
        x, y = zip(*own, strict=True)
        axes.scatter(x, y, s=18, color=COLORS.get(phase, "#888888"), alpha=0.7, linewidth=0, label=TITLES.get(phase, phase))
    axes.set_yscale("log")
    axes.set_xlabel("prompt (tokens)")
    axes.set_ylabel("time to first token (s)")
    axes.set_xlim(left=0)
    _legend(axes)
    return True


def _itl(axes: Axes, run: Run) -> bool:
    drawn = False
    for window in run.windows:
        if len(gaps := _gaps(window)) < 10:
            continue
        ordered = np.sort(gaps) * 1e3
        picked = np.unique(
            np.concatenate([np.linspace(0, len(ordered) - 1, 300), len(ordered) - 1 - np.geomspace(1, len(ordered), 100) + 1])
            .astype(int)
            .clip(0)
        )
        axes.plot(
            np.maximum(ordered[picked], MIN_GAP_MS),
            (picked + 1) / len(ordered),
            color=COLORS.get(window.name),
            label=TITLES.get(window.name),
            linewidth=1.5,
        )
        drawn = True
    if drawn:
        axes.set_xscale("log")
        axes.set_xlabel("between two events (ms)")
        axes.set_ylabel("share of the gaps")
        axes.set_ylim(0, 1.02)
        _legend(axes)
    return drawn


def _contexts(axes: Axes, run: Run) -> bool:
    buckets = [c for c in by_context(run) if c["agent_rate"]]
    if not buckets:
        return False
    bars = axes.bar([c["context"] for c in buckets], [c["agent_rate"] for c in buckets], color="#2f7ed8", width=0.6)
    axes.bar_label(bars, [f"{c['agent_rate']:.1f}" for c in buckets], color=INK)
    axes.set_xlabel("prompt (tokens)")
    axes.set_ylabel("tok/s of one stream")
    axes.margins(y=0.15)
    return True


def _engine(axes: Axes, run: Run) -> bool:
    """Shares that the engine reports, between consecutive scrapes."""
    lines = {
        "coverage": ("sparsekv_decode_selected_mass_total", ("sparsekv_decode_selections_total",)),
        "hot-set hits": (
            "sparsekv_hot_rows_total{result=hit}",
            ("sparsekv_hot_rows_total{result=hit}", "sparsekv_hot_rows_total{result=miss}"),
        ),
        "context read": ("sparsekv_decode_selected_tokens_total", ("sparsekv_decode_context_tokens_total",)),
    }
    drawn = False
    for (label, (part, whole)), color in zip(lines.items(), ("#1a9850", "#f0a030", "#2f7ed8"), strict=True):
        points = [(t, values[part], sum(values.get(n, 0.0) for n in whole)) for t, values in run.scrapes if part in values]
        shares = [(b[0], (b[1] - a[1]) / (b[2] - a[2])) for a, b in itertools.pairwise(points) if b[2] > a[2]]
        if len(shares) > 1:
            axes.plot(*zip(*shares, strict=True), color=color, label=label, linewidth=1.5)
            drawn = True
    pool = [(t, v["vllm:kv_cache_usage_perc"]) for t, v in run.scrapes if "vllm:kv_cache_usage_perc" in v]
    if drawn and len(pool) > 1:
        axes.plot(*zip(*pool, strict=True), color="#8a8f98", label="KV cache used", linewidth=1.5)
    axes.set_ylim(0, 1.05)
    axes.set_xlabel("time (s)")
    axes.set_ylabel("share")
    if drawn:
        _legend(axes)
    return drawn


def _power(axes: Axes, run: Run) -> bool:
    points = [(s["t"], s["gpu_power_w"]) for s in run.samples if s.get("gpu_power_w") is not None]
    if len(points) < 3:
        return False
    axes.plot(*zip(*points, strict=True), color="#d7301f", linewidth=1.2)
    axes.set_xlabel("time (s)")
    axes.set_ylabel("GPU power (W)")
    axes.set_ylim(bottom=0)
    axes.margins(x=0)
    return True


_PLOTS: Sequence[tuple[str, str, Callable[[Axes, Run], bool]]] = (
    ("rates", "Output rate over time", _rates),
    ("lanes", "Swim lanes", _lanes),
    ("ttft", "Time to first token against context", _ttft),
    ("itl", "Inter-token latency, cumulative", _itl),
    ("contexts", "Throughput by context length", _contexts),
    ("engine", "What the engine reports", _engine),
    ("power", "GPU power", _power),
)


def _gaps(window: Window) -> np.ndarray:
    gaps = [gaps[~np.isnan(gaps)] for _, _, gaps in window.events.values()]
    return np.concatenate(gaps) if gaps else np.array([])


def _thin(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    return points[:: max(1, len(points) // MAX_POINTS + 1)] if len(points) > MAX_POINTS else points


def _legend(axes: Axes) -> None:
    """Under the plot, where it hides nothing."""
    handles, labels = axes.get_legend_handles_labels()
    if labels:
        axes.figure.legend(handles, labels, loc="outside lower center", ncols=3, handlelength=1.2, columnspacing=1.2)


def _svg(figure: Figure, prefix: str) -> str:
    """The figure without XML head and fixed size; its ids made its own, since all plots share one page."""
    out = io.StringIO()
    figure.savefig(out, format="svg", transparent=True, metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    text = out.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", text, count=1), count=1)
    text = re.sub(r'\bid="', f'id="{prefix}-', re.sub(r'(href="#|url\(#)', rf"\g<1>{prefix}-", text))
    return text.replace(INK, "currentColor")
