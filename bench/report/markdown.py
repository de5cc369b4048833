"""report.md, to paste into an issue."""

from __future__ import annotations

from typing import Any

from .tables import Table, all_tables, verdict_line


def render_markdown(summary: dict[str, Any]) -> str:
    lines = [f"# {summary['run']['name']}", "", f"**{verdict_line(summary)}**", ""]
    lines += [f"- INVALID: {reason['text']}" for reason in summary["verdict"]["reasons"]]
    lines += [f"- Note: {note}" for note in summary["verdict"]["notes"]]
    for table in all_tables(summary):
        lines += ["", f"## {table.title}", ""] + ([table.note, ""] if table.note else []) + _table(table)
    return "\n".join(lines) + "\n"


def _table(table: Table) -> list[str]:
    rule = "|" + "|".join(" --- " for _ in table.columns) + "|"
    return [_row(table.columns), rule, *(_row(row) for row in table.rows)]


def _row(cells: tuple[str, ...]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"
