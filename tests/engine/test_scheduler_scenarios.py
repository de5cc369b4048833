"""Situations from public reports, replayed in virtual time with the real scheduler (cases E1, E3, E5)."""

from __future__ import annotations

import dataclasses
import logging

import pytest

pytest.importorskip("vllm")

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.request import RequestStatus

from sparsekv.bench.scheduler.build import BLOCK, Setup, build
from sparsekv.bench.scheduler.cost import DUAL_3090, H200, Hardware
from sparsekv.bench.scheduler.interference import alone
from sparsekv.bench.scheduler.virtual_engine import VirtualEngine, conversation, document
from sparsekv.engine.prefill_plan import SchedulerSettings
from sparsekv.engine.scheduler import SparseScheduler

logging.getLogger("vllm").setLevel(logging.ERROR)


def fair(itl_target_ms: float) -> type[SparseScheduler]:
    return type("Fair", (SparseScheduler,), {"settings": SchedulerSettings(itl_target_ms=itl_target_ms)})


def engine_of(setup: Setup, itl_target_ms: float = 50, hardware: Hardware = H200) -> VirtualEngine:
    return VirtualEngine(build(fair(itl_target_ms), setup), hardware)


def assert_nothing_held(engine: VirtualEngine) -> None:
    for manager in engine.scheduler.kv_cache_manager.coordinator.single_type_managers:
        assert manager.block_pool.get_num_free_blocks() == manager.block_pool.num_gpu_blocks - 1
    assert not engine.scheduler.requests


# ---- E1: one huge prompt stalls everybody


@pytest.mark.parametrize(("hardware", "target"), [(H200, 100), (DUAL_3090, 150)], ids=["H200", "3090"])
def test_a_question_behind_a_huge_prompt_is_answered_at_once(hardware: Hardware, target: float) -> None:
    engine = engine_of(Setup(), target, hardware)
    a = engine.submit("A", document(1, 4094), max_tokens=100_000)
    engine.run(until=20)
    b = engine.submit("B", document(2, 65_535), max_tokens=1)
    c = engine.submit("C", document(3, 100), max_tokens=20, at=engine.now + 2)
    while not (b.token_times and c.token_times):
        engine.run(until=engine.now + 0.1)
    assert c.ttft <= 3
    assert max(a.gaps) <= 1
    assert b.ttft <= 1.3 * alone(lambda: build(fair(target), Setup()), hardware, 65_535)


def test_three_huge_prompts_and_five_agents_all_get_on() -> None:
    engine = engine_of(Setup())
    huge = [engine.submit(f"huge{i}", document(10 + i, 250_000), max_tokens=10, at=0.1) for i in range(3)]
    answered = dict.fromkeys(range(5), 0)

    def ask_again(record):
        name = record.request.request_id
        if name.startswith("agent"):
            agent, turn = map(int, name[5:].split("."))
            answered[agent] += len(record.token_times)
            engine.submit(f"agent{agent}.{turn + 1}", conversation(record, document(1000 * agent + turn, 300)), max_tokens=200)

    engine.on_end = ask_again
    for i in answered:
        engine.submit(f"agent{i}.0", document(20 + i, 2000), max_tokens=200, at=0.0)
    engine.run(until=300)
    assert all(h.ended is not None for h in huge)
    assert min(answered.values()) >= 0.5 * sum(answered.values()) / len(answered)
    assert min(answered.values()) >= 0.5 * 300 / 0.050 * 0.8, "half of a token per target, at the least"


def test_huge_prompts_that_arrived_together_do_not_wait_for_each_other_for_ever() -> None:
    engine = engine_of(Setup())
    huge = [engine.submit(f"huge{i}", document(10 + i, 100_000), max_tokens=1, at=0.0) for i in range(3)]
    for i in range(200):
        engine.submit(f"small{i}", document(100 + i, 4000), max_tokens=5, at=0.3 * i)
    engine.run()
    work = sum(s.end - s.start for s in engine.steps)
    assert max(h.ttft for h in huge) <= 1.01 * work
    assert huge[0].ttft <= 0.9 * huge[2].ttft, "the oldest foremost"


@pytest.mark.parametrize("hardware", [H200, DUAL_3090], ids=["H200", "3090"])
def test_a_prompt_alone_gets_everything(hardware: Hardware) -> None:
    ours = alone(lambda: build(fair(50), Setup()), hardware, 100_000)
    stock = alone(lambda: build(AsyncScheduler, Setup(max_num_batched_tokens=8192)), hardware, 100_000)
    assert ours <= 1.05 * stock


# ---- E3: steps of no tokens


@pytest.mark.parametrize("decoding", [0, 1, 4])
@pytest.mark.parametrize("batch", [1024, 1600, 1601, 2048])
def test_a_state_block_wider_than_the_step_still_moves(batch: int, decoding: int) -> None:
    setup = Setup(max_num_batched_tokens=batch, block_size=1600, max_num_seqs=8, max_model_len=32_000, pool_tokens=200_000)
    engine = engine_of(setup)
    agents = [engine.submit(f"agent{i}", document(i, 100), max_tokens=1000) for i in range(decoding)]
    lengths = (1599, 1600, 1601, 4 * 1600 - 449, 4 * 1600 + 449)
    prompts = [engine.submit(f"prompt{n}", document(50 + n, n), max_tokens=3, at=1.0) for n in lengths]
    engine.run(max_steps=20_000)
    assert all(r.ended is not None for r in [*agents, *prompts])
    assert_nothing_held(engine)


def test_a_step_too_small_for_the_decodes_and_a_chunk_is_refused_with_the_least_that_does() -> None:
    with pytest.raises(ValueError, match=r"8 decodes x 4 tokens .* at least 64"):
        engine_of(Setup(max_num_batched_tokens=63, max_num_seqs=8, drafts=3))
    engine_of(Setup(max_num_batched_tokens=64, max_num_seqs=8, drafts=3))


def test_with_five_state_slots_five_of_eight_agents_run_and_the_others_follow(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("sparsekv.engine.scheduler")
    logger.addHandler(caplog.handler)
    engine = engine_of(Setup(max_num_seqs=8, state_slots=5, drafts=3))
    logger.removeHandler(caplog.handler)
    assert "5 requests run at once, not 8" in caplog.text
    most = 0

    def count(output):
        nonlocal most
        most = max(most, len(engine.scheduler.running))

    engine.check = count
    agents = [engine.submit(f"agent{i}", document(i, 1000), max_tokens=100) for i in range(8)]
    engine.run()
    assert most == 5
    assert all(len(a.token_times) == 100 and a.request.num_preemptions == 0 for a in agents)


# ---- E5: memory runs out, requests are preempted, and the end of the longest request


def test_two_long_answers_in_room_for_one_and_a_half() -> None:
    engine = engine_of(Setup(max_num_seqs=4, max_model_len=8192, pool_tokens=12_288))
    a = engine.submit("a", document(1, 1000), max_tokens=7000)
    b = engine.submit("b", document(2, 1000), max_tokens=7000)
    engine.run()
    assert (len(a.token_times), len(b.token_times)) == (7000, 7000)
    assert 1 <= a.request.num_preemptions + b.request.num_preemptions <= 4
    follow_up = engine.submit("next", conversation(b, document(3, 50)), max_tokens=20)
    engine.run()
    assert len(follow_up.token_times) == 20
    assert_nothing_held(engine)


@pytest.mark.parametrize("drafts", [0, 1, 2, 3])
@pytest.mark.parametrize("below", [1, 2, 3, 4, 5, 200])
def test_the_longest_request_ends_at_exactly_its_limit_also_after_a_preemption(drafts: int, below: int) -> None:
    limit = 4096
    engine = engine_of(Setup(max_num_seqs=4, max_model_len=limit, pool_tokens=6144, drafts=drafts))
    first = engine.submit("first", document(1, limit - 300), max_tokens=400)
    record = engine.submit("r", document(2, limit - below), max_tokens=400, at=0.01)

    def preempt():
        scheduler = engine.scheduler
        if record.request in scheduler.running and record.request.num_output_tokens >= min(below, 150) // 2:
            scheduler.running.remove(record.request)
            scheduler._preempt_request(record.request, 0.0)
        elif record.ended is None:
            engine.at(engine.now + 0.01, preempt)

    engine.at(0.02, preempt)
    engine.run()
    assert len(first.token_times) == 300
    assert record.request.num_tokens == limit
    assert record.request.status == RequestStatus.FINISHED_LENGTH_CAPPED
    assert_nothing_held(engine)


def test_a_prompt_as_large_as_the_pool_is_computed_once() -> None:
    setup = Setup(max_num_seqs=4, max_model_len=65_536, pool_tokens=65_536)
    engine = engine_of(setup)
    full = [engine.submit(f"full{i}", document(1 + i, 65_000), max_tokens=500) for i in range(2)]
    small = [engine.submit(f"small{i}", document(10 + i, 500), max_tokens=50, at=1.0 + i) for i in range(10)]
    engine.run()
    assert all(r.ended is not None for r in [*full, *small])
    computed = sum(n for s in engine.steps for _, n in s.load.chunks)
    assert computed <= 1.1 * (2 * 65_000 + 10 * 500)


def test_a_model_length_that_never_fits_is_refused_with_the_arithmetic() -> None:
    with pytest.raises(ValueError, match=r"max_model_len is 65536 .* needs 512 blocks of 128, the pool has 500: .* at most 64000"):
        engine_of(Setup(max_model_len=65_536, pool_tokens=64_000))


# ---- cancelled in any state


STATES = ["queued", "never scheduled", "mid-prefill", "decoding", "preempted", "loading", "loaded"]


@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize("state", STATES)
def test_cancelling_frees_everything_and_harms_nobody(state: str, drafts: int) -> None:
    setup = Setup(max_num_seqs=2, max_model_len=65_536, pool_tokens=80_000, state_slots=4, drafts=drafts)
    if state in ("loading", "loaded"):
        setup = dataclasses.replace(setup, load_ms=500.0)
    engine = engine_of(setup)
    others = [engine.submit("other", document(1, 3000), max_tokens=300)]
    if state in ("queued", "loaded"):  # the second place is taken: before it can start, or while it loads
        others.append(engine.submit("second", document(2, 3000), max_tokens=300, at=0.0 if state == "queued" else 0.3))
    at = 0.0 if state == "never scheduled" else 0.2
    tokens = 60_000 if state == "mid-prefill" else 2000
    tier = 1900 if state in ("loading", "loaded") else 0
    victim = engine.submit("victim", document(9, tokens), max_tokens=5000, at=at, tier_tokens=tier)
    request = victim.request
    in_state = {
        "queued": lambda: request.status == RequestStatus.WAITING and engine.now > at,
        "never scheduled": lambda: engine.now == at,
        "mid-prefill": lambda: request.num_computed_tokens > 20_000,
        "decoding": lambda: request.num_output_tokens > 20,
        "preempted": lambda: request.status == RequestStatus.PREEMPTED,
        "loading": lambda: request.status == RequestStatus.WAITING_FOR_REMOTE_KVS,
        "loaded": lambda: request.request_id in engine.scheduler.finished_recving_kv_req_ids,
    }[state]
    seen = False

    def cancel():
        nonlocal seen
        if state == "preempted" and request in engine.scheduler.running and request.num_output_tokens > 20:
            engine.scheduler.running.remove(request)
            engine.scheduler._preempt_request(request, 0.0)
        if in_state():
            seen = True
            engine.abort("victim")
        elif victim.ended is None:
            engine.at(engine.now + 0.002, cancel)

    engine.at(at, cancel)
    engine.run()
    assert seen
    assert victim.aborted
    assert all(len(o.token_times) == 300 for o in others)
    assert_nothing_held(engine)
    after = engine.submit("after", document(30, 5000), max_tokens=10)
    engine.run()
    assert len(after.token_times) == 10


def test_everybody_cancels_at_once() -> None:
    engine = engine_of(Setup(max_num_seqs=4, max_model_len=8192, pool_tokens=20_000))
    for i in range(20):
        engine.submit(f"r{i}", document(i, 200 * BLOCK % 7000 + i), max_tokens=500, at=0.01 * i, abort_at=0.5)
    engine.run()
    assert_nothing_held(engine)
    assert not engine.scheduler._uncached
