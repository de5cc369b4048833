"""The tables of a report, made once from the summary and written as Markdown, HTML or to the terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from .format import bytes_, number, tokens
from .summary import window_metrics

TITLES = {
    "fill": "Cold fill",
    "warm": "Warm follow-ups",
    "decode": "Steady decode",
    "before_intruder": "Before the intruder",
    "during_intruder": "Beside the intruder",
    "after_intruder": "After the intruder",
    "intrusion": "Intruder",
    "replay": "Replay",
}
"""Windows as they are called in print."""
_SHOWN = ("mean", "p50", "p90", "p95", "p99", "max", "n")


@dataclass(frozen=True)
class Table:
    title: str
    note: str
    columns: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]


def verdict_line(summary: dict[str, Any]) -> str:
    """VALID or INVALID with the figures that matter most."""
    decode, warm = window_metrics(summary, "decode") or window_metrics(summary, "replay"), window_metrics(summary, "warm")
    parts = []
    if "output_rate" in decode:
        parts.append(f"{number(decode['output_rate'], 'tok/s')} decoded by {summary['run']['options']['agents']} agents")
    if "tpot" in decode:
        parts.append(f"TPOT p99 {number(decode['tpot']['p99'], 's')}")
    if "ttft" in warm:
        parts.append(f"follow-ups start in {number(warm['ttft']['p50'], 's')} (p50)")
    if "read_share" in decode:
        parts.append(f"{number(decode['read_share'], '%', 2)} of the context read")
    if "coverage" in decode:
        parts.append(f"coverage {number(decode['coverage'], '%', 1)}")
    parts.append(f"recall {warm['recall']:.2f}" if "recall" in warm else "recall not asked")
    return f"{'VALID' if summary['verdict']['valid'] else 'INVALID'}: {', '.join(parts)}"


def all_tables(summary: dict[str, Any]) -> Iterator[Table]:
    yield setup(summary)
    if summary["windows"]:
        yield figures(summary)
        yield distributions(summary)
    if summary["contexts"]:
        yield contexts(summary)
    yield agents(summary)
    if summary["errors"]:
        yield errors(summary)
    if summary["definitions"]:
        yield definitions(summary)


def setup(summary: dict[str, Any]) -> Table:
    run, environment = summary["run"], summary["environment"]
    options, server, repository = run["options"], run["server"], run["repository"]
    gpus = [
        f"{g.get('name')}, {number(g.get('power_limit_w'), 'W', 0)} of {number(g.get('power_limit_default_w'), 'W', 0)},"
        f" PCIe {g.get('pcie_gen', '?')}.0 x{g.get('pcie_width', '?')}"
        f" (up to {g.get('pcie_gen_max', '?')}.0 x{g.get('pcie_width_max', '?')})"
        for g in environment["gpus"]
    ]
    rows = [
        ("Command", f"`{run['command']}`"),
        ("Started, took", f"{run['started']}, {run['seconds']:.0f} s"),
        ("Server", f"{server['model']}, context {server['max_model_len'] or 'unknown'}, vLLM {server['vllm_version'] or 'unknown'}"),
        ("Load", _load(options, run["kind"])),
        ("Profile", run["profile"] or "not given"),
        ("Machine", f"{environment['cpu']}, {environment['cores']} cores, {bytes_(environment['memory_bytes'])}"),
        ("GPUs", "; ".join(gpus) or "none"),
        ("Versions", ", ".join(f"{k} {v}" for k, v in environment["versions"].items())),
        ("Commit", environment["commit"] or "unknown"),
        ("Trace", f"sha256 {run['trace'][:16]}" if run["trace"] else "none yet"),
    ]
    if repository:
        skipped = sum(repository["reasons"].values())
        rows.insert(
            4,
            (
                "Code base",
                f"{repository['name']}: {repository['files']} files, {repository['chars']:,} characters, {skipped} entries skipped",
            ),
        )
    if not environment["server_on_this_machine"]:
        rows.insert(6, ("", "the server is elsewhere: machine, GPUs and versions are the client's"))
    return Table("What was run", "", ("", ""), rows)


def figures(summary: dict[str, Any]) -> Table:
    """Plain numbers by window; of a distribution the median, which `distributions` shows in full."""
    windows = summary["windows"]
    rows = []
    for name, definition in summary["definitions"].items():
        values = [w["metrics"].get(name) for w in windows]
        if any(isinstance(v, float) for v in values):
            rows.append((definition["title"], *(number(v, definition["unit"], _digits(name)) for v in values)))
    rows.insert(0, ("Length of the window", *(number(w["end"] - w["start"], "s") for w in windows)))
    rows.insert(1, ("Requests of the phase", *(str(w["requests"]) for w in windows)))
    return Table("Figures", "Rates exclude ramp and drain.", ("", *(TITLES.get(w["name"], w["name"]) for w in windows)), rows)


def distributions(summary: dict[str, Any]) -> Table:
    rows = []
    for window in summary["windows"]:
        for name, value in window["metrics"].items():
            if isinstance(value, dict):
                unit = summary["definitions"][name]["unit"]
                cells = (str(int(value[s])) if s == "n" else number(value[s], unit, _digits(name)) for s in _SHOWN)
                rows.append((TITLES.get(window["name"], window["name"]), summary["definitions"][name]["title"], *cells))
    return Table("Distributions", "", ("Phase", "", *_SHOWN), rows)


def contexts(summary: dict[str, Any]) -> Table:
    rows = [
        (
            c["context"],
            str(c["requests"]),
            number(c["ttft"]["p50"], "s") if c["ttft"] else "–",
            number(c["ttft"]["p99"], "s") if c["ttft"] else "–",
            number(c["tpot"]["p50"], "s") if c["tpot"] else "–",
            number(c["agent_rate"], "tok/s"),
        )
        for c in summary["contexts"]
    ]
    note = "By prompt length, all phases; first-token times without the cold fill."
    return Table("By context length", note, ("Context", "Requests", "TTFT p50", "TTFT p99", "TPOT p50", "Per stream"), rows)


def agents(summary: dict[str, Any]) -> Table:
    rows = [
        (
            str(a["agent"]),
            str(a["turns"]),
            tokens(a["context"]),
            tokens(a["output_tokens"]),
            number(a["ttft"]["p50"], "s") if a["ttft"] else "–",
            number(a["decode_rate"], "tok/s"),
            f"{a['recalled'][0]} of {a['recalled'][1]}" if a["recalled"] else "–",
            str(a["failed"]),
            a["outcome"],
        )
        for a in summary["agents"]
    ]
    columns = ("Agent", "Turns", "Context", "Output", "TTFT p50", "Decode", "Recall", "Failed", "Outcome")
    return Table("Agents", "First-token times without the cold fill.", columns, rows)


def errors(summary: dict[str, Any]) -> Table:
    rows = [(kind, str(e["count"]), f"agent {e['agent']} at {e['at']} s", e["first"] or "–") for kind, e in summary["errors"].items()]
    return Table("Errors", "None of these counts as an answer.", ("Kind", "Count", "First", "What was said"), rows)


def definitions(summary: dict[str, Any]) -> Table:
    rows = [(d["title"], d["unit"] or "–", d["formula"]) for d in summary["definitions"].values()]
    return Table("Definitions", "", ("Metric", "Unit", "Definition"), rows)


def _load(options: dict[str, Any], kind: str) -> str:
    if kind == "replay":
        return f"replay of a trace with {options['agents']} agents, seed {options['seed']}"
    parts = [
        f"{options['agents']} agents x {options['context']} tokens",
        f"{options['turns']} follow-ups each",
        f"{options['decode_seconds']:g} s of decode",
    ]
    if options["intruder_tokens"]:
        parts.append(f"an intruder of {options['intruder_tokens']} tokens")
    parts.append(f"plan {options['plan']}, seed {options['seed']}, temperature 0, {'warm' if options['warm'] else 'cold'} start")
    if options["ignore_eos"]:
        parts.append("answers of full length")
    return ", ".join(parts)


def _digits(name: str) -> int:
    from sparsekv.bench.metrics import METRICS

    return METRICS[name].digits
