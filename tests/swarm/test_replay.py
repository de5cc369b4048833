"""A run recorded, and sent again."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparsekv.bench import virtual_time
from sparsekv.bench.fake_server import Behaviour, FakeServer
from sparsekv.bench.metrics import Run, load
from sparsekv.bench.swarm.records import RequestRecord
from sparsekv.bench.swarm.replay import ReplayConversation, ReplayLoad, ReplayOptions, replay_options, sessions
from sparsekv.bench.swarm.run import Outcome, Request, run_load_async
from sparsekv.bench.swarm.trace import BLOCK_TOKENS, TraceRow, make_trace, read_trace
from sparsekv.profiles.errors import SparsekvError

ITL = 0.1


def replay(rows: list[TraceRow], out: Path, server: FakeServer | None = None, **changes: Any) -> tuple[Run, FakeServer, Outcome]:
    fake = server or FakeServer(default=Behaviour(ttft=0.25, itl=ITL, prefill_rate=10000))

    async def main() -> Outcome:
        async with fake:
            options = replay_options(rows, fake.url, Path("trace"), changes.pop("agents", None), min_window=1.0, **changes)
            return await run_load_async(options, Request(out), lambda sender, changed: ReplayLoad(rows, options, sender, changed))

    outcome = virtual_time.run(main())
    return load(outcome.folder), fake, outcome


def shape(requests: list[RequestRecord]) -> list[tuple[Any, ...]]:
    return sorted((r.agent, r.turn, r.phase, r.kind, r.input_tokens, r.output_tokens, r.reusable_tokens) for r in requests if not r.failed)


def test_a_replay_is_the_same_load(run_swarm: Callable[..., Any], tmp_path: Path) -> None:
    """Lengths, order, phases, shared beginnings to the token, and so the same figures."""
    done = run_swarm(intruder_tokens=6000)
    rows = read_trace(done.outcome.folder / "trace.mooncake.jsonl")
    run, _, outcome = replay(rows, tmp_path / "replays")
    assert outcome.summary["verdict"]["valid"], outcome.summary["verdict"]
    assert shape(run.requests) == shape(done.run.requests)
    assert [w.name for w in run.windows] == [w.name for w in done.run.windows]
    for before, after in zip(done.outcome.summary["windows"], outcome.summary["windows"], strict=True):
        for name in ("ttft", "tpot"):
            assert after["metrics"][name]["p50"] == pytest.approx(before["metrics"][name]["p50"], rel=0.02)
        # The fake server's blocks of 16 tokens may end differently.
        assert after["metrics"]["prefix_hits"] == pytest.approx(before["metrics"]["prefix_hits"], abs=0.02)
    assert outcome.summary["windows"][2]["metrics"]["output_rate"] == pytest.approx(3 / ITL, rel=0.02)
    assert outcome.summary["windows"][-2]["metrics"]["intruder_ttft"] > 0.5


def test_a_replay_of_a_replay(run_swarm: Callable[..., Any], tmp_path: Path) -> None:
    rows = read_trace(run_swarm().outcome.folder / "trace.mooncake.jsonl")
    _, _, outcome = replay(rows, tmp_path / "replays")
    again = read_trace(outcome.folder / "trace.mooncake.jsonl")
    assert [(r.agent, r.input_length, r.output_length, r.shared) for r in again] == [
        (r.agent, r.input_length, r.output_length, r.shared) for r in rows
    ]


def test_more_agents_than_the_trace_has(run_swarm: Callable[..., Any], tmp_path: Path) -> None:
    rows = read_trace(run_swarm(agents=2).outcome.folder / "trace.mooncake.jsonl")
    run, _, outcome = replay(rows, tmp_path / "replays", agents=5)
    assert {r.agent for r in run.requests} == set(range(5))
    fill = next(w["metrics"] for w in outcome.summary["windows"] if w["name"] == "fill")
    assert fill["prefix_hits"] <= fill["prefix_hits_possible"] + 0.02  # a session that begins again has other tokens


def test_two_replays_share_no_prefix_unless_wanted(run_swarm: Callable[..., Any], tmp_path: Path) -> None:
    rows = read_trace(run_swarm(agents=2).outcome.folder / "trace.mooncake.jsonl")

    def second(warm: bool) -> float:
        server = FakeServer(default=Behaviour(itl=ITL))
        for _ in range(2):
            server.port = 0
            _, _, outcome = replay(rows, tmp_path / "replays", server, warm=warm)
        fill = outcome.summary["windows"][0]["metrics"]
        return float(fill["prefix_hits"] - fill["prefix_hits_possible"])

    assert second(warm=False) == pytest.approx(0.0, abs=0.02)
    assert second(warm=True) > 0.2


def test_a_foreign_trace(tmp_path: Path) -> None:
    """No agents, phases or exact sharing: sessions are found by their blocks, and lanes take one after the other."""
    rows = []
    for session in range(5):
        base = [0, 1 + session]  # block 0 is everybody's
        for turn in range(3):
            base = [*base, 100 + session * 10 + turn]
            rows.append(TraceRow(1000 * (3 * session + turn), BLOCK_TOKENS * len(base) - 100, 20, list(base)))
    assert [len(s) for s in sessions(rows)] == [3] * 5
    run, _, outcome = replay(rows, tmp_path, agents=2, vocabulary=5000)
    assert outcome.summary["verdict"]["valid"], outcome.summary["verdict"]
    assert sorted(r.input_tokens or 0 for r in run.requests) == sorted(r.input_length for r in rows)
    assert {r.output_tokens for r in run.requests} == {20}
    window = outcome.summary["windows"][0]
    assert window["name"] == "replay"
    assert window["metrics"]["prefix_hits"] == pytest.approx(window["metrics"]["prefix_hits_possible"], abs=0.1)
    assert max(len([r for r in run.requests if r.sent <= t < r.end]) for t in [r.sent for r in run.requests]) == 2


def test_recorded_pauses_are_kept_and_cut(tmp_path: Path) -> None:
    rows = [
        TraceRow(0, 600, 4, [0, 1], agent=0, phase="warm", shared=0),
        TraceRow(3000, 700, 4, [0, 2], agent=0, phase="warm", delay=2000, shared=604),
        TraceRow(90000, 800, 4, [0, 3], agent=0, phase="warm", delay=80000, shared=704),
    ]
    run, _, _ = replay(rows, tmp_path, max_delay=5.0)
    pauses = [after.sent - before.end for before, after in itertools.pairwise(run.requests)]
    assert pauses == pytest.approx([2.0, 5.0], abs=0.01)


def test_trace_rows_of_a_session() -> None:
    """Whole blocks that come again have the same ids; ids say nothing of the content."""
    records = [
        RequestRecord(0, 1, "fill", "read", sent=1.0, end=2.0, first=1.5, input_tokens=1100, output_tokens=50),
        RequestRecord(1, 1, "fill", "read", sent=1.2, end=2.0, first=1.5, input_tokens=600, output_tokens=50),
        RequestRecord(0, 2, "fill", "read", sent=2.5, end=3.0, first=2.6, input_tokens=1700, output_tokens=9, reusable_tokens=1150),
        RequestRecord(0, 3, "fill", "read", sent=3.0, end=3.1, status="cut", input_tokens=5, output_tokens=1),
        RequestRecord(0, 3, "warm", "quote", sent=3.5, end=4.0, first=3.6, input_tokens=1200, output_tokens=9, reusable_tokens=1150),
    ]
    rows = make_trace(records)
    assert [row.hash_ids for row in rows] == [[0, 1, 2], [3, 4], [0, 1, 5, 6], [0, 1, 7]]
    assert [row.timestamp for row in rows] == [1000, 1200, 2500, 3500]
    assert [row.delay for row in rows] == [None, None, 500, 500]
    assert [row.shared for row in rows] == [0, 0, 1150, 1150]


@given(st.integers(1, 5000), st.integers(1, 500), st.lists(st.integers(0, 9), max_size=9), st.integers(0, 10**6))
def test_a_row_survives_writing(input_length: int, output_length: int, ids: list[int], timestamp: int) -> None:
    import tempfile

    row = TraceRow(timestamp, input_length, output_length, ids, agent=3, turn=2, phase="warm", delay=0, kind="quote", shared=1)
    with tempfile.NamedTemporaryFile("w") as file:
        file.write(row.to_line() + "\n\n")
        file.flush()
        assert read_trace(Path(file.name)) == [row]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "holds no request"),
        ("{nonsense", ":1: "),
        ("[]", "not a JSON object"),
        ('{"input_length": 0, "output_length": 1}', "input_length must be a whole number of at least 1, not 0"),
        ('{"input_length": 5}', "output_length"),
        ('{"input_length": 5, "output_length": 1, "hash_ids": ["a"]}', "hash_ids must be a list of whole numbers"),
        ('{"input_length": 5, "output_length": 1, "timestamp": -1}', "timestamp"),
        ('{"input_length": 5, "output_length": 1, "agent": "a"}', "agent must be a whole number"),
        ('{"input_length": 5, "output_length": 1}\n{"input_length": 5, "output_length": 1, "shared": 0.5}', ":2: shared"),
    ],
)
def test_a_damaged_trace_names_the_line(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "t.jsonl").write_text(text)
    with pytest.raises(SparsekvError, match=r"t\.jsonl") as caught:
        read_trace(tmp_path / "t.jsonl")
    assert says in str(caught.value)


def test_no_file() -> None:
    with pytest.raises(SparsekvError, match="No such file"):
        read_trace(Path("/nowhere/t.jsonl"))


@given(st.lists(st.tuples(st.integers(1, 400), st.integers(0, 400)), min_size=1, max_size=6))
def test_prompts_have_their_lengths_and_begin_with_what_was_there(rows: list[tuple[int, int]]) -> None:
    conversation = ReplayConversation("salt", 5000, set())
    before: list[int] = []
    for length, shared in rows:
        conversation.ask(TraceRow(0, length, 1, [], agent=0, shared=shared))
        prompt = json.loads(conversation.body({"model": "m"}))["prompt"]
        kept = min(length, shared, len(before))
        assert len(prompt) == length
        assert prompt[:kept] == before[:kept]
        assert conversation.reusable_tokens == kept
        before = prompt


def test_options_are_checked() -> None:
    rows = [TraceRow(0, 100, 10, [])]
    with pytest.raises(SparsekvError, match="--agents -1"):
        replay_options(rows, "http://x", Path("t"), -1)
    assert isinstance(replay_options(rows, "http://x", Path("t"), None), ReplayOptions)
    assert replay_options(rows, "http://x", Path("t"), None).peak == 110
