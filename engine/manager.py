"""The scheduler's side of the host pool: vLLM's own block pool, hashing and eviction, over ids of our rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.request import Request

from . import adapter
from .host_pool import HostBlockPool
from .spec import SparseKVSpec


class SparseKVManager(FullAttentionManager):
    """Full attention on a private `BlockPool`; its block ids are row addresses in the workers' host pools.

    Template: `HiSparseSourceManager` (`v1/core/single_type_kv_cache_manager.py`).
    """

    retains_longer_hit = True
    """The rows of a prefix stay known although a recurrent state on the way was evicted: a connector may bring it back."""

    def __init__(self, kv_cache_spec: SparseKVSpec, *args: Any, **kwargs: Any) -> None:
        super().__init__(kv_cache_spec, *args, **kwargs)
        self.device_pool: BlockPool = self.block_pool
        self.block_pool: HostBlockPool = adapter.private_block_pool(
            self.device_pool, kv_cache_spec.host_num_blocks, self.enable_caching
        )
        self._null_block = self.block_pool.null_block
        self._cached_this_step: set[Any] = set()
        # A coordinator of one group looks up hits in the device pool it built the manager with.
        self.find_longest_cache_hit = self._find_in_host_pool  # type: ignore[method-assign]
        # What fills up is the host pool; `vllm:kv_cache_usage_perc` must say so.
        device_usage = self.device_pool.get_usage
        self.device_pool.get_usage = lambda: max(device_usage(), self.block_pool.get_usage())  # type: ignore[method-assign]

    def _find_in_host_pool(self, **kwargs: Any) -> tuple[tuple[list[KVCacheBlock], ...], int]:
        kwargs["block_pool"] = self.block_pool
        return type(self).find_longest_cache_hit(**kwargs)

    def get_num_blocks_to_allocate(
        self, request_id: str, num_tokens: int, new_computed_blocks: Sequence[KVCacheBlock], *args: Any, **kwargs: Any
    ) -> int:
        """Device blocks to allocate: none, or more than the device pool can have, which postpones the request."""
        hits = reversed(new_computed_blocks) if self._cached_this_step else ()
        unwritten = any(block.block_hash in self._cached_this_step for block in hits)
        required = super().get_num_blocks_to_allocate(request_id, num_tokens, new_computed_blocks, *args, **kwargs)
        if unwritten or required > self.block_pool.get_num_free_blocks():
            return self.device_pool.num_gpu_blocks + 1
        return 0

    def cache_blocks(self, request: Request, *args: Any, **kwargs: Any) -> None:
        """Publishes full blocks, and remembers which of them only this step's forward will write.

        vLLM publishes a block when it schedules the tokens. Another request scheduled in the same step could hit it,
        and a backend that reads old rows ahead of the layer that writes them would read stale ones. The Mamba manager
        guards its states in the same way (`cached_blocks_this_step`).
        """
        before = self.num_cached_block.get(request.request_id, 0)
        super().cache_blocks(request, *args, **kwargs)
        after = self.num_cached_block.get(request.request_id, 0)
        new = self.req_to_blocks[request.request_id][before:after] if after > before else ()
        self._cached_this_step.update(block.block_hash for block in new if block.block_hash is not None)

    def new_step_starts(self) -> None:
        self._cached_this_step.clear()

    # The worker zeroes and copies device blocks by the ids a manager reports. Ours are no device blocks.

    @property
    def records_new_block_ids(self) -> bool:
        return False

    def take_new_block_ids(self) -> list[int]:
        self.new_block_ids = []
        return []

    def take_pending_cow_copies(self) -> list[tuple[KVCacheBlock, KVCacheBlock]]:
        """Copies of partly filled blocks do not arise: hashes cover whole blocks (`adapter.check_config`)."""
        assert not self._pending_cow_copies
        return []
