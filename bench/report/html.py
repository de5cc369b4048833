"""report.html: one file with everything in it, no script, nothing fetched."""

from __future__ import annotations

from importlib.resources import files
from typing import Any

import jinja2

from .plots import Plot
from .tables import all_tables, verdict_line

TEXT_TABLES = ("What was run", "Errors", "Definitions")
"""Tables of sentences: their cells wrap."""


def render_html(summary: dict[str, Any], plots: list[Plot]) -> str:
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    template = environment.from_string((files(__package__) / "report.html.j2").read_text())
    return template.render(
        summary=summary, verdict=verdict_line(summary), plots=plots, tables=list(all_tables(summary)), text_tables=TEXT_TABLES
    )
