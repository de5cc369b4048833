"""Whole swarms: phases, measured figures against what the server did, recall, tools, an intruder, and agents that fail."""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sparsekv.bench.fake_server import Behaviour, FakeServer, recall_answer
from sparsekv.bench.swarm.options import Limits, Plan, PromptForm, Slo
from sparsekv.profiles.errors import SparsekvError

TTFT, ITL = 0.25, 0.1


def test_what_was_put_in_comes_out(run_swarm: Callable[..., Any]) -> None:
    """Known TTFT, ITL and counts, within 1 %."""
    done = run_swarm(FakeServer(default=Behaviour(ttft=TTFT, itl=ITL)))
    assert done.outcome.summary["verdict"] == {"valid": True, "reasons": [], "notes": done.outcome.summary["verdict"]["notes"]}
    for name in ("fill", "warm", "decode"):
        metrics = done.metrics(name)
        assert metrics["ttft"]["p50"] == pytest.approx(TTFT, rel=0.01)
        assert metrics["ttft"]["p99"] == pytest.approx(TTFT, rel=0.01)
        assert metrics["itl"]["p50"] == pytest.approx(ITL, rel=0.01)
        assert metrics["itl"]["max"] == pytest.approx(ITL, rel=0.01)
        assert metrics["tpot"]["mean"] == pytest.approx(ITL, rel=0.01)
    decode = done.metrics("decode")
    assert decode["output_rate"] == pytest.approx(3 / ITL, rel=0.01)
    assert decode["agent_rate"]["p50"] == pytest.approx(1 / ITL, rel=0.01)
    assert decode["jain"] == pytest.approx(1.0, rel=0.001)
    assert done.metrics("warm")["turn_time"]["p50"] == pytest.approx(TTFT + 23 * ITL, rel=0.01)


def test_tokens_and_hits_agree_with_the_servers_own_account(run_swarm: Callable[..., Any]) -> None:
    done = run_swarm(FakeServer(default=Behaviour(ttft=TTFT, itl=ITL, tokens_per_event=3)))
    ours = Counter((r.input_tokens, r.cached_tokens, r.output_tokens) for r in done.run.requests if r.ok)
    assert ours <= Counter((s.prompt_tokens, s.cached_tokens, s.output_tokens) for s in done.server.log)
    assert done.metrics("decode")["tokens_per_event"] == pytest.approx(3.0, rel=0.01)
    assert done.metrics("decode")["output_rate"] == pytest.approx(9 / ITL, rel=0.01)
    assert done.metrics("decode")["tpot"]["p50"] == pytest.approx(ITL / 3, rel=0.01)
    fill = done.metrics("fill")
    assert fill["prefix_hits"] == pytest.approx(fill["prefix_hits_possible"], abs=0.03)
    assert done.metrics("warm")["prefix_hits"] > 0.85


def test_prefill_is_seen_in_the_first_token(run_swarm: Callable[..., Any]) -> None:
    rate = 1000.0
    done = run_swarm(FakeServer(default=Behaviour(ttft=0.1, itl=ITL, prefill_rate=rate)))
    for r in done.run.requests:
        if r.ok:
            assert r.first - r.sent == pytest.approx(0.1 + (r.input_tokens - r.cached_tokens) / rate, rel=0.01)


def test_the_phases_are_kept_apart(run_swarm: Callable[..., Any]) -> None:
    done = run_swarm()
    phases = {p["name"]: p for p in done.run.info["phases"]}
    assert list(phases) == ["fill", "warm", "decode"]
    for name, phase in phases.items():
        assert phase["start"] <= phase["window_start"] < phase["window_end"] <= phase["end"]
        own = [r for r in done.run.requests if r.phase == name]
        assert {r.agent for r in own} == {0, 1, 2}
        assert all(phase["start"] - 0.01 <= r.sent and r.end <= phase["end"] + 0.01 for r in own)
    decode = phases["decode"]
    assert decode["window_end"] - decode["window_start"] == pytest.approx(4.0, abs=0.05)
    # The window opens when the last agent of the ramp has had a token.
    last = max(min(r.first for r in done.run.requests if r.phase == "decode" and r.agent == agent) for agent in range(3))
    assert decode["window_start"] == pytest.approx(last, abs=0.05)
    warm = phases["warm"]
    ends = [max(r.end for r in done.run.requests if r.phase == "warm" and r.agent == agent) for agent in range(3)]
    assert warm["window_end"] == pytest.approx(min(ends), abs=0.01)
    assert warm["end"] == pytest.approx(max(ends), abs=0.01)


def test_every_agent_comes_to_its_context_and_asks_new_things(run_swarm: Callable[..., Any]) -> None:
    server = FakeServer(default=Behaviour(itl=ITL), keep_bodies=True)
    done = run_swarm(server, context=2048, turns=3)
    for agent in done.outcome.summary["agents"]:
        assert agent["context"] >= 0.95 * 2048
        assert agent["turns"] > 6
    filled = [max(r.input_tokens + r.output_tokens for r in done.run.requests if r.agent == a and r.phase == "fill") for a in range(3)]
    assert all(0.95 * 2048 <= tokens <= 2048 + 64 for tokens in filled)
    questions = [body["messages"][-1]["content"].rpartition("\n")[2] for body in server.bodies[1:]]
    assert len(set(questions)) > 0.6 * len(questions)
    assert {body["temperature"] for body in server.bodies} == {0}
    openings = {body["messages"][0]["content"] for body in server.bodies[1:]}
    assert len(openings) == 3  # a role and a number each, after the same mark
    assert len({opening.partition("\n")[0] for opening in openings}) == 1


def test_the_same_seed_is_the_same_load(run_swarm: Callable[..., Any]) -> None:
    def load(seed: int) -> tuple[list[tuple[Any, ...]], list[str]]:
        server = FakeServer(default=Behaviour(itl=ITL), keep_bodies=True)
        done = run_swarm(server, seed=seed, agents=2)
        rows = sorted((r.agent, r.turn, r.phase, r.kind, r.input_tokens) for r in done.run.requests)
        return rows, sorted(body["messages"][-1]["content"] for body in server.bodies)

    first, again, other = load(1), load(1), load(2)
    assert first == again
    assert first[1] != other[1]


def test_two_runs_share_no_prefix_unless_wanted(run_swarm: Callable[..., Any]) -> None:
    """G4: the second run on a server must be as cold as the first."""

    def hits(warm: bool) -> tuple[float, set[str], list[str]]:
        server = FakeServer(default=Behaviour(itl=ITL))
        first = run_swarm(server, warm=warm)
        server.port = 0
        second = run_swarm(server, warm=warm)
        notes = second.outcome.summary["verdict"]["notes"]
        return second.metrics("fill")["prefix_hits"] - first.metrics("fill")["prefix_hits"], second.reasons, notes

    excess, reasons, _ = hits(warm=False)
    assert excess == pytest.approx(0.0, abs=0.02)
    assert reasons == set()
    excess, reasons, notes = hits(warm=True)
    assert excess > 0.2
    assert reasons == set()
    assert any(note.startswith("warm start") for note in notes)


def test_a_cache_that_is_warm_unasked_is_invalid(run_swarm: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.urandom", lambda n: b"\0" * n)  # as if the mark did not change
    server = FakeServer(default=Behaviour(itl=ITL))
    run_swarm(server)
    server.port = 0
    assert run_swarm(server).reasons == {"warm_cache"}


def test_recall_under_load(run_swarm: Callable[..., Any]) -> None:
    options: dict[str, Any] = {"check_recall": True, "facts": 3, "turns": 2, "context": 2048}
    done = run_swarm(FakeServer(default=Behaviour(itl=ITL), answer=recall_answer), **options)
    assert done.metrics("warm")["recall"] == 1.0
    assert [a["recalled"] for a in done.outcome.summary["agents"]] == [[3, 3]] * 3
    assert done.outcome.summary["verdict"]["valid"]

    def half(prompt: str) -> str | None:
        found = recall_answer(prompt)
        return found if found is None or int(found) % 2 else "I do not know"

    done = run_swarm(FakeServer(default=Behaviour(itl=ITL), answer=half), recall_floor=0.99, **options)
    right = [r.recalled for r in done.run.requests if r.kind == "recall"]
    assert done.metrics("warm")["recall"] == sum(right) / 9
    assert 0 < sum(right) < 9
    assert done.reasons == {"recall_low"}


def test_facts_stand_in_the_context_before_they_are_asked_for(run_swarm: Callable[..., Any]) -> None:
    server = FakeServer(default=Behaviour(itl=ITL), answer=recall_answer, keep_bodies=True)
    run_swarm(server, check_recall=True, facts=3, turns=3, context=2048)
    asked = [body for body in server.bodies if "What is the release code" in body["messages"][-1]["content"]]
    assert len(asked) == 9
    for body in asked:
        name = re.findall(r"release code of ([\w-]+)\?", body["messages"][-1]["content"])[0]
        holding = [i for i, m in enumerate(body["messages"][:-1]) if f"release code of {name} is" in m["content"]]
        assert len(holding) == 1
        assert body["messages"][holding[0]]["role"] == "user"


def test_an_intruder_beside_decoding_agents(run_swarm: Callable[..., Any]) -> None:
    """One huge prompt: without fair scheduling the others stand still, with it they do not, and the report says so."""
    options: dict[str, Any] = {"intruder_tokens": 10000, "decode_seconds": 4.0}
    fair = run_swarm(FakeServer(default=Behaviour(ttft=0.1, itl=ITL, prefill_rate=5000)), **options)
    beside = fair.metrics("during_intruder")
    assert beside["intruder_ttft"] == pytest.approx(2.1, rel=0.05)
    assert beside["rate_beside_intruder"] == pytest.approx(1.0, rel=0.1)
    assert {"before_intruder", "after_intruder"} <= {w["name"] for w in fair.outcome.summary["windows"]}

    stalled = run_swarm(FakeServer(default=Behaviour(ttft=0.1, itl=ITL, prefill_rate=5000), stalls=True), **options)
    beside = stalled.metrics("during_intruder")
    assert beside["rate_beside_intruder"] < 0.1
    assert beside["longest_silence"] == pytest.approx(beside["intruder_ttft"], abs=ITL)


def test_the_models_own_tool_calls_are_carried_out(run_swarm: Callable[..., Any]) -> None:
    call = Behaviour(itl=0.01, tool_calls=(("read_file", {"path": "module_3.py", "first_line": 1, "last_line": 40}),))
    server = FakeServer(default=Behaviour(itl=0.01, output_tokens=24), keep_bodies=True)
    server.script.extend([Behaviour(), call, Behaviour(itl=0.01, output_tokens=8)])  # probe, a call, its answer
    done = run_swarm(server, agents=1, plan=Plan.MODEL, decode_seconds=0.0, turns=1)
    assert done.run.info["plan"] == "model"
    with_result = [b for b in server.bodies if any(m["role"] == "tool" for m in b["messages"])]
    message = next(m for m in with_result[0]["messages"] if m["role"] == "tool")
    assert message["content"].startswith("module_3.py, lines 1-40:\ndef price_3_0")
    first = [r for r in done.run.requests if r.turn == 1]
    assert [r.tool_calls for r in first] == [1, 0]
    # What the model did not read itself, the script reads: the context comes to its size all the same.
    assert done.outcome.summary["agents"][0]["context"] >= 0.95 * 1024


def test_endless_tool_calls_end(run_swarm: Callable[..., Any]) -> None:
    server = FakeServer(default=Behaviour(itl=0.01, tool_calls=(("search", {"text": "price_1_"}),)))
    done = run_swarm(server, agents=1, plan=Plan.MODEL, decode_seconds=0.0, turns=1, context=1024)
    assert done.outcome.summary["state"] == "complete"
    assert max(sum(1 for r in done.run.requests if r.turn == turn) for turn in {r.turn for r in done.run.requests}) <= 5


def test_a_server_without_tools_is_read_for_by_script(run_swarm: Callable[..., Any]) -> None:
    done = run_swarm(FakeServer(default=Behaviour(itl=ITL), tools=False), plan=Plan.AUTO)
    assert done.run.info["plan"] == "scripted"
    assert any("takes no tools" in note for note in done.outcome.summary["verdict"]["notes"])
    with pytest.raises(SparsekvError, match="refuses tools"):
        run_swarm(FakeServer(tools=False), plan=Plan.MODEL)


def test_token_prompts(run_swarm: Callable[..., Any]) -> None:
    server = FakeServer(default=Behaviour(ttft=TTFT, itl=ITL), keep_bodies=True)
    done = run_swarm(server, prompt=PromptForm.TOKENS, vocabulary=5000)
    assert done.metrics("decode")["itl"]["p50"] == pytest.approx(ITL, rel=0.01)
    assert done.metrics("warm")["prefix_hits"] > 0.85
    ids = [i for body in server.bodies for i in body["prompt"]]
    assert min(ids) >= 100
    assert max(ids) < 6000


def test_a_failing_agent_leaves_the_others(run_swarm: Callable[..., Any]) -> None:
    """Its context cannot grow to the target: permanent, so it stops; the rest of the run goes on and is INVALID."""
    server = FakeServer(default=Behaviour(itl=ITL))
    server.script.extend([Behaviour(), Behaviour(status=400)])
    done = run_swarm(server)
    assert done.outcome.summary["state"] == "complete"
    assert done.reasons == {"agent_stopped", "context", "errors"}
    assert sum(a["outcome"] != "done" for a in done.outcome.summary["agents"]) == 1
    assert "decode" in {w.name for w in done.run.windows}


def test_a_restart_under_load(run_swarm: Callable[..., Any]) -> None:
    """All streams are cut; every agent waits for the server and goes on. The report counts the errors."""

    async def restart(fake: FakeServer) -> None:
        await asyncio.sleep(12.0)
        await fake.restart(downtime=5.0)
        await asyncio.sleep(1e6)

    done = run_swarm(beside=restart)
    assert done.outcome.summary["state"] == "complete"
    assert done.run.info["failures"] == {}
    assert "cut" in done.outcome.summary["errors"]
    assert "errors" in done.reasons


def test_busy_answers_are_waited_out_and_counted(run_swarm: Callable[..., Any]) -> None:
    server = FakeServer(default=Behaviour(itl=ITL))
    server.script.extend([Behaviour(), Behaviour(status=503, retry_after="2"), Behaviour(status=429, retry_after="2")])
    done = run_swarm(server)
    assert done.run.info["failures"] == {}
    assert done.outcome.summary["errors"].keys() == {"unavailable", "too_many"}
    failed = [r for r in done.run.requests if r.failed]
    assert all(r.retry_after == 2.0 and r.output_tokens is None for r in failed)


def test_goodput_under_an_slo(run_swarm: Callable[..., Any]) -> None:
    done = run_swarm(FakeServer(default=Behaviour(ttft=TTFT, itl=ITL)), slo=Slo(ttft=0.3, tpot=0.11))
    assert done.metrics("warm")["good_share"] == 1.0
    assert done.metrics("warm")["goodput"] > 0
    done = run_swarm(FakeServer(default=Behaviour(ttft=TTFT, itl=ITL)), slo=Slo(ttft=0.3, tpot=0.09))
    assert done.metrics("warm")["good_share"] == 0.0


def test_sparse_figures_come_from_the_engines_counters(run_swarm: Callable[..., Any]) -> None:
    done = run_swarm(FakeServer(default=Behaviour(itl=ITL), sparse_fraction=0.01, answer=recall_answer), check_recall=True)
    decode = done.metrics("decode")
    assert decode["read_share"] == pytest.approx(0.01, rel=0.01)
    assert decode["coverage"] == pytest.approx(0.97, rel=0.01)
    assert decode["hot_hits"] == pytest.approx(0.9, rel=0.01)
    assert decode["sparse_steps"] == 1.0
    assert done.outcome.summary["verdict"]["valid"]
    # Sparse and nobody asked what it cost: not to be quoted.
    assert run_swarm(FakeServer(default=Behaviour(itl=ITL), sparse_fraction=0.01)).reasons == {"recall_unknown"}


def test_another_client_on_the_server_is_noticed(run_swarm: Callable[..., Any]) -> None:
    import aiohttp

    async def stranger(fake: FakeServer) -> None:
        body = {"model": "fake", "messages": [{"role": "user", "content": "hi"}], "stream": True, "max_tokens": 2000}
        async with aiohttp.ClientSession() as session, session.post(f"{fake.url}/v1/chat/completions", json=body) as response:
            await response.read()

    async def later(fake: FakeServer) -> None:
        await asyncio.sleep(2.0)
        await stranger(fake)

    assert run_swarm(FakeServer(default=Behaviour(itl=0.01)), beside=later, decode_tokens=1000).reasons == {"other_clients"}


def test_a_window_that_is_too_short(run_swarm: Callable[..., Any]) -> None:
    assert run_swarm(min_window=5.0).reasons == {"too_short"}


def test_no_word_of_the_code_is_kept(run_swarm: Callable[..., Any]) -> None:
    """H4: prompts and answers stay out of every file, unless asked for."""
    server = FakeServer(default=Behaviour(itl=ITL))
    server.script.extend([Behaviour(), *[Behaviour(status=400)] * 2, *[Behaviour(status=500)] * 2])
    done = run_swarm(server, limits=Limits(attempts=1))
    assert done.outcome.summary["errors"]
    for file in done.outcome.folder.iterdir():
        assert "order.total" not in file.read_text()
        assert "price_1" not in file.read_text()
        assert file.stat().st_mode & 0o077 == 0
    assert not (done.outcome.folder / "text.jsonl").exists()
    done = run_swarm(FakeServer(default=Behaviour(itl=ITL)), record_text=True)
    lines = [json.loads(line) for line in (done.outcome.folder / "text.jsonl").read_text().splitlines()]
    assert (done.outcome.folder / "text.jsonl").stat().st_mode & 0o077 == 0
    sent = [m["content"] for line in lines for m in line["sent"] if m["role"] == "user"]
    assert any("order.total" in text for text in sent)
    assert len(sent) == len(set(sent))  # each message once
    assert all(line["got"].get("text", "tok").startswith("tok") for line in lines)


def test_the_code_base_is_left_as_it_was(run_swarm: Callable[..., Any], code_base: Path) -> None:
    before = {p: (p.read_bytes(), p.stat().st_mtime_ns) for p in code_base.rglob("*")}
    run_swarm(FakeServer(default=Behaviour(itl=0.01, tool_calls=(("search", {"text": "price"}),))), plan=Plan.MODEL, decode_seconds=0.0)
    assert {p: (p.read_bytes(), p.stat().st_mtime_ns) for p in code_base.rglob("*")} == before
