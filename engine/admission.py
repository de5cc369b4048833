"""Which waiting requests may start: counts what every request will hold at its peak, not what is free at this moment.

vLLM admits a request if its prompt fits into the blocks that are free now, which requests in the middle of their own
prompts still need. Two prompts that only fit one after the other then preempt each other, and all they computed is lost.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.single_type_kv_cache_manager import MambaManager, SingleTypeKVCacheManager
from vllm.v1.request import Request


class Admission:
    """One per scheduler. `begin` takes stock for a step, `admit` then claims what a request needs."""

    def __init__(self, kv_cache_manager: KVCacheManager, max_model_len: int, steps_in_flight: int) -> None:
        self.kv_cache_manager = kv_cache_manager
        self.max_model_len = max_model_len
        self.steps_in_flight = steps_in_flight
        self._pools: dict[int, tuple[BlockPool, list[SingleTypeKVCacheManager]]] = {}
        for manager in kv_cache_manager.coordinator.single_type_managers:
            self._pools.setdefault(id(manager.block_pool), (manager.block_pool, []))[1].append(manager)
        self._available: dict[int, int] = {}
        self._active: list[Request] = []
        self.refusal = ""
        """Why the last refused request waits."""
        for pool, group in self._pools.values():
            self._check_one_fits(pool, group)

    @property
    def max_requests(self) -> int | None:
        """Requests whose recurrent states fit at once; None for a model without such states."""
        limits = [
            (pool.num_gpu_blocks - 1) // sum(self._states(m) for m in group if isinstance(m, MambaManager))
            for pool, group in self._pools.values()
            if any(isinstance(m, MambaManager) for m in group)
        ]
        return min(limits, default=None)

    def begin(self, active: Iterable[Request]) -> None:
        """Takes stock: `active` are the requests that hold blocks, running or waiting for a load."""
        self._active = list(active)
        self._available = {
            key: pool.get_num_free_blocks() - sum(self._lacks(manager, r, self._tokens(r, 0)) for manager in group for r in self._active)
            for key, (pool, group) in self._pools.items()
        }

    def admit(self, request: Request) -> bool:
        """Whether the request can run to the end of its prompt, and everybody else go on meanwhile; if so, claims it.

        Running requests grow. Each keeps room for one block, and for four times as many before a request that was
        preempted starts again: it is not preempted once per block that the others write.
        """
        room = 4**request.num_preemptions
        claims = {}
        for key, (pool, group) in self._pools.items():
            growth = sum(self._grows(manager, r, room) for manager in group for r in self._active)
            needed = sum(self._lacks(manager, request, self._tokens(request, room * manager.block_size)) for manager in group)
            free = self._available[key] - growth
            if needed > free:
                needed -= self._shared(group, request)
            if needed > free:
                self.refusal = (
                    f"{request.request_id} needs {needed} blocks, {pool.get_num_free_blocks()} of {pool.num_gpu_blocks - 1} are free "
                    f"and {pool.get_num_free_blocks() - free} of those promised to {len(self._active)} running requests"
                )
                return False
            claims[key] = needed
        for key, needed in claims.items():
            self._available[key] -= needed
        self._active.append(request)
        return True

    def cached_tokens(self, request: Request) -> int:
        """Tokens of the request whose attention rows are cached: all that a prefix hit can be, states permitting."""
        if request.skip_reading_prefix_cache:
            return 0
        hits = [
            _cached_blocks(manager, request) * manager.block_size
            for _, group in self._pools.values()
            for manager in group
            if not isinstance(manager, MambaManager)
        ]
        return min(min(hits, default=0), request.num_tokens - 1)

    def _shared(self, group: Sequence[SingleTypeKVCacheManager], request: Request) -> int:
        """Blocks of its prefix that other requests hold anyhow."""
        hits = self.kv_cache_manager.get_computed_blocks(request)[0].blocks
        attention = [m.kv_cache_group_id for m in group if not isinstance(m, MambaManager)]
        return sum(block.ref_cnt > 0 for i in attention for block in hits[i])

    def _tokens(self, request: Request, growth: int) -> int:
        end = min(self.max_model_len, request.num_prompt_tokens + request.max_tokens)
        return max(min(request.num_tokens + growth, end), request.num_tokens)

    def _lacks(self, manager: SingleTypeKVCacheManager, request: Request, tokens: int) -> int:
        """Blocks it does not hold yet of those it needs for so many tokens."""
        held = manager.req_to_blocks.get(request.request_id, ())
        if isinstance(manager, MambaManager):
            # At rest it holds the state it goes on from and those of the drafts.
            return self._states(manager) - (1 + manager.num_speculative_blocks if held else 0)
        blocks = -(-tokens // manager.block_size)
        if manager.max_admission_blocks_per_request is not None:
            blocks = min(blocks, manager.max_admission_blocks_per_request)
        return max(blocks - len(held), 0)

    def _states(self, manager: MambaManager) -> int:
        """Blocks of recurrent state a request holds at its peak.

        One to go on from, one per draft token, and in mode `align` one more per step in flight, since a state is given back
        only when the step that read it has ended. `MambaSpec.max_memory_usage_bytes` counts a single step: with
        asynchronous scheduling that is one too few, and requests admitted by it preempt each other.
        """
        states = 1 + manager.num_speculative_blocks
        if manager.mamba_cache_mode == "align":
            states += self.steps_in_flight + getattr(manager.kv_cache_spec, "num_prefill_checkpoint_blocks", 0)
        return states

    def _grows(self, manager: SingleTypeKVCacheManager, request: Request, blocks: int) -> int:
        tokens = self._tokens(request, 0)
        return self._lacks(manager, request, self._tokens(request, blocks * manager.block_size)) - self._lacks(manager, request, tokens)

    def _check_one_fits(self, pool: BlockPool, group: Sequence[SingleTypeKVCacheManager]) -> None:
        """A request that can never run must be refused by its length, which the server checks before it queues it.

        Raises:
            ValueError: not even one request of `max_model_len` tokens fits.
        """
        states = sum(self._states(m) for m in group if isinstance(m, MambaManager))
        attention = [m for m in group if not isinstance(m, MambaManager)]
        blocks = pool.num_gpu_blocks - 1
        needed = states + sum(
            min(-(-self.max_model_len // m.block_size), m.max_admission_blocks_per_request or self.max_model_len) for m in attention
        )
        if needed <= blocks:
            return
        if not attention:
            raise ValueError(f"one request needs {states} blocks of recurrent state, the pool has {blocks}: give the GPU more cache memory")
        tokens = sum(m.block_size for m in attention) // len(attention)
        raise ValueError(
            f"max_model_len is {self.max_model_len} tokens and one such request needs {needed} blocks of {tokens}, "
            f"the pool has {blocks}: raise it, or set max_model_len to at most {max(blocks - states, 0) * tokens // len(attention)}"
        )


def _cached_blocks(manager: SingleTypeKVCacheManager, request: Request) -> int:
    """Leading blocks of the request that the pool knows."""
    pool = manager.block_pool
    if not manager.enable_caching or manager.block_size != pool.hash_block_size:
        return 0
    known = (bool(pool.get_cached_block(block_hash, [manager.kv_cache_group_id])) for block_hash in request.block_hashes)
    return sum(itertools.takewhile(bool, known))
