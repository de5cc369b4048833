"""The table behind the choice of a sketch: attention mass captured by method x rank x bits x budget on held-out code.

    python -m sparsekv.bench.recall.mass --model ~/.cache/sparsekv/models/SmolLM2-135M-Instruct

fits every method on the bundled calibration text, measures on bundled code that no fit has seen, and writes the parts
`smollm2_mass` and `smollm2_shared_selection` of `bench/results/recall.json`. What is worked out on the way (statistics,
sampled queries and keys, the masses of each layer) stays in `--work`: a run that was stopped goes on from there.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from sparsekv.basis.capture import TransformersCapture, weights_fingerprint
from sparsekv.basis.corpus import bundled, sequences_hash, token_sequences
from sparsekv.basis.fit import fit, random_basis, transposed_basis, truncate
from sparsekv.basis.format import Method
from sparsekv.basis.identity import model_identity
from sparsekv.basis.recall import SINKS, WINDOW, Attention, Scorer, captured_mass, measure, oracle, recency, sketched
from sparsekv.basis.refit import calibrate
from sparsekv.bench.recall.results import write_part
from sparsekv.bench.recall.work import LazySource, Work
from sparsekv.kernels.sketch import SketchBasis
from sparsekv.profiles.env import cache_dir

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
    return [start + i for start in range(length - length // 8, length - DRAFT + 1, 16 * DRAFT) for i in range(DRAFT)]


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


def measure_layer(
    layer: str, attentions: Iterable[Attention], fits: dict[Method, dict[str, SketchBasis]], budget: int
) -> dict[str, torch.Tensor]:
    """Every arm's mass `[len(BUDGETS), Hkv, samples]`, and `shared/...` `[Hkv, samples]`, over all held-out sequences."""
    parts: dict[str, list[torch.Tensor]] = {}
    for attention in attentions:
        found = measure(attention, scorers(layer, fits), BUDGETS)
        found |= {f"shared/{n}": m for n, m in shared_selection(attention, truncate(fits["kq"][layer], CONTROL_RANK), budget)}
        for arm, mass in found.items():
            parts.setdefault(arm, []).append(mass)
    return {arm: torch.cat(masses, dim=-1).contiguous() for arm, masses in parts.items()}


def summary(mass: torch.Tensor) -> dict[str, float]:
    """`mass [layers, Hkv, samples]` -> mean, quantiles over queries, and the mean of the worst head."""
    flat = mass.flatten().double()
    values = {"mean": flat.mean(), "p10": flat.quantile(0.1), "p1": flat.quantile(0.01), "worst_head": mass.double().mean(-1).min()}
    return {name: round(value.item(), 4) for name, value in values.items()}


def rows_of(layers: Sequence[dict[str, torch.Tensor]]) -> list[dict[str, Any]]:
    """One row per arm and budget, over all layers."""
    rows: list[dict[str, Any]] = []
    for arm in layers[0]:
        if arm.startswith("shared/"):
            continue
        method, rank, bits = arm.split("/")
        size = {"rank": int(rank), "bits": int(bits), "bytes_per_token_head": int(rank) * int(bits) // 8 + 2} if rank else {}
        stacked = torch.stack([layer[arm] for layer in layers])
        rows += [{"method": method, **size, "budget": b, **summary(stacked[:, i])} for i, b in enumerate(BUDGETS)]
    return rows


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="folder of a transformers model")
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--sequences", type=int, default=4, help="calibration sequences of the context's length")
    parser.add_argument("--heldout-sequences", type=int, default=2, help="held-out sequences of code")
    parser.add_argument("--budget", type=int, default=320, help="budget of the shared-selection rows")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--work", type=Path, default=cache_dir() / "mass", help="folder for what is worked out on the way")
    parser.add_argument("--out", type=Path, default=Path("bench/results/recall.json"))
    options = parser.parse_args(arguments)
    from transformers import AutoConfig, AutoTokenizer

    def note(*step: object) -> None:
        print(*step, file=sys.stderr, flush=True)

    tokenizer = AutoTokenizer.from_pretrained(options.model, local_files_only=True, trust_remote_code=False)
    fingerprint = weights_fingerprint(options.model)
    identity = model_identity(AutoConfig.from_pretrained(options.model, local_files_only=True), fingerprint)
    calibration = token_sequences(bundled("fit"), tokenizer, options.context, options.sequences, seed=0)
    heldout = code_sequences(tokenizer, options.context)[: options.heldout_sequences]
    inputs = {
        "model": options.model.name,
        "weights_fingerprint": fingerprint,
        "context": options.context,
        "calibration_hash": sequences_hash(calibration),
        "heldout_hash": sequences_hash(heldout),
        "heldout_sequences": len(heldout),
        "queries_per_sequence": len(sample_positions(options.context)),
        "always_selected": f"{SINKS} sinks and a window of {WINDOW}, inside the budget",
    }
    work = Work(options.work, {**inputs, "budget": options.budget, "arms": [BUDGETS, RANKS, BITS]})
    source = LazySource(lambda: TransformersCapture(options.model, options.device))
    stats = calibrate(options.work / "statistics.safetensors", source, calibration, identity.config_hash + fingerprint, note)
    for index, tokens in enumerate(heldout):
        work.capture(index, source, tokens, sample_positions(len(tokens)))
    methods: tuple[Method, ...] = ("kq", "pca")
    fits = {method: {key: fit(layer, method, max(RANKS)) for key, layer in stats.items()} for method in methods}
    layers = []
    for key in stats:
        note("layer", key)
        layers.append(work.once(f"mass-{key}", partial(measure_layer, key, work.attentions(key), fits, options.budget)))

    rows = rows_of(layers)
    representatives = [
        {"representatives": name, "positions": DRAFT, "budget": options.budget}
        | summary(torch.stack([layer[f"shared/{name}"] for layer in layers]))
        for name in REPRESENTATIVES
    ]
    write_part(options.out, "smollm2_mass", rows, inputs)
    write_part(options.out, "smollm2_shared_selection", representatives, inputs)
    for row in rows:
        if row["budget"] == options.budget:
            print(
                f"{row['method']:12s} {row.get('rank', ''):>4} {row.get('bits', ''):>3} {row['mean']:.4f} {row['p10']:.4f} {row['p1']:.4f}"
            )


if __name__ == "__main__":
    main()
