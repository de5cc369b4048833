"""Makes every report of a run from its folder, at any moment: `python -m sparsekv.bench.report.write FOLDER`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from sparsekv.bench.metrics import load
from sparsekv.bench.swarm.trace import make_trace

from .folder import write_atomic
from .markdown import render_markdown
from .summary import summarize_run


def write_report(folder: Path) -> dict[str, Any]:
    """Writes trace.mooncake.jsonl, summary.json, report.md and report.html, each at once; returns the summary."""
    run = load(folder)
    write_atomic(folder / "trace.mooncake.jsonl", "".join(row.to_line() + "\n" for row in make_trace(run.requests)))
    summary = summarize_run(run)
    write_atomic(folder / "summary.json", json.dumps(summary, indent=1) + "\n")
    write_atomic(folder / "report.md", render_markdown(summary))
    # Drawing takes the longest and is the likeliest to be cut short, so it comes last.
    from .html import render_html
    from .plots import draw_all

    write_atomic(folder / "report.html", render_html(summary, draw_all(run)))
    return summary


if __name__ == "__main__":
    write_report(Path(sys.argv[1]))
