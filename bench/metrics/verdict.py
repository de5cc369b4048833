"""Whether a run may be quoted, and every reason why not."""

from __future__ import annotations

from dataclasses import dataclass, field

from .data import Run, Window
from .declare import METRICS

MAX_ERRORS = 0.01
MAX_THROTTLED = 0.01
MAX_CPU = 0.9
MAX_FOREIGN = 0.05
MIN_CONTEXT = 0.95
WARM_EXCESS = 0.1
MAX_LAG = 0.05
"""Mean lateness of the client's event loop, as a share of the median gap between events."""
MIN_LAG_MS = 2.0


@dataclass
class Verdict:
    """Valid if there are no reasons against it; notes are what a reader should know besides."""

    reasons: list[tuple[str, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def valid(self) -> bool:
        return not self.reasons

    def add(self, code: str, text: str) -> None:
        self.reasons.append((code, text))


def judge(run: Run) -> Verdict:
    """Looks at the whole run; works on one that was cut short too."""
    verdict = Verdict()
    windows = {window.name: window for window in run.windows}
    for check in (_state, _errors, _agents, _lengths, _context, _warm_cache, _client, _throttling, _strangers, _counts, _recall):
        check(run, windows, verdict)
    _notes(run, verdict)
    return verdict


def _state(run: Run, windows: dict[str, Window], verdict: Verdict) -> None:
    state = run.info["state"]
    if state != "complete":
        verdict.add(state, {"running": "the run is not over, or was killed"}.get(state, f"the run was {state}"))


def _errors(run: Run, windows: dict[str, Window], verdict: Verdict) -> None:
    ended = [r for r in run.requests if r.status != "stopped"]
    failed = [r for r in ended if r.failed]
    if not any(r.ok for r in ended):
        verdict.add("errors", "no request was answered")
    elif len(failed) > MAX_ERRORS * len(ended):
        kinds = ", ".join(sorted({r.status for r in failed}))
        verdict.add("errors", f"{len(failed)} of {len(ended)} requests failed ({kinds}); at most {MAX_ERRORS:.0%} may")


def _agents(run: Run, windows: dict[str, Window], verdict: Verdict) -> None:
    for agent, reason in run.info["failures"].items():
        verdict.add("agent_stopped", f"agent {agent} stopped: {reason}")


def _lengths(run: Run, windows: dict[str, Window], verdict: Verdict) -> None:
    options = run.info["options"]
    wanted = [name for name, asked in (("decode", options["decode_seconds"]), ("during_intruder", options["intruder_tokens"])) if asked]
    for name in wanted:
        if name not in windows:
            verdict.add("too_short", f"there was no time in which every agent decoded ({name.replace('_', ' ')})")
    decode = windows.get("decode")
    if decode is not None and decode.seconds < options["min_window"]:
        verdict.add("too_short", f"all agents decoded together for only {decode.seconds:.1f} s; at least {options['min_window']:g} s count")


def _context(run: Run, windows: dict[str, Window], verdict: Verdict) -> None:
    target = run.info["options"]["context"]
    if not target:
        return
    for agent in range(run.agents):
        reached = max(
            (r.input_tokens + (r.output_tokens or 0) for r in run.requests if r.agent == agent and r.ok and r.input_tokens), default=0
        )
        if reached < MIN_CONTEXT * target:
            verdict.add("context", f"agent {agent} came to {reached} tokens of context, not {target}")


def _warm_cache(run: Run, windows: dict[str, Window], verdict: Verdict) -> None:
    fill = windows.get("fill")
    if fill is None:
        return
    hits, possible = METRICS["prefix_hits"].compute(fill), METRICS["prefix_hits_possible"].compute(fill)
    if not isinstance(hits, float) or not isinstance(possible, float):
        return
    if hits - possible > WARM_EXCESS:
        text = f"the server already held {hits - possible:.0%} of the prompts when the contexts were filled"
        if run.info["options"]["warm"]:
            verdict.notes.append(f"warm start: {text}")
        else:
            verdict.add("warm_cache", text)


def _client(run: Run, windows: dict[str, Window], verdict: Verdict) -> None:
    for name in ("warm", "decode", "replay"):
        window = windows.get(name)
        if window is None:
            continue
        lag, gap = _mean(window.sampled("lag_mean_ms")), METRICS["itl"].compute(window)
        if lag is not None and gap and not isinstance(gap, float):
            allowed = max(MIN_LAG_MS, MAX_LAG * 1e3 * sorted(gap)[len(gap) // 2])
            if lag > allowed:
                text = f"the client woke up {lag:.1f} ms late on average in the {name} phase; {allowed:.1f} ms are tolerable"
                verdict.add("client_saturated", text)
            late = _mean(window.sampled("lag_p99_ms"))
            if late is not None and late > 2 * allowed:
                verdict.notes.append(f"p99 latencies of the {name} phase may be off by {late:.1f} ms: so late did the client wake up")
        cpu = window.sampled("client_cpu")
        if (share := _mean(cpu)) is not None and share > MAX_CPU:
            verdict.add("client_saturated", f"the client used {share:.0%} of a core in the {name} phase")


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _throttling(run: Run, windows: dict[str, Window], verdict: Verdict) -> None:
    for name in ("warm", "decode", "replay"):
        throttled = windows[name].sampled("gpu_throttled") if name in windows else []
        share = sum(throttled) / len(throttled) if throttled else 0.0
        if share > MAX_THROTTLED:
            verdict.add("throttled", f"a GPU was slowed by heat or its power supply in {share:.0%} of the {name} phase")


def _strangers(run: Run, windows: dict[str, Window], verdict: Verdict) -> None:
    """The server's count of generated tokens against ours: more means that somebody else used it."""
    served = run.total.counter("vllm:generation_tokens_total")
    ours = sum(sum(r.tokens_of_events) for r in run.requests)
    if served and ours and served > ours * (1 + MAX_FOREIGN) + 64 * run.agents:
        verdict.add("other_clients", f"the server generated {served:.0f} tokens, this client received {ours:.0f}: it was not alone")


def _counts(run: Run, windows: dict[str, Window], verdict: Verdict) -> None:
    unknown = sum(r.ok and r.output_tokens is None for r in run.requests)
    if unknown:
        verdict.add("counts_unknown", f"the server did not say how many tokens {unknown} answers had")


def _recall(run: Run, windows: dict[str, Window], verdict: Verdict) -> None:
    options, window = run.info["options"], windows.get("warm")
    recall = METRICS["recall"].compute(window) if window else None
    sparse = METRICS["sparse_steps"].compute(run.total)
    if isinstance(recall, float):
        floor = options.get("recall_floor")
        if floor is not None and recall < floor:
            verdict.add("recall_low", f"recall of planted facts is {recall:.2f}, under the floor of {floor:g}")
    elif options["check_recall"]:
        verdict.add("recall_unknown", "no question for a planted fact was answered")
    elif isinstance(sparse, float) and sparse > 0:
        verdict.add("recall_unknown", "attention was sparse and nothing says what it cost: run with --check-recall")


def _notes(run: Run, verdict: Verdict) -> None:
    info = run.info
    sparse = METRICS["sparse_steps"].compute(run.total)
    if sparse == 0.0:
        verdict.notes.append("every step was dense: contexts too short for sparse attention, or a dense profile")
    elif sparse is None:
        verdict.notes.append("the server has no metrics of sparsekv: sparsity and coverage are unknown")
    if info["server"].get("tools_refused"):
        verdict.notes.append(f"reading by script, since the server takes no tools: {info['server']['tools_refused']}")
    uncounted = sum(r.status == "stopped" and r.output_tokens is None and bool(r.gaps_ms) for r in run.requests)
    if uncounted:
        verdict.notes.append(f"{uncounted} streams were stopped without a count by the server: each of their events counts as one token")
    if max(info.get("reread", []), default=1) > 1:
        verdict.notes.append("the code base is smaller than the context: agents read it more than once")
    capped = run.total.sampled("gpu_power_capped")
    if capped and sum(capped) / len(capped) > MAX_THROTTLED:
        verdict.notes.append(f"a GPU was at its power cap in {sum(capped) / len(capped):.0%} of the run")
    swap = run.total.sampled("swap_bytes")
    if swap and max(swap) - swap[0] > 64 << 20:
        verdict.notes.append("the machine swapped")
    verdict.notes += info.get("notes", [])
