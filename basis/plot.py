"""A basis as a picture: recall of every layer and head, and what each layer needs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sparsekv.basis.format import BasisMetadata
from sparsekv.profiles.errors import ExitCode, SparsekvError


def plot_basis(metadata: BasisMetadata, path: Path) -> None:
    """Writes a PNG or SVG: held-out mass by layer and KV head, above recommended budget and hot slots by layer.

    Raises:
        SparsekvError: another file type, a missing folder, no measurement in the file, or matplotlib is not installed.
    """
    if path.suffix not in (".png", ".svg"):
        raise SparsekvError(f"cannot plot to {path}", hint="give a file that ends in .png or .svg")
    if not path.parent.is_dir():
        raise SparsekvError(f"no folder at: {path.parent}")
    if not all(fit.recall_mean for fit in metadata.layers.values()):
        raise SparsekvError("this basis holds no held-out measurement to plot", hint="fit it with `sparsekv refit-basis`")
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError:
        raise SparsekvError(
            "plots need matplotlib", hint="pip install 'sparsekv[bench]'", exit_code=ExitCode.ENVIRONMENT
        ) from None
    style: Any = {"svg.hashsalt": "sparsekv", "svg.fonttype": "none", "axes.spines.top": False, "axes.spines.right": False}
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(max(6.0, 0.28 * len(metadata.layers)), 5.5), layout="constrained")
        heads, needs = figure.subplots(2, 1, sharex=True)
        fits = list(metadata.layers.values())
        grid = [[fit.recall_mean[head] for fit in fits] for head in range(metadata.model.num_kv_heads)]
        image = heads.imshow(grid, aspect="auto", cmap="viridis", vmax=1.0)
        heads.set(ylabel="KV head", yticks=range(len(grid)), title=f"held-out attention mass at {metadata.recall_budget} tokens")
        figure.colorbar(image, ax=heads, pad=0.01)
        places = range(len(fits))
        needs.bar(places, [fit.hot_slots for fit in fits], color="#c9d6e8", label="hot slots")
        needs.bar(places, [fit.budget for fit in fits], width=0.5, color="#2f7ed8", label="budget")
        needs.set(xlabel="layer", ylabel="tokens per KV head", xticks=places, xticklabels=list(metadata.layers))
        needs.tick_params(axis="x", labelsize=7)
        needs.legend(frameon=False)
        figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)
