"""summary.json: everything a report shows, as numbers, in a form that stays readable by later versions."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

from sparsekv.bench.metrics import METRICS, Run, Window, evaluate, judge, summarize

SCHEMA_VERSION = 1
BUCKETS = ((0, 8192, "0-8K"), (8192, 32768, "8-32K"), (32768, 65536, "32-64K"), (65536, 131072, "64-128K"), (131072, 1 << 62, "128K+"))


def summarize_run(run: Run) -> dict[str, Any]:
    """The summary of a run, whatever state it is in. Values are in the metrics' units, shares between 0 and 1."""
    verdict = judge(run)
    windows = run.windows
    info = run.info
    used = {name for window in windows for name in evaluate(window)}
    return {
        "schema_version": SCHEMA_VERSION,
        "state": info["state"],
        "verdict": {
            "valid": verdict.valid,
            "reasons": [{"code": code, "text": text} for code, text in verdict.reasons],
            "notes": verdict.notes,
        },
        "run": {
            "name": run.folder.name,
            "kind": info["kind"],
            "started": info["started"],
            "seconds": round(run.total.seconds, 3),
            "command": info["command"],
            "options": info["options"],
            "server": info["server"],
            "repository": {k: v for k, v in info["repository"].items() if k != "skipped"} if info.get("repository") else None,
            "profile": info.get("profile"),
            "trace": _trace_digest(run),
        },
        "environment": run.environment,
        "windows": [
            {"name": w.name, "start": round(w.start, 3), "end": round(w.end, 3), "requests": len(w.requests), "metrics": evaluate(w)}
            for w in windows
        ],
        "contexts": list(by_context(run)),
        "agents": [_agent(run, agent, windows) for agent in range(run.agents)],
        "errors": _errors(run),
        "definitions": {
            name: {"title": m.title, "unit": m.unit, "better": m.better, "formula": m.formula}
            for name, m in METRICS.items()
            if name in used
        },
    }


def window_metrics(summary: dict[str, Any], name: str) -> dict[str, Any]:
    """The metrics of a window; empty if the run has no such window."""
    return next((w["metrics"] for w in summary["windows"] if w["name"] == name), {})


def by_context(run: Run) -> Iterator[dict[str, Any]]:
    """By length of the prompt: what a longer context costs. Prompts that nothing was reused for are left out of the first-token time."""
    for low, high, title in BUCKETS:
        chosen = [
            r for r in run.requests if not r.failed and r.input_tokens is not None and low <= r.input_tokens < high and r.kind != "intrude"
        ]
        if not chosen:
            continue
        ttft = [r.first - r.sent for r in chosen if r.first is not None and r.phase != "fill"]
        tpot = [r.tpot for r in chosen if r.tpot]
        yield {
            "context": title,
            "requests": len(chosen),
            "ttft": summarize(ttft) if ttft else None,
            "tpot": summarize(tpot) if tpot else None,
            "agent_rate": 1 / summarize(tpot)["mean"] if tpot else None,
        }


def _agent(run: Run, agent: int, windows: list[Window]) -> dict[str, Any]:
    own = [r for r in run.requests if r.agent == agent]
    answered = [r for r in own if r.ok]
    ttft = [r.first - r.sent for r in answered if r.first is not None and r.phase != "fill"]
    decode = next((w for w in windows if w.name in ("decode", "replay")), None)
    scores = [r.recalled for r in answered if r.recalled is not None]
    return {
        "agent": agent,
        "role": (run.info.get("roles") or {}).get(str(agent)),
        "turns": len({r.turn for r in answered}),
        "requests": len(own),
        "failed": sum(r.failed for r in own),
        "input_tokens": sum(r.input_tokens or 0 for r in answered),
        "output_tokens": sum(sum(r.tokens_of_events) for r in own if not r.failed),
        "context": max((r.input_tokens + (r.output_tokens or 0) for r in answered if r.input_tokens), default=0),
        "ttft": summarize(ttft) if ttft else None,
        "decode_rate": decode.output_tokens(agent) / decode.seconds if decode is not None else None,
        "recalled": [sum(scores), len(scores)] if scores else None,
        "outcome": run.info["failures"].get(str(agent)) or "done",
    }


def _errors(run: Run) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for record in run.requests:
        if record.failed:
            kind = found.setdefault(record.status, {"count": 0, "first": record.detail, "agent": record.agent, "at": round(record.sent, 2)})
            kind["count"] += 1
    return found


def _trace_digest(run: Run) -> str | None:
    trace = run.folder / "trace.mooncake.jsonl"
    return hashlib.sha256(trace.read_bytes()).hexdigest() if trace.is_file() else None
