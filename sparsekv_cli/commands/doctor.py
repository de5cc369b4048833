"""`sparsekv doctor`: is this machine fit to serve, and how is a running server doing?"""

from __future__ import annotations

import json as json_module
from typing import Annotated

import typer

from sparsekv_cli import __version__, console

app = typer.Typer(add_completion=False)


@app.command(
    epilog="Exit status: 0 ready, 1 an error was found. Warnings and unknowns do not change it. "
    "Examples:\n\n  sparsekv doctor --profile dual3090\n\n  sparsekv doctor --url http://127.0.0.1:8000"
)
def doctor(
    profile: Annotated[str | None, typer.Option("--profile", help="Check against this profile (a name, or a file's path).")] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a value of the profile; repeatable.")
    ] = None,
    url: Annotated[str, typer.Option("--url", help="Look at the server that runs there instead of at the machine.")] = "",
    quick: Annotated[bool, typer.Option("--quick", help="Measure nothing on the GPUs.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Everything that was found, with its evidence.")] = False,
    json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
    json_schema: Annotated[bool, typer.Option("--json-schema", help="Print the JSON Schema of that object and exit.")] = False,
    redact: Annotated[bool, typer.Option("--redact/--no-redact", help="Take out home folder, names, addresses and GPU UUIDs.")] = True,
) -> None:
    """Check this machine, or a running server, and say what to do about what is wrong. Needs no root."""
    from sparsekv.profiles.loader import load_profile
    from sparsekv_cli.doctor.checks import LIVE, MACHINE
    from sparsekv_cli.doctor.host import Host
    from sparsekv_cli.doctor.machine import Machine
    from sparsekv_cli.doctor.redact import Redactor
    from sparsekv_cli.doctor.render import render
    from sparsekv_cli.doctor.report import Report, build_report
    from sparsekv_cli.doctor.runner import run_checks

    if json_schema:
        print(json_module.dumps(Report.model_json_schema(), indent=2))
        return
    loaded = load_profile(profile, settings or ()) if profile else None
    machine = Machine(Host(), loaded, url=url, measure=not quick)
    results = run_checks(LIVE if url else MACHINE, machine, lambda check: console.detail(f"checking {check.measures}"))
    report = build_report(results, machine, __version__, Redactor(machine.host.environ) if redact else None)
    if json:
        print(report.model_dump_json(indent=2))
    else:
        for line in render(report, verbose=verbose):
            console.out().print(line)
    raise typer.Exit(report.exit_code)
