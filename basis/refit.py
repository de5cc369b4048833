"""Fits a basis for a model: capture, fit, test on held-out text, refuse what is no better than a control, write."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from sparsekv.basis.corpus import bundled, from_folder, sequences_hash, token_sequences
from sparsekv.basis.fit import fit, truncate
from sparsekv.basis.format import BasisMetadata, Method, save_basis, write_atomically
from sparsekv.basis.heldout import Progress, Source, heldout_test
from sparsekv.basis.identity import model_identity
from sparsekv.basis.stats import LayerStats, StatsObserver, pack, unpack
from sparsekv.profiles.env import cache_dir
from sparsekv.profiles.errors import SparsekvError


@dataclass(frozen=True)
class RefitOptions:
    model: Path
    out: Path
    method: Method = "kq"
    rank: int | Literal["auto"] | None = None
    """None: half the head size. `auto`: per layer, by held-out mass, within the same bytes in all."""
    bits: Literal[4, 8] = 4
    context: int = 8192
    sequences: int = 8
    heldout_sequences: int = 2
    corpus: Path | None = None
    seed: int = 0


def refit(options: RefitOptions, source: Source, tokenizer: Any, fingerprint: str, progress: Progress) -> BasisMetadata:
    """Runs the whole fit and writes `options.out`.

    Statistics are saved after every sequence beside the output (`partial_path`), so an interrupted run goes on where it stopped.

    Raises:
        SparsekvError: unusable options or corpus, or a basis that does not beat its controls (nothing is written then).
    """
    identity = model_identity(source.config, fingerprint)
    rank = mean_rank(options, identity.head_dim)
    texts = {split: from_folder(options.corpus, split) if options.corpus else bundled(split) for split in ("fit", "heldout")}
    calibration = token_sequences(texts["fit"], tokenizer, options.context, options.sequences, options.seed)
    heldout = token_sequences(texts["heldout"], tokenizer, options.context, options.heldout_sequences, options.seed)

    stats = calibrate(partial_path(options.out), source, calibration, identity.config_hash + fingerprint, progress)
    if missing := [key for key in identity.attention_layers if key not in stats]:
        raise SparsekvError(
            f"the model reported no attention in layers: {', '.join(missing)}", hint="see `sparsekv refit-basis --help`, --engine"
        )

    ranks = _candidate_ranks(identity.head_dim, rank) if options.rank == "auto" else (rank,)
    fitted = {key: fit(layer, options.method, max(ranks)) for key, layer in stats.items()}
    report = heldout_test(fitted, ranks, rank, options.bits, source, heldout, progress)
    chosen = report.share_ranks(rank) if options.rank == "auto" else dict.fromkeys(fitted, rank)
    metadata = BasisMetadata(
        model=identity,
        method=options.method,
        rank=rank,
        bits=options.bits,
        layers={key: report.layer_fit(key, chosen[key]) for key in fitted},
        calibration_hash=sequences_hash(calibration),
        calibration_tokens=sum(map(len, calibration)),
        calibration_context=options.context,
        heldout_hash=sequences_hash(heldout),
        recall_budget=report.budget,
        recall=report.overall(chosen),
    )
    refuse_if_beaten(metadata)
    save_basis(options.out, metadata, {key: truncate(sketch, chosen[key]) for key, sketch in fitted.items()})
    partial_path(options.out).unlink(missing_ok=True)
    return metadata


def mean_rank(options: RefitOptions, head_dim: int) -> int:
    """The rank of every layer, or with `auto` their mean.

    Raises:
        SparsekvError: it is no rank of a head of this size.
    """
    rank = head_dim // 2 if options.rank is None or options.rank == "auto" else options.rank
    if not 1 <= rank <= head_dim or rank * options.bits % 8:
        raise SparsekvError(
            f"rank {rank} does not fit head size {head_dim} in whole bytes of {options.bits}-bit codes",
            hint=f"give an even rank up to {head_dim}",
        )
    return rank


def check_options(options: RefitOptions) -> None:
    """Looks at everything that can be wrong before a model is loaded.

    Raises:
        SparsekvError: no readable model, sizes that do not fit it, or an output that cannot be written.
    """
    config_path = options.model / "config.json"
    try:
        config = json.loads(config_path.read_text())
        identity = model_identity(config)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SparsekvError(
            f"no usable model configuration at {config_path}: {error}", hint="give a folder that holds config.json and *.safetensors"
        ) from None
    if options.method not in get_args(Method):
        raise SparsekvError(f"no such method: {options.method}", hint="give `kq` or `pca`")
    if options.bits not in (4, 8):
        raise SparsekvError(f"no codes of {options.bits} bits", hint="give 4 or 8")
    mean_rank(options, identity.head_dim)
    longest = (config.get("text_config") or config).get("max_position_embeddings")
    if longest and options.context > longest:
        raise SparsekvError(f"--context {options.context} is beyond the model's {longest} positions")
    if options.corpus and not options.corpus.is_dir():
        raise SparsekvError(f"no folder at: {options.corpus}", hint="`--corpus` takes a folder of text files")
    if options.out.suffix != ".safetensors":
        raise SparsekvError(f"the output is not named *.safetensors: {options.out}")


def refuse_if_beaten(metadata: BasisMetadata) -> None:
    """Raises SparsekvError if a control captures as much held-out mass as the basis does."""
    mine = metadata.recall["basis"]
    winners = [f"{name} {mass:.4f}" for name, mass in metadata.recall.items() if name not in ("basis", "oracle") and mass >= mine]
    if winners and mine < metadata.recall["oracle"]:  # nothing beats a basis that equals the true scores
        raise SparsekvError(
            f"the basis is refused: it captures {mine:.4f} of the held-out attention mass, no more than: {', '.join(winners)}",
            hint="calibrate on more, and more varied, text of the kind that will be served",
        )


def partial_path(out: Path) -> Path:
    return out.with_name(out.name + ".partial")


def calibrate(
    path: Path, source: Source, sequences: Sequence[list[int]], model_hash: str, progress: Progress
) -> dict[str, LayerStats]:
    """Statistics of all sequences; `path` keeps them after each one, and those of an earlier sitting are taken from it.

    `model_hash` stands for the model: what another one has left at `path` is not used.
    """
    inputs = hashlib.sha256(f"{model_hash}:{sequences_hash(sequences)}".encode()).hexdigest()
    done, layers = _load_partial(path, inputs)
    observer = StatsObserver(layers)
    path.parent.mkdir(parents=True, exist_ok=True)
    for index in range(done, len(sequences)):
        progress("calibrate", index, len(sequences))
        before = unpack(pack(observer.layers))
        try:
            source.run(sequences[index], observer)
        except BaseException:
            observer.layers = before  # half a sequence is no sequence
            raise
        header = json.dumps({"inputs": inputs, "done": index + 1})
        write_atomically(path, save(pack(observer.layers), metadata={"sparsekv_partial": header}))
    progress("calibrate", len(sequences), len(sequences))
    return observer.layers


def _load_partial(path: Path, inputs: str) -> tuple[int, dict[str, LayerStats]]:
    """Statistics of an earlier sitting, if they are of the same model and the same text."""
    if not path.is_file():
        return 0, {}
    try:
        with safe_open(path, framework="pt") as file:
            state = json.loads((file.metadata() or {}).get("sparsekv_partial", "{}"))
            if state.get("inputs") != inputs:
                return 0, {}
            return int(state["done"]), unpack({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
    except (SafetensorError, ValueError, KeyError, OSError):
        return 0, {}


def _candidate_ranks(head_dim: int, rank: int) -> tuple[int, ...]:
    """Powers of two round the mean rank: what kernels can tile."""
    return tuple(sorted({max(8, rank // 2), rank, min(head_dim, rank * 2)}))


def default_out(model: Path, method: Method) -> Path:
    """Where a fitted basis goes unless told otherwise: the user's cache, named after the model's folder."""
    return cache_dir() / "basis" / f"{model.resolve().name}-{method}.safetensors"
