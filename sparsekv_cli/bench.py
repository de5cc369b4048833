"""What `bench swarm` and `bench replay` share: options, from options to a run, and from a run to an exit status."""

from __future__ import annotations

import enum
import importlib.util
import json as json_module
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from sparsekv.profiles.errors import ExitCode, SparsekvError

from . import console

if TYPE_CHECKING:
    from sparsekv.bench.swarm.run import Outcome, Request

E = TypeVar("E", bound=enum.StrEnum)

Url = Annotated[str, typer.Option("--url", help="The server.")]
Model = Annotated[str | None, typer.Option("--model", help="Needed only where the server has several.")]
KeyFile = Annotated[Path | None, typer.Option("--api-key-file", metavar="FILE", help="File with the key; SPARSEKV_API_KEY goes before it.")]
ProfileName = Annotated[str | None, typer.Option("--profile", help="The profile that the server runs; kept with the results.")]
Settings = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="A changed value of the profile; repeatable.")]
Out = Annotated[Path, typer.Option("--out", metavar="DIR", help="The run gets a new folder in it.")]
UiName = Annotated[str | None, typer.Option("--ui", help="live, simple or none (default: live on a terminal, else simple).")]
Warm = Annotated[bool, typer.Option("--warm", help="May hit prefixes of an earlier run; without it each run's prompts are new.")]
Vocabulary = Annotated[int, typer.Option("--vocabulary", help="Token prompts: ids stay under it.")]
SloTtft = Annotated[float | None, typer.Option("--slo-ttft", metavar="S", help="A request is good if its first token comes within this.")]
SloTpot = Annotated[float | None, typer.Option("--slo-tpot", metavar="S", help="… and each further token within this, on average.")]
FirstToken = Annotated[float, typer.Option("--first-token-timeout", metavar="S", help="Longest wait for a first token.")]
Idle = Annotated[float, typer.Option("--idle-timeout", metavar="S", help="Longest silence, keep-alive comments included.")]
Gpus = Annotated[int | None, typer.Option("--gpus", help="GPUs of the server (default: this machine's, if it runs here).")]
MinWindow = Annotated[float, typer.Option("--min-window", metavar="S", help="A shorter decode window is INVALID.")]
ExtraBody = Annotated[str | None, typer.Option("--extra-body", metavar="JSON", help="Fields added to every request.")]
Json = Annotated[bool, typer.Option("--json", help="The summary as JSON on stdout instead of tables.")]

EPILOG = (
    "Exit status: 0 VALID, 1 INVALID, 2 wrong usage, 3 no server, 130 interrupted (the report is written all the same). "
    "Each run has its own folder with summary.json, report.md, report.html, requests.jsonl, timeseries.csv and trace.mooncake.jsonl. "
)


def require_extra() -> None:
    """Says how to install what a benchmark needs, before anything starts.

    Raises:
        SparsekvError: the extra is missing.
    """
    missing = [name for name in ("aiohttp", "jinja2", "matplotlib", "numpy", "psutil") if importlib.util.find_spec(name) is None]
    if missing:
        raise SparsekvError(
            f"this needs {', '.join(missing)}", hint="pip install 'sparsekv[bench]'", exit_code=ExitCode.ENVIRONMENT
        )


def choice(kind: type[E], option: str, value: str) -> E:
    """One of an enumeration's values."""
    try:
        return kind(value)
    except ValueError:
        raise SparsekvError(f"{option} {value!r}: one of {', '.join(kind)}") from None


def parse_object(option: str, text: str | None) -> dict[str, Any]:
    """A JSON object; none is an empty one."""
    if text is None:
        return {}
    try:
        value = json_module.loads(text)
    except ValueError as error:
        raise SparsekvError(f"{option}: not JSON: {error}") from None
    if not isinstance(value, dict):
        raise SparsekvError(f"{option}: a JSON object, not {text!r}")
    return value


def make_request(out: Path, ui: str | None, key_file: Path | None, profile: str | None, settings: Sequence[str] | None) -> Request:
    """Resolves the profile, if one was named, and the screen."""
    from sparsekv.bench.swarm.options import Ui
    from sparsekv.bench.swarm.run import Request

    if settings and not profile:
        raise SparsekvError("--set changes a profile", hint="name it with --profile")
    text = ""
    if profile:
        import yaml

        from sparsekv.profiles.loader import load_profile

        loaded = load_profile(profile, settings or ())
        profile = loaded.name
        text = yaml.safe_dump(loaded.profile.model_dump(mode="json"), sort_keys=False)
    terminal = sys.stderr.isatty()
    shown = choice(Ui, "--ui", ui) if ui else Ui.LIVE if terminal else Ui.SIMPLE
    if shown is Ui.LIVE and not terminal:
        raise SparsekvError("--ui live needs a terminal", hint="use --ui simple")
    return Request(out, shown, key_file, profile, text)


def finish(outcome: Outcome, *, json: bool) -> None:
    """Prints the summary and ends with the verdict's exit status."""
    from sparsekv.bench.report.console import print_summary

    if json:
        console.print_json(outcome.summary)
    else:
        print_summary(outcome.summary, outcome.folder, console.out())
    if outcome.interrupted:
        raise typer.Exit(ExitCode.INTERRUPTED)
    if not outcome.summary["verdict"]["valid"]:
        raise typer.Exit(ExitCode.FAILED)
