"""`sparsekv bench replay`: a recorded trace, sent again."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sparsekv_cli.bench import (
    EPILOG,
    ExtraBody,
    FirstToken,
    Gpus,
    Idle,
    Json,
    KeyFile,
    MinWindow,
    Model,
    Out,
    ProfileName,
    Settings,
    SloTpot,
    SloTtft,
    UiName,
    Url,
    Vocabulary,
    Warm,
    finish,
    make_request,
    parse_object,
    require_extra,
)

app = typer.Typer(add_completion=False)


@app.command(epilog=EPILOG + "Example:\n\n  sparsekv bench replay runs/dense-8x250000/trace.mooncake.jsonl --profile sparse")
def replay(
    trace: Annotated[Path, typer.Argument(metavar="TRACE", help="A Mooncake trace: ours, or another with hash_ids.")],
    url: Url = "http://127.0.0.1:8000",
    agents: Annotated[
        int | None, typer.Option("--agents", "-n", help="Conversations at once (default: as many as the trace has agents, else 8).")
    ] = None,
    max_delay: Annotated[float, typer.Option("--max-delay", metavar="S", help="Recorded pauses are cut to this.")] = 10.0,
    seed: Annotated[int, typer.Option("--seed")] = 0,
    model: Model = None,
    vocabulary: Vocabulary = 32000,
    warm: Warm = False,
    slo_ttft: SloTtft = None,
    slo_tpot: SloTpot = None,
    first_token: FirstToken = 3600.0,
    idle: Idle = 600.0,
    min_window: MinWindow = 10.0,
    gpus: Gpus = None,
    extra_body: ExtraBody = None,
    key_file: KeyFile = None,
    profile: ProfileName = None,
    settings: Settings = None,
    out: Out = Path("runs"),
    ui: UiName = None,
    json: Json = False,
) -> None:
    """Send a trace's requests again: the same lengths and shared prefixes in the same order, as token ids."""
    require_extra()
    from sparsekv.bench.swarm.options import Limits, Slo
    from sparsekv.bench.swarm.replay import replay_options, run_replay
    from sparsekv.bench.swarm.trace import read_trace

    rows = read_trace(trace)
    options = replay_options(
        rows, url, trace, agents, max_delay=max_delay, seed=seed, model=model, vocabulary=vocabulary, warm=warm,
        slo=Slo(slo_ttft, slo_tpot), limits=Limits(first_token=first_token, idle=idle), min_window=min_window, gpus=gpus,
        extra_body=parse_object("--extra-body", extra_body),
    )  # fmt: skip
    finish(run_replay(rows, options, make_request(out, ui, key_file, profile, settings)), json=json)
