"""`sparsekv bench swarm`: coding agents against a server, measured."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sparsekv_cli import console
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
    choice,
    finish,
    make_request,
    parse_object,
    require_extra,
)

app = typer.Typer(add_completion=False)


@app.command(
    epilog=EPILOG
    + "Examples:\n\n  sparsekv bench swarm --agents 8 --context 250000 --check-recall"
    + "\n\n  sparsekv bench swarm --agents 4 --context 6144 --plan scripted --decode-seconds 30"
)
def swarm(
    repo: Annotated[Path, typer.Option("--repo", metavar="DIR", help="Code base that the agents read; nothing in it is changed.")] = Path(),
    url: Url = "http://127.0.0.1:8000",
    agents: Annotated[int, typer.Option("--agents", "-n")] = 8,
    context: Annotated[int, typer.Option("--context", "-c", metavar="TOKENS", help="Each agent's, before the measured phases.")] = 32768,
    read_tokens: Annotated[
        int, typer.Option("--read-tokens", help="Read each turn while filling (default: an eighth of the context, at most 8192).")
    ] = 0,
    fill_answer_tokens: Annotated[int, typer.Option("--fill-answer-tokens", help="Longest answer while filling.")] = 32,
    turns: Annotated[int, typer.Option("--turns", help="Follow-up questions of each agent.")] = 4,
    answer_tokens: Annotated[int, typer.Option("--answer-tokens", help="Longest answer of a follow-up.")] = 192,
    follow_up_tokens: Annotated[int, typer.Option("--follow-up-tokens", help="Read with each follow-up.")] = 128,
    decode_seconds: Annotated[float, typer.Option("--decode-seconds", help="Steady decode of all agents; 0: none.")] = 60.0,
    decode_tokens: Annotated[int, typer.Option("--decode-tokens", help="Longest answer of steady decode.")] = 1024,
    intruder_tokens: Annotated[
        int, typer.Option("--intruder-tokens", help="One more agent reads a prompt this long while the others decode; 0: none.")
    ] = 0,
    ramp: Annotated[float, typer.Option("--ramp", metavar="S", help="Agents start spread over this.")] = 2.0,
    seed: Annotated[int, typer.Option("--seed")] = 0,
    model: Model = None,
    plan: Annotated[
        str, typer.Option("--plan", help="Who decides what is read: model, scripted, or auto (the model where the server takes tools).")
    ] = "auto",
    prompt: Annotated[str, typer.Option("--prompt", help="chat, or tokens for a server without a tokenizer.")] = "chat",
    vocabulary: Vocabulary = 32000,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Answers of full length, whatever the model says.")] = False,
    warm: Warm = False,
    check_recall: Annotated[bool, typer.Option("--check-recall", help="Plant facts while filling and ask for them later.")] = False,
    facts: Annotated[int, typer.Option("--facts", help="Planted in each agent's context.")] = 4,
    recall_floor: Annotated[float | None, typer.Option("--recall-floor", help="Less recall than this is INVALID.")] = None,
    slo_ttft: SloTtft = None,
    slo_tpot: SloTpot = None,
    first_token: FirstToken = 3600.0,
    idle: Idle = 600.0,
    min_window: MinWindow = 10.0,
    gpus: Gpus = None,
    extra_body: ExtraBody = None,
    record_text: Annotated[
        bool, typer.Option("--record-text", help="Keep prompts and answers in text.jsonl, readable by you alone. Off: no text is stored.")
    ] = False,
    key_file: KeyFile = None,
    profile: ProfileName = None,
    settings: Settings = None,
    out: Out = Path("runs"),
    ui: UiName = None,
    json: Json = False,
) -> None:
    """Let N coding agents ask about a code base until their contexts are long, then measure follow-ups and steady decode."""
    require_extra()
    from sparsekv.bench.swarm.options import Limits, Plan, PromptForm, Slo, SwarmOptions
    from sparsekv.bench.swarm.run import run_swarm

    options = SwarmOptions(
        url=url, repo=repo, agents=agents, context=context, read_tokens=read_tokens, fill_answer_tokens=fill_answer_tokens, turns=turns,
        answer_tokens=answer_tokens, follow_up_tokens=follow_up_tokens, decode_seconds=decode_seconds, decode_tokens=decode_tokens,
        intruder_tokens=intruder_tokens, ramp_seconds=ramp, seed=seed, model=model, plan=choice(Plan, "--plan", plan),
        prompt=choice(PromptForm, "--prompt", prompt), vocabulary=vocabulary, ignore_eos=ignore_eos, warm=warm, check_recall=check_recall,
        facts=facts, recall_floor=recall_floor, slo=Slo(slo_ttft, slo_tpot), limits=Limits(first_token=first_token, idle=idle),
        min_window=min_window, gpus=gpus, extra_body=parse_object("--extra-body", extra_body), record_text=record_text,
    )  # fmt: skip
    request = make_request(out, ui, key_file, profile, settings)
    if record_text:
        console.warn("--record-text keeps every prompt and answer in the run's folder (text.jsonl, mode 600)")
    finish(run_swarm(options, request), json=json)
