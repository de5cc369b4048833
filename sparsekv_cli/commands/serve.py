"""`sparsekv serve`: a profile becomes a vLLM server."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sparsekv_cli import console

app = typer.Typer(add_completion=False)


@app.command(
    context_settings={"allow_extra_args": True},
    epilog="Everything after `--` goes to vLLM as it is. Exit status: vLLM's own once it runs; before that 2 if the profile, the command "
    "line or a file is wrong, 3 if this machine cannot do it. "
    "Examples:\n\n  sparsekv serve --profile cpu-demo\n\n  sparsekv serve --profile dual3090 --set kv.dtype=int4 -- --seed 1",
)
def serve(
    context: typer.Context,
    profile: Annotated[str, typer.Option("--profile", help="A shipped profile's name, or a file's path.")],
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a value of the profile; repeatable.")
    ] = None,
    host: Annotated[str | None, typer.Option("--host", help="Listen address; any but this machine's needs a key.")] = None,
    port: Annotated[int | None, typer.Option("--port", help="Listen port.")] = None,
    api_key_file: Annotated[
        Path | None, typer.Option("--api-key-file", help="File with the clients' key (or set SPARSEKV_API_KEY).")
    ] = None,
    print_command: Annotated[bool, typer.Option("--print-command", help="Print the command to paste, without secrets, and exit.")] = False,
    explain: Annotated[bool, typer.Option("--explain", help="Print every option with its value, origin and reason, and exit.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check everything, start nothing.")] = False,
) -> None:
    """Start vLLM as a profile says."""
    from sparsekv.profiles.loader import load_profile
    from sparsekv_cli.serve import launching
    from sparsekv_cli.serve.preflight import preflight

    server = {"server.host": host, "server.port": port, "server.api_key_file": api_key_file and str(api_key_file)}
    loaded = load_profile(profile, [*(settings or ()), *launching.overrides(server)])
    plan = launching.plan(loaded, tuple(context.args))
    if print_command:
        print(plan.launch.shell())
        return
    if explain:
        console.table(("option", "value", "origin", "why"), launching.explanation(loaded, plan.launch))
        return
    preflight(plan.machine, console.warn, console.detail)
    if dry_run:
        console.note(f"{loaded.name}: everything is in order; nothing was started")
        return
    console.note(f"starting vLLM with profile {loaded.name} on http://{loaded.profile.server.host}:{loaded.profile.server.port}")
    launching.execute(plan.launch)
