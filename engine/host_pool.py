"""The host pool's block pool: vLLM's own, with its evictions counted and announced.

The order of eviction is vLLM's. A request gives its blocks back last block first, so of the conversation that was used
least recently the tail goes first and the head last; blocks of running requests are not in the queue at all. A block of
a shared beginning takes the place of its latest user.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

from vllm.v1.core.kv_cache_utils import BlockHash, KVCacheBlock, get_block_hash
from vllm.v1.hisparse.block_pool import SharedEventQueueBlockPool


class HostBlockPool(SharedEventQueueBlockPool):
    """Ids of row blocks; block 0 is the null block."""

    clock: Callable[[], float] = staticmethod(time.monotonic)
    """Seconds; virtual ones in a simulation."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.num_evicted = 0
        """Cached blocks whose rows were given to another request, since the start."""
        self.eviction_age = 0.0
        """Seconds between the last use and the eviction of the block evicted last; 0 before the first eviction."""
        self.on_evict: list[Callable[[BlockHash], None]] = []
        """Called with the hash of a prefix whose last block has just lost its rows."""
        self.on_reset: list[Callable[[], None]] = []
        """Called when all rows are forgotten at once."""
        self._last_use: dict[int, float] = {}

    def free_blocks(self, ordered_blocks: Iterable[KVCacheBlock]) -> None:
        blocks = list(ordered_blocks)
        for block in blocks:
            self._drop_copy(block)
        super().free_blocks(blocks)
        now = self.clock()
        self._last_use.update((block.block_id, now) for block in blocks if block.pool is self and block.block_hash is not None)

    def _drop_copy(self, block: KVCacheBlock) -> None:
        """Where `block`, about to be free, holds the same prefix as another block, one of the two becomes empty.

        A request computes rows that are cached already where a recurrent state in front of them was lost.
        """
        if block.pool is not self or block.block_hash is None or block.ref_cnt != 1:
            return
        other = self.cached_block_hash_to_block.get_one_block(block.block_hash)
        if other is None or other is block:
            return
        if other.ref_cnt > 0:
            self._remove_cached_block_hashes(block)
            return
        self._remove_cached_block_hashes(other)
        self._last_use.pop(other.block_id, None)
        self.free_block_queue.remove(other)
        self.free_block_queue.prepend_n([other])

    def _maybe_evict_cached_block(self, block: KVCacheBlock) -> bool:
        key = block.block_hash
        evicted = super()._maybe_evict_cached_block(block)
        last_use = self._last_use.pop(block.block_id, None)
        if evicted:
            self.num_evicted += 1
            if last_use is not None:
                self.eviction_age = self.clock() - last_use
            if key is not None and self.cached_block_hash_to_block.get_one_block(key) is None:
                for announce in self.on_evict:
                    announce(get_block_hash(key))
        return evicted

    def reset_prefix_cache(self) -> bool:
        done = super().reset_prefix_cache()
        if done:
            self._last_use.clear()
            for announce in self.on_reset:
                announce()
        return done

    @property
    def num_cached(self) -> int:
        """Blocks that a later request can hit, in use or not; copies of one prefix count once."""
        return len(self.cached_block_hash_to_block)
