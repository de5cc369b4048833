"""The summary at the end of a run, on the terminal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from .tables import agents, errors, figures, verdict_line


def print_summary(summary: dict[str, Any], folder: Path, console: Console) -> None:
    """The verdict with its reasons, the figures by phase, the agents, and where the report lies."""
    valid = summary["verdict"]["valid"]
    console.print(Text(verdict_line(summary), style="bold green" if valid else "bold red"))
    for reason in summary["verdict"]["reasons"]:
        console.print(Text(f"  ✗ {reason['text']}", style="red"))
    for note in summary["verdict"]["notes"]:
        console.print(Text(f"  ! {note}", style="yellow"))
    for table in (*([figures(summary)] if summary["windows"] else []), agents(summary), *([errors(summary)] if summary["errors"] else [])):
        rich = RichTable(title=Text(table.title), title_justify="left", box=SIMPLE_HEAD, pad_edge=False, show_edge=False)
        for index, name in enumerate(table.columns):
            rich.add_column(name, justify="left" if index == 0 else "right", overflow="fold")
        for row in table.rows:
            rich.add_row(*map(Text, row))
        console.print()
        console.print(rich)
    console.print()
    console.print(Text(f"report: {folder / 'report.html'}"))
