"""The table behind the choice of a sketch: attention mass captured by method x rank x bits x budget on held-out code.

    python -m sparsekv.bench.recall.mass --model ~/.cache/sparsekv/models/SmolLM2-135M-Instruct

fits every method on the bundled calibration text, measures on bundled code that no fit has seen, and writes the part
`smollm2_mass` of `bench/results/recall.json`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import torch

from sparsekv.basis.capture import TransformersCapture, weights_fingerprint
from sparsekv.basis.corpus import bundled, sequences_hash, token_sequences
from sparsekv.basis.fit import fit, random_basis, transposed_basis, truncate
from sparsekv.basis.format import Method
from sparsekv.basis.recall import Attention, Probe, Scorer, captured_mass, measure, oracle, recency, sketched
from sparsekv.basis.stats import LayerStats, StatsObserver
from sparsekv.bench.recall.results import write_part
from sparsekv.kernels.sketch import SketchBasis

BUDGETS = (64, 128, 320, 512, 1024)
RANKS = (8, 16, 32, 48, 64)
BITS: tuple[Literal[4, 8], ...] = (4, 8)
DRAFT = 8
"""Consecutive positions that share one selection, as the verify step of a speculator has them."""
REPRESENTATIVES = {"1 (first)": [0], "1 (last)": [7], "2": [0, 7], "4": [0, 2, 5, 7], "8": list(range(8))}
CONTROL_RANK = 32
CONTROL_BITS: Literal[4] = 4


def sample_positions(length: int) -> list[int]:
    """Runs of `DRAFT` consecutive queries in the last eighth of the text, so that nearly all of it is in view."""
    return [start + i for start in range(length - length // 8, length - DRAFT + 1, 4 * DRAFT) for i in range(DRAFT)]


def code_sequences(tokenizer: Any, context: int) -> list[list[int]]:
    """The held-out code, end to end, in sequences of `context` tokens."""
    tokens: list[int] = []
    for document in bundled("heldout"):
        if document.kind == "code":
            tokens += tokenizer(document.text + "\n\n", add_special_tokens=False)["input_ids"]
    return [tokens[start : start + context] for start in range(0, len(tokens) - context + 1, context)]


def scorers(layer: str, fits: dict[Method, dict[str, SketchBasis]]) -> dict[str, Scorer]:
    """Every arm of the table, named `method/rank/bits`."""
    arms: dict[str, Scorer] = {"oracle//": oracle, "recency//": recency}
    for method, layers in fits.items():
        for rank in RANKS:
            for bits in BITS:
                arms[f"{method}/{rank}/{bits}"] = sketched(truncate(layers[layer], rank), bits)
    keys = list(fits["kq"])
    own = truncate(fits["kq"][layer], CONTROL_RANK)
    other = truncate(fits["kq"][keys[(keys.index(layer) + len(keys) // 2) % len(keys)]], CONTROL_RANK)
    for name, sketch in (("random", random_basis(own, 0)), ("other layer", other), ("transposed", transposed_basis(own))):
        arms[f"{name}/{CONTROL_RANK}/{CONTROL_BITS}"] = sketched(sketch, CONTROL_BITS)
    return arms


def shared_selection(attention: Attention, sketch: SketchBasis, budget: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Mass of `DRAFT` queries that use one selection made from a few of them: `[Hkv, samples]` per choice."""
    true_weights, estimate = attention.true_weights(), attention.sketch_weights(sketch, CONTROL_BITS).mean(dim=1)
    kv_heads, groups, queries, tokens = true_weights.shape
    runs = estimate.view(kv_heads, queries // DRAFT, DRAFT, tokens)
    last = attention.positions.view(-1, DRAFT)[:, -1]
    for name, chosen in REPRESENTATIVES.items():
        joint = runs[:, :, chosen].mean(dim=2)
        # Sinks and window count from the run's last position; each query's own weights are zero beyond its own.
        by_run = true_weights.view(kv_heads, groups, -1, DRAFT, tokens).permute(0, 1, 3, 2, 4).flatten(1, 2)
        yield name, captured_mass(by_run, joint, last, [budget])[0].flatten(1)


def summary(mass: torch.Tensor) -> dict[str, float]:
    """`mass [layers, Hkv, samples]` -> mean, quantiles over queries, and the mean of the worst head."""
    flat = mass.flatten().double()
    values = {"mean": flat.mean(), "p10": flat.quantile(0.1), "p1": flat.quantile(0.01), "worst_head": mass.double().mean(-1).min()}
    return {name: round(value.item(), 4) for name, value in values.items()}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="folder of a transformers model")
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--sequences", type=int, default=8, help="calibration sequences of the context's length")
    parser.add_argument("--budget", type=int, default=320, help="budget of the shared-selection rows")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, default=Path("bench/results/recall.json"))
    options = parser.parse_args(arguments)
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(options.model, local_files_only=True, trust_remote_code=False)
    source = TransformersCapture(options.model, options.device)
    calibration = token_sequences(bundled("fit"), tokenizer, options.context, options.sequences, seed=0)
    observer = StatsObserver()
    for index, tokens in enumerate(calibration):
        print(f"calibrate {index + 1}/{len(calibration)}", file=sys.stderr)
        source.run(tokens, observer)
    stats: dict[str, LayerStats] = observer.layers
    methods: tuple[Method, ...] = ("kq", "pca")
    fits = {method: {key: fit(layer, method, max(RANKS)) for key, layer in stats.items()} for method in methods}

    masses: dict[str, dict[str, list[torch.Tensor]]] = {}
    shared: dict[str, dict[str, list[torch.Tensor]]] = {}

    def use(layer: str, attention: Attention) -> None:
        for arm, mass in measure(attention, scorers(layer, fits), BUDGETS).items():
            masses.setdefault(arm, {}).setdefault(layer, []).append(mass)
        for name, mass in shared_selection(attention, truncate(fits["kq"][layer], CONTROL_RANK), options.budget):
            shared.setdefault(name, {}).setdefault(layer, []).append(mass)

    heldout = code_sequences(tokenizer, options.context)
    for index, tokens in enumerate(heldout):
        print(f"held-out code {index + 1}/{len(heldout)}", file=sys.stderr)
        source.run(tokens, Probe(len(tokens), sample_positions(len(tokens)), use))

    rows = []
    for arm, layers in masses.items():
        method, rank, bits = arm.split("/")
        stacked = torch.stack([torch.cat(parts, dim=-1) for parts in layers.values()])
        for index, budget in enumerate(BUDGETS):
            size = {"rank": int(rank), "bits": int(bits), "bytes_per_token_head": int(rank) * int(bits) // 8 + 2} if rank else {}
            rows.append({"method": method, **size, "budget": budget, **summary(stacked[:, index])})
    representatives = [
        {"representatives": name, "positions": DRAFT, "budget": options.budget}
        | summary(torch.stack([torch.cat(parts, dim=-1) for parts in layers.values()]))
        for name, layers in shared.items()
    ]
    inputs = {
        "model": options.model.name,
        "weights_fingerprint": weights_fingerprint(options.model),
        "context": options.context,
        "calibration_hash": sequences_hash(calibration),
        "heldout_hash": sequences_hash(heldout),
        "heldout_sequences": len(heldout),
        "queries_per_sequence": len(sample_positions(options.context)),
        "always_selected": "4 sinks and a window of 32, inside the budget",
    }
    write_part(options.out, "smollm2_mass", rows, inputs)
    write_part(options.out, "smollm2_shared_selection", representatives, inputs)
    for row in rows:
        if row["budget"] == options.budget:
            print(
                f"{row['method']:12s} {row.get('rank', ''):>4} {row.get('bits', ''):>3} {row['mean']:.4f} {row['p10']:.4f} {row['p1']:.4f}"
            )


if __name__ == "__main__":
    main()
