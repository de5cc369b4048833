"""`sparsekv profiles`: look at hardware profiles and check them."""

from __future__ import annotations

import typer

app = typer.Typer(add_completion=False, no_args_is_help=True, help="Hardware profiles: list, show, compare, check.")


@app.command("list")
def list_profiles() -> None:
    """The profiles that ship with sparsekv."""


@app.command()
def show(name: str) -> None:
    """Print one profile."""
