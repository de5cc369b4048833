"""`sparsekv bench compare`: two runs, or two sets of repeats."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sparsekv_cli import console

app = typer.Typer(add_completion=False)


@app.command(
    epilog="Exit status: 0 compared and every gate passed, 1 a gate failed or, with gates, a run is INVALID, 2 wrong usage. "
    "Examples:\n\n  sparsekv bench compare runs/dense runs/sparse\n\n"
    "  sparsekv bench compare before after --fail-if 'decode.tpot.p99>+5%' --fail-if 'recall<0.97'"
)
def compare(
    a: Annotated[Path, typer.Argument(metavar="A", help="Folder of a run, of repeats, or a summary.json.")],
    b: Annotated[Path, typer.Argument(metavar="B", help="The same, compared with A.")],
    fail_if: Annotated[
        list[str] | None,
        typer.Option("--fail-if", metavar="GATE", help="[WINDOW.]METRIC[.STAT]<LIMIT or >LIMIT: +5% and -3 are changes, 0.97 a value."),
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="All statistics, not only p50 and p99.")] = False,
    json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """What changed from A to B. With repeats on both sides each change has its 95 % interval."""
    from sparsekv.bench.report.compare import SHOWN, parse_gate
    from sparsekv.bench.report.compare import compare as compare_runs
    from sparsekv.profiles.errors import ExitCode

    gates = [parse_gate(text) for text in fail_if or ()]
    result = compare_runs(a, b)
    for warning in result.warnings:
        console.warn(warning)
    failures = [reason for gate in gates if (reason := gate.failed(result.changes))]
    if gates:
        failures += [f"{name} is INVALID" for name in result.invalid()]
    if json:
        console.print_json(result.to_json() | {"failures": failures})
    else:
        if not everything:
            result.changes = [c for c in result.changes if c.statistic in (None, *SHOWN)]
        console.table(("phase", "figure", "A", "B", "change", "95 % interval", ""), list(result.rows()), right=(2, 3, 4, 5))
    for failure in failures:
        console.warn(f"gate failed: {failure}")
    if failures:
        raise typer.Exit(ExitCode.FAILED)
