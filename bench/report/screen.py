"""The live screen. It runs as a process of its own, so that drawing never delays a measured event, and ends with its input:
however the benchmark ends, the terminal is given back and the last frame stays.

`python -m sparsekv.bench.report.screen` reads one JSON snapshot a line.
"""

from __future__ import annotations

import contextlib
import json
import signal
import sys
from collections.abc import Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from .format import bytes_, number, seconds, tokens
from .tables import TITLES

SPARKS = " ▁▂▃▄▅▆▇█"
_STATE_STYLES = {"decoding": "green", "reading": "yellow", "tool": "cyan", "retrying": "red", "failed": "bold red", "done": "dim"}


def draw(snapshot: dict[str, Any], width: int, height: int) -> RenderableType:
    """One frame."""
    parts: list[RenderableType] = [_header(snapshot), _rate(snapshot, width), Text(), _agents(snapshot, max(3, height - 9), width)]
    parts += [_gauges(snapshot, width)]
    errors = snapshot["errors"]
    kinds = ", ".join(f"{kind} {count}" for kind, count in sorted(errors.items()))
    parts.append(Text(f"errors: {kinds}" if kinds else "errors: none", style="bold red" if kinds else "dim"))
    return Group(*parts)


def sparkline(values: Sequence[float], width: int) -> str:
    """The last `width` values, scaled to the highest of them."""
    shown = list(values)[-width:]
    top = max(shown, default=0.0)
    return "".join(SPARKS[0 if top <= 0 else max(0, min(8, round(8 * v / top)))] for v in shown)


def _header(s: dict[str, Any]) -> Text:
    phase = TITLES.get(s["phase"], s["phase"].replace("_", " ")) or "Starting"
    text = Text(no_wrap=True, overflow="ellipsis")
    text.append("sparsekv swarm ", style="bold")
    text.append(f"{s['model']}  {len(s['agents'])} agents x {tokens(s['target'])}  ", style="dim")
    text.append(phase, style="bold cyan")
    text.append(f"  {int(s['t']) // 60}:{int(s['t']) % 60:02d}")
    return text


def _rate(s: dict[str, Any], width: int) -> Text:
    rates = s["rates"]
    text = Text(no_wrap=True)
    text.append(f"{rates[-1] if rates else 0:8.1f} tok/s ", style="bold green")
    text.append(sparkline(rates, max(10, min(120, width - 18))), style="green")
    return text


def _agents(s: dict[str, Any], rows: int, width: int) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False, expand=False)
    for name, right in (("agent", True), ("state", False), ("turn", True), ("context", True), ("tok/s", True), ("first", True)):
        table.add_column(name, justify="right" if right else "left", no_wrap=True)
    wide = width >= 70
    if wide:
        table.add_column("last words", no_wrap=True, overflow="ellipsis", ratio=1)
    shown = s["agents"] if len(s["agents"]) <= rows else s["agents"][: rows - 1]
    for a in shown:
        state = Text(a["state"] + (f" !{a['errors']}" if a["errors"] else ""), style=_STATE_STYLES.get(a["state"], ""))
        first = seconds(a["ttft"]) if a["ttft"] is not None else "–"
        cells: list[RenderableType] = [str(a["index"]), state, str(a["turn"]), tokens(a["context"]), f"{a['rate']:.1f}", first]
        table.add_row(*cells, *([Text(clean(a["words"])[-max(10, width - 52) :], style="dim")] if wide else []))
    if len(shown) < len(s["agents"]):
        table.add_row("…", Text(f"{len(s['agents']) - len(shown)} more"), "", "", "", "", *([""] if wide else []))
    return table


def _gauges(s: dict[str, Any], width: int) -> Text:
    text = Text()
    for label, share in s["gauges"].items():
        if share is not None:
            filled = round(10 * min(1.0, max(0.0, share)))
            text.append(f"{label} ", style="dim")
            text.append("█" * filled + "░" * (10 - filled), style="cyan")
            text.append(f" {100 * share:.1f} %   ")
    facts = s["facts"]
    for label, value, unit in (
        ("GPU", "gpu_power_w", "W"),
        ("PCIe in", "pcie_rx_bytes_s", "B/s"),
        ("host memory", "host_memory_bytes", "B"),
    ):
        if facts.get(value) is not None:
            shown = bytes_(facts[value]) + ("/s" if unit == "B/s" else "") if unit.startswith("B") else number(facts[value], unit, 0)
            text.append(f"{label} ", style="dim")
            text.append(f"{shown}   ")
    if facts.get("lag_p99_ms") is not None:
        text.append("client lag ", style="dim")
        text.append(f"{facts['lag_p99_ms']:.1f} ms")
    return text


def clean(words: str) -> str:
    """A model's words on one line, without anything that a terminal would obey."""
    return "".join(c if c.isprintable() else " " for c in " ".join(words.split()))


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: sys.exit(0))  # through `Live`, which shows the cursor again
    console = Console(stderr=True)
    with Live(console=console, auto_refresh=False, vertical_overflow="crop", redirect_stdout=False, redirect_stderr=False) as live:
        for line in sys.stdin:
            with contextlib.suppress(ValueError, KeyError):
                live.update(draw(json.loads(line), console.width, console.height), refresh=True)


if __name__ == "__main__":
    main()
