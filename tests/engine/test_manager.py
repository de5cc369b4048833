"""The host pool's manager under vLLM's own KV cache manager, without an engine."""

from __future__ import annotations

import random
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from sparsekv.engine import adapter
from sparsekv.engine.config import BLOCK_SIZE
from sparsekv.engine.manager import SparseKVManager
from sparsekv.engine.spec import SparseKVSpec, to_host_spec
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, MambaSpec
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry
from vllm.v1.request import Request

DEVICE_BLOCKS = 8


@pytest.fixture(scope="module", autouse=True)
def _registered() -> None:
    adapter.register_builtin_specs()
    KVCacheSpecRegistry.register(SparseKVSpec, SparseKVManager, uniform_type_base_spec=SparseKVSpec)
    init_none_hash(sha256)


def make_manager(host_blocks: int, *, hybrid: bool = False, caching: bool = True, events: bool = False) -> KVCacheManager:
    stock = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=2, head_size=64, dtype=torch.bfloat16)
    groups = [KVCacheGroupSpec(["attention"], to_host_spec(stock, host_blocks, 0))]
    if hybrid:
        state = MambaSpec(block_size=BLOCK_SIZE, shapes=((4, 4),), dtypes=(torch.float32,), mamba_cache_mode="align")
        groups.append(KVCacheGroupSpec(["state"], state))
    return KVCacheManager(
        KVCacheConfig(num_blocks=DEVICE_BLOCKS * 8 if hybrid else DEVICE_BLOCKS, kv_cache_tensors=[], kv_cache_groups=groups),
        max_model_len=65536,
        scheduler_block_size=BLOCK_SIZE,
        hash_block_size=BLOCK_SIZE,
        enable_caching=caching,
        enable_kv_cache_events=events,
        log_stats=True,
    )


def make_request(name: str, tokens: list[int]) -> Request:
    return Request(
        request_id=name,
        prompt_token_ids=tokens,
        sampling_params=SamplingParams(max_tokens=64),
        pooling_params=None,
        block_hasher=get_request_block_hasher(BLOCK_SIZE, sha256),
    )


def admit(manager: KVCacheManager, request: Request, num_tokens: int | None = None) -> int | None:
    """What the scheduler does with a waiting request; returns its prefix hit, or None where it must wait."""
    blocks, hit, _ = manager.get_computed_blocks(request)
    wanted = (num_tokens or request.num_tokens) - hit
    new = manager.allocate_slots(request, wanted, hit, blocks, full_sequence_must_fit=True)
    if new is None:
        return None
    request.num_computed_tokens = hit + wanted
    return hit


def sparse(manager: KVCacheManager) -> SparseKVManager:
    found = manager.coordinator.single_type_managers[0]
    assert isinstance(found, SparseKVManager)
    return found


def tokens(n: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(1000), k=n)


def test_rows_come_from_the_host_pool_alone() -> None:
    manager = make_manager(host_blocks=40)
    request = make_request("a", tokens(20 * BLOCK_SIZE + 5))
    assert admit(manager, request) == 0
    (ids,) = manager.get_block_ids("a")
    assert len(ids) == 21  # more than the device pool has
    assert all(0 < i < 40 for i in ids)  # block 0 is the null block
    assert len(set(ids)) == 21
    assert manager.block_pool.get_num_free_blocks() == DEVICE_BLOCKS - 1
    assert manager.take_new_block_ids() == []


@pytest.mark.parametrize("length", [1, 127, 128, 129, 255, 256, 257, 1000])
@pytest.mark.parametrize("extension", [0, 1, 127, 128, 300])
def test_resend_and_extend_reuse_all_full_blocks(length: int, extension: int) -> None:
    manager = make_manager(host_blocks=40)
    first = make_request("a", tokens(length))
    assert admit(manager, first) == 0
    manager.free(first)
    manager.new_step_starts()
    again = make_request("b", tokens(length) + tokens(extension, seed=1))
    # vLLM recomputes at least the last token, for its logits.
    assert admit(manager, again) == min(length, again.num_tokens - 1) // BLOCK_SIZE * BLOCK_SIZE


def test_a_full_pool_postpones_and_then_evicts() -> None:
    manager = make_manager(host_blocks=11)
    first, second = make_request("a", tokens(8 * BLOCK_SIZE)), make_request("b", tokens(4 * BLOCK_SIZE, seed=1))
    assert admit(manager, first) == 0
    assert admit(manager, second) is None
    manager.free(first)
    manager.new_step_starts()
    assert admit(manager, second) == 0
    manager.free(second)
    manager.new_step_starts()
    # The pool held 8 of the first request's blocks and needed 2 of them: the tail went, the head still hits.
    assert admit(manager, make_request("c", tokens(8 * BLOCK_SIZE))) == 6 * BLOCK_SIZE


def test_a_running_request_that_cannot_grow_is_told_so() -> None:
    manager = make_manager(host_blocks=3)
    request = make_request("a", tokens(2 * BLOCK_SIZE))
    assert admit(manager, request) == 0
    request.append_output_token_ids(7)
    assert manager.allocate_slots(request, 1) is None  # the scheduler preempts on None


def test_blocks_written_in_this_step_are_hit_in_the_next() -> None:
    manager = make_manager(host_blocks=40)
    manager.new_step_starts()
    writer = make_request("writer", tokens(6 * BLOCK_SIZE))
    assert admit(manager, writer, 4 * BLOCK_SIZE) == 0
    reader = make_request("reader", tokens(5 * BLOCK_SIZE))
    assert admit(manager, reader) is None
    assert admit(manager, make_request("other", tokens(5 * BLOCK_SIZE, seed=1))) == 0
    manager.new_step_starts()
    assert admit(manager, reader) == 4 * BLOCK_SIZE
    # The running writer itself is never held back by what it wrote.
    assert manager.allocate_slots(writer, 2 * BLOCK_SIZE) is not None


def test_a_prefix_from_an_earlier_step_is_hit_beside_a_running_writer() -> None:
    manager = make_manager(host_blocks=60)
    writer = make_request("writer", tokens(20 * BLOCK_SIZE))
    assert admit(manager, writer, 4 * BLOCK_SIZE) == 0
    manager.new_step_starts()
    assert manager.allocate_slots(writer, 4 * BLOCK_SIZE) is not None
    reader = make_request("reader", tokens(4 * BLOCK_SIZE) + tokens(BLOCK_SIZE, seed=2))
    assert admit(manager, reader) == 4 * BLOCK_SIZE


def test_usage_is_the_host_pools() -> None:
    manager = make_manager(host_blocks=21)
    admit(manager, make_request("a", tokens(5 * BLOCK_SIZE)))
    assert manager.usage == pytest.approx(0.25)


def test_reset_clears_the_host_pool() -> None:
    manager = make_manager(host_blocks=40)
    request = make_request("a", tokens(4 * BLOCK_SIZE))
    admit(manager, request)
    manager.free(request)
    assert manager.reset_prefix_cache()
    manager.new_step_starts()
    assert admit(manager, make_request("b", tokens(4 * BLOCK_SIZE))) == 0


def test_without_prefix_caching() -> None:
    manager = make_manager(host_blocks=40, caching=False)
    request = make_request("a", tokens(4 * BLOCK_SIZE))
    assert admit(manager, request) == 0
    manager.free(request)
    assert sparse(manager).block_pool.get_num_free_blocks() == 39


def test_cache_events_name_the_host() -> None:
    manager = make_manager(host_blocks=40, events=True)
    admit(manager, make_request("a", tokens(2 * BLOCK_SIZE)))
    events = manager.take_events()
    assert sum(len(event.block_hashes) for event in events) == 2
    assert {event.medium for event in events} == {"CPU"}


def test_a_hybrid_model_keeps_rows_whose_state_was_evicted() -> None:
    manager = make_manager(host_blocks=40, hybrid=True)
    request = make_request("a", tokens(4 * BLOCK_SIZE + 1))
    assert admit(manager, request) == 0
    manager.free(request)
    manager.new_step_starts()
    manager.block_pool.reset_prefix_cache()  # every recurrent state is lost
    again = make_request("b", tokens(4 * BLOCK_SIZE + 1))
    blocks, hit, _ = manager.get_computed_blocks(again)
    assert hit == 0
    assert len(blocks.blocks[0]) == 4  # what a connector that restores the state could use
    # Without one, none of them is adopted.
    assert manager.allocate_slots(again, again.num_tokens, 0, blocks) is not None
    assert len(manager.get_block_ids("b")[0]) == 5
    assert sparse(manager).block_pool.get_num_free_blocks() == 39 - 5


@pytest.mark.parametrize("seed", range(8))
def test_random_traffic_neither_leaks_nor_shares_unhashed_blocks(seed: int) -> None:
    rng = random.Random(seed)
    manager = make_manager(host_blocks=rng.randint(12, 60))
    pool = sparse(manager).block_pool
    live: dict[str, Request] = {}
    for step in range(300):
        if rng.random() < 0.5:
            manager.new_step_starts()
        action = rng.random()
        if action < 0.4:
            prompt = tokens(rng.choice([1, 128, 400, 900]), seed=rng.randint(0, 3)) + tokens(rng.randint(0, 200), seed=100 + step)
            request = make_request(f"r{step}", prompt)
            if admit(manager, request) is not None:
                live[request.request_id] = request
        elif action < 0.75 and live:
            request = live[rng.choice(sorted(live))]
            request.append_output_token_ids(rng.choices(range(1000), k=rng.randint(1, 8)))
            grown = request.num_tokens - request.num_computed_tokens
            if manager.allocate_slots(request, grown) is None:  # preempted: computed again from the start, later
                manager.free(live.pop(request.request_id))
            else:
                request.num_computed_tokens += grown
        elif live:
            manager.free(live.pop(rng.choice(sorted(live))))
        check_ownership(manager, live)
    for request in live.values():
        manager.free(request)
    assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1


def check_ownership(manager: KVCacheManager, live: dict[str, Request]) -> None:
    owners: dict[int, list[str]] = {}
    for name, request in live.items():
        blocks: Any = sparse(manager).req_to_blocks[name]
        assert len(blocks) * BLOCK_SIZE >= request.num_computed_tokens
        for block in blocks:
            owners.setdefault(block.block_id, []).append(name)
            assert len(owners[block.block_id]) == 1 or block.block_hash is not None
    for block_id, names in owners.items():
        assert sparse(manager).block_pool.blocks[block_id].ref_cnt == len(names)
