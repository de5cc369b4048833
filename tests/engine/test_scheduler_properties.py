"""The real scheduler, real requests and real block pools under random traffic: what must hold whatever comes."""

from __future__ import annotations

import itertools
import logging
from dataclasses import dataclass, replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytest.importorskip("vllm")

from sparsekv.bench.scheduler.build import BLOCK, Setup, build
from sparsekv.bench.scheduler.cost import H200
from sparsekv.bench.scheduler.virtual_engine import POLL_S, VirtualEngine, document
from sparsekv.engine.prefill_plan import BURST, SchedulerSettings
from sparsekv.engine.scheduler import SparseScheduler

LENGTHS = st.one_of(st.integers(1, 300), st.integers(1, 40).map(lambda n: n * BLOCK), st.integers(1, 6000))


@dataclass(frozen=True)
class Arrival:
    at: float
    prompt: int
    max_tokens: int
    family: int
    """Requests of one family share the beginning of their prompts."""
    abort_after: float | None
    tier: float = 0.0
    """Share of the prompt that a slower tier holds, where there is one."""


arrivals = st.builds(
    Arrival,
    at=st.floats(0, 3),
    prompt=LENGTHS,
    max_tokens=st.integers(1, 150),
    family=st.integers(0, 5),
    abort_after=st.none() | st.floats(0, 4),
    tier=st.sampled_from([0.0, 0.3, 1.0]),
)
setups = st.builds(
    Setup,
    max_num_batched_tokens=st.sampled_from([160, 512, 2048, 8192]),
    max_num_seqs=st.integers(1, 8),
    max_model_len=st.just(8192),
    pool_tokens=st.sampled_from([8192, 10_000, 20_000, 100_000]),
    state_slots=st.sampled_from([0, 1, 3, 5, 16]),
    drafts=st.integers(0, 3),
    retention_interval=st.sampled_from([None, 0, 512]),
    load_ms=st.sampled_from([None, 2.0, 200.0]),
)


logging.getLogger("vllm.platforms.cpu").setLevel(logging.ERROR)  # a line per scheduler built


class FairScheduler(SparseScheduler):
    settings = SchedulerSettings(itl_target_ms=25, idle_step_ms=300)


def run(setup: Setup, traffic: list[Arrival], seed: int, check=lambda engine, output: None) -> VirtualEngine:
    engine = VirtualEngine(build(FairScheduler, setup), replace(H200, noise=0.02), seed=seed)
    engine.check = lambda output: check(engine, output)
    for i, a in enumerate(traffic):
        tokens = min(a.prompt, setup.max_model_len - 1)
        abort_at = None if a.abort_after is None else a.at + a.abort_after
        tier_tokens = 0 if setup.load_ms is None else int(a.tier * tokens)
        engine.submit(f"r{i}", document(a.family, tokens), a.max_tokens, at=a.at, abort_at=abort_at, tier_tokens=tier_tokens)
    engine.run(max_steps=20_000)
    return engine


fuzz = settings(max_examples=50, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


@fuzz
@given(setup=setups, traffic=st.lists(arrivals, min_size=1, max_size=14), seed=st.integers(0, 9))
def test_everyone_ends_and_nothing_is_held(setup: Setup, traffic: list[Arrival], seed: int) -> None:
    def check(engine, output):
        assert output.total_num_scheduled_tokens <= setup.max_num_batched_tokens
        assert all(n > 0 for n in output.num_scheduled_tokens.values())

    engine = run(setup, traffic, seed, check)
    scheduler = engine.scheduler
    for record in engine.records.values():
        assert record.ended is not None
        request = record.request
        if not record.aborted:
            assert len(record.token_times) == min(request.max_tokens, setup.max_model_len - request.num_prompt_tokens)
        assert request.num_preemptions <= 6
    for manager in scheduler.kv_cache_manager.coordinator.single_type_managers:
        assert manager.block_pool.get_num_free_blocks() == manager.block_pool.num_gpu_blocks - 1
    assert not any((scheduler.requests, scheduler.running, scheduler.waiting, scheduler.kv_holding_waiting))
    assert not any((scheduler._uncached, scheduler._overtaken, scheduler.deferred_frees))


@fuzz
@given(setup=setups, traffic=st.lists(arrivals, min_size=1, max_size=14), seed=st.integers(0, 9))
def test_every_step_makes_progress_and_every_prompt_moves(setup: Setup, traffic: list[Arrival], seed: int) -> None:
    passed_over: dict[str, int] = {}

    def check(engine, output):
        scheduler = engine.scheduler
        if scheduler.running and not engine._in_flight:
            assert output.total_num_scheduled_tokens > 0
        chunks = {r for r in output.num_scheduled_tokens if r in scheduler._grants}
        if not chunks:
            return
        for request in scheduler.running:
            if request.request_id in chunks or not request.is_prefill_chunk:
                passed_over.pop(request.request_id, None)
            else:
                passed_over[request.request_id] = passed_over.get(request.request_id, 0) + 1
                # A half share of at least 32 tokens a step among at most 8, and a block to gather.
                assert passed_over[request.request_id] <= 2 * 8 * BLOCK / 32 + 8

    run(setup, traffic, seed, check)


@fuzz
@given(traffic=st.lists(arrivals, min_size=4, max_size=14), seed=st.integers(0, 9), drafts=st.integers(0, 3))
def test_steps_with_decodes_keep_to_the_target(traffic: list[Arrival], seed: int, drafts: int) -> None:
    setup = Setup(max_num_seqs=8, max_model_len=8192, pool_tokens=200_000, drafts=drafts)
    engine = run(setup, traffic, seed)
    limits = FairScheduler.settings
    learned = [s for s in engine.steps if s.load.chunks][12:]
    for step in learned:
        # Noise, and the little it has learned by then.
        limit = 1.2 * BURST * limits.itl_target_ms if step.load.decode_tokens else 1.5 * limits.idle_step_ms
        assert (step.end - step.start) * 1e3 <= limit
    with_decodes = [s.end - s.start for s in engine.steps[24:] if s.load.decode_tokens]
    if len(with_decodes) >= 50:
        assert sum(with_decodes) / len(with_decodes) * 1e3 <= 1.1 * limits.itl_target_ms


@fuzz
@given(setup=setups.map(lambda s: replace(s, load_ms=None)), traffic=st.lists(arrivals, min_size=1, max_size=14), seed=st.integers(0, 9))
def test_the_device_never_rests_while_somebody_could_run(setup: Setup, traffic: list[Arrival], seed: int) -> None:
    engine = run(setup, traffic, seed)
    for before, after in itertools.pairwise(engine.steps):
        if after.start - before.end > 2 * POLL_S:
            alive = [r for r in engine.records.values() if r.arrived < before.end and r.ended > before.end + 2 * POLL_S]
            assert not alive


@fuzz
@given(traffic=st.lists(arrivals, min_size=2, max_size=14), seed=st.integers(0, 9))
def test_a_run_repeats_exactly(traffic: list[Arrival], seed: int) -> None:
    setup = Setup(max_num_seqs=4, max_model_len=8192, pool_tokens=10_000, state_slots=4, drafts=2)
    first, second = run(setup, traffic, seed), run(setup, traffic, seed)
    assert first.steps == second.steps
    assert [r.token_times for r in first.records.values()] == [r.token_times for r in second.records.values()]
