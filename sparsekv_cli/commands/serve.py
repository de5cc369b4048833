"""`sparsekv serve`: a profile becomes a vLLM server."""

from __future__ import annotations

import typer

app = typer.Typer(add_completion=False)


@app.command()
def serve() -> None:
    """Start vLLM as a profile says."""
