"""`sparsekv refit-basis`: fits the sketch of a model and says what it is worth."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from sparsekv_cli import console

app = typer.Typer(add_completion=False)


@app.command(
    epilog="Stopped by Ctrl-C it keeps the statistics of every whole sequence in FILE.partial and goes on from there when it is run "
    "again. The same inputs give the same bytes. Examples:\n\n  sparsekv refit-basis --model ./Qwen3-8B\n\n"
    "  sparsekv refit-basis --model ./Qwen3.8-27B-AWQ --context 131072 --corpus ~/src --rank auto"
)
def refit_basis(
    model: Annotated[Path, typer.Option("--model", metavar="DIR", help="Folder of the model: config.json, safetensors, tokenizer.")],
    out: Annotated[Path | None, typer.Option("--out", metavar="FILE", help="The basis file (default: in the cache, by model).")] = None,
    method: Annotated[str, typer.Option("--method", help="`kq` fits queries and keys together, `pca` the keys alone.")] = "kq",
    rank: Annotated[
        str, typer.Option("--rank", metavar="N|auto", help="Dimensions per KV head; `auto` shares them by layer (default: half a head).")
    ] = "",
    bits: Annotated[int, typer.Option("--bits", help="Of one code: 4 or 8.")] = 4,
    context: Annotated[int, typer.Option("--context", min=256, help="Tokens of a calibration sequence.")] = 8192,
    sequences: Annotated[int, typer.Option("--sequences", min=1, help="Sequences to calibrate on.")] = 8,
    heldout_sequences: Annotated[int, typer.Option("--heldout-sequences", min=1, help="Other sequences to test on.")] = 2,
    corpus: Annotated[Path | None, typer.Option("--corpus", metavar="DIR", help="Your own text (default: the bundled corpus).")] = None,
    seed: Annotated[int, typer.Option("--seed", help="Of the order of the text.")] = 0,
    device: Annotated[str, typer.Option("--device", help="Where transformers runs the model: cpu, cuda, cuda:1.")] = "cpu",
    json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Fit a basis for a model; one that is no better than a control is refused and not written."""
    from sparsekv.basis.capture import TransformersCapture, weights_fingerprint
    from sparsekv.basis.format import load_basis
    from sparsekv.basis.progress import Eta
    from sparsekv.basis.refit import RefitOptions, check_options, default_out, partial_path, refit
    from sparsekv_cli.commands.basis import describe

    options = RefitOptions(
        model=model,
        out=out or default_out(model, method),  # type: ignore[arg-type]  # checked below
        method=method,  # type: ignore[arg-type]
        rank=_rank(rank),
        bits=bits,  # type: ignore[arg-type]
        context=context,
        sequences=sequences,
        heldout_sequences=heldout_sequences,
        corpus=corpus,
        seed=seed,
    )
    check_options(options)
    if partial_path(options.out).is_file():
        console.note(f"found {partial_path(options.out)}: goes on from there where the inputs are the same")
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=True, trust_remote_code=False)
    source = TransformersCapture(model, device)
    eta = Eta()
    refit(options, source, tokenizer, weights_fingerprint(model), lambda *step: console.note(eta.line(*step)))
    describe(load_basis(options.out), json=json)
    console.note(f"wrote {options.out}")


def _rank(text: str) -> Any:
    if text in ("", "auto"):
        return text or None
    try:
        return int(text)
    except ValueError:
        raise typer.BadParameter("give a whole number or `auto`", param_hint="--rank") from None
