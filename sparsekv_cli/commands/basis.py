"""`sparsekv basis`: what is in a basis file."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sparsekv_cli import console

if TYPE_CHECKING:
    from sparsekv.basis.format import Basis

app = typer.Typer(add_completion=False, no_args_is_help=True, help="Basis files: the sketch of a model's keys.")


@app.callback()
def basis() -> None:
    """Keeps `show` a command of a group."""


@app.command(epilog="Example:\n\n  sparsekv basis show model-kq.safetensors --plot recall.svg")
def show(
    file: Annotated[Path, typer.Argument(help="A basis file, as `sparsekv refit-basis` writes it.")],
    plot: Annotated[Path | None, typer.Option("--plot", metavar="FILE", help="Draw it too: a .png or .svg file.")] = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Whose basis it is, and what it achieved on text it was not fitted on."""
    from sparsekv.basis.format import load_basis

    loaded = load_basis(file)
    describe(loaded, json=json)
    if plot:
        from sparsekv.basis.plot import plot_basis

        plot_basis(loaded.metadata, plot)
        console.note(f"wrote {plot}")


def describe(basis: Basis, *, json: bool) -> None:
    """The basis on stdout: facts, recall beside oracle and controls, and a line per layer."""
    meta = basis.metadata
    if json:
        console.print_json({"schema_version": 1, "file": basis.path.name, "sha256": basis.file_hash, **asdict(meta)})
        return
    model = meta.model
    shape = f"{model.num_layers} layers, {model.num_q_heads} query and {model.num_kv_heads} KV heads of {model.head_dim}"
    size = meta.rank * meta.bits // 8 + 2
    facts = [
        ("model", f"{model.model_type}, {shape}"),
        ("sketch", f"{meta.method}, rank {meta.rank}, {meta.bits} bits: {size} bytes per token and KV head"),
        ("calibration", f"{meta.calibration_tokens} tokens up to position {meta.calibration_context}, {meta.calibration_hash[:12]}"),
        ("sha256", basis.file_hash),
    ]
    console.table(("basis", basis.path.name), facts)
    print()
    if meta.recall:
        arms = sorted(meta.recall.items(), key=lambda arm: -arm[1])
        console.table((f"held-out mass at {meta.recall_budget} tokens", "mean"), [(n, f"{mass:.4f}") for n, mass in arms], right=(1,))
        print()
    rows = [
        (key, str(fit.rank), *(f"{part:.3f}" for part in _spread(fit.recall_mean, fit.recall_p10)), str(fit.budget), str(fit.hot_slots))
        for key, fit in meta.layers.items()
    ]
    names = ("layer", "rank", "mass", "worst head", "p10 worst head", "budget", "hot slots")
    console.table(names, rows, right=range(1, 7))


def _spread(mean: tuple[float, ...], p10: tuple[float, ...]) -> tuple[float, float, float]:
    return (sum(mean) / len(mean), min(mean), min(p10)) if mean else (float("nan"),) * 3
