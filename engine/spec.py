"""The KV cache spec by which an attention layer tells vLLM that its rows live in a host pool of our own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import FullAttentionSpec, replace_as

from .config import BLOCK_SIZE

MIN_TOKEN_BYTES = 16
"""A page of 0 bytes would make vLLM divide by zero."""


@dataclass(frozen=True, kw_only=True)
class SparseKVSpec(FullAttentionSpec):
    """Full attention whose blocks are drawn from a private host pool.

    The page it declares on the device is *virtual*. Nothing is stored there and no block of it is ever drawn; it is
    only large enough that vLLM, which wants one page size for all groups of a hybrid model, lets 128 tokens of
    attention and one recurrent state share a block size (`platforms/interface.py` `_align_hybrid_block_size`).
    """

    host_num_blocks: int

    def max_memory_usage_bytes(self, vllm_config: VllmConfig) -> int:
        """Device memory one request needs: a page, since 0 fails vLLM's concurrency arithmetic."""
        return self.page_size_bytes

    @classmethod
    def merge(cls, specs: list[Self]) -> Self:
        """All layers of the group must agree; the base class would rebuild the spec without `host_num_blocks`."""
        if not all(isinstance(spec, cls) and spec == specs[0] for spec in specs):
            raise AssertionError("all attention layers in the same KV cache group must have the same spec")
        return specs[0]


def to_host_spec(spec: FullAttentionSpec, host_num_blocks: int, state_page_bytes: int) -> SparseKVSpec:
    """Moves a stock spec to the host pool.

    Args:
        state_page_bytes: page of the model's recurrent-state layers on this rank, 0 where it has none. The virtual
            page is derived from it and `BLOCK_SIZE`, never from `spec.block_size`: vLLM first asks with block size 1,
            and a whole page for one token would make real pages 128 times too large.
    """
    per_token = max(MIN_TOKEN_BYTES, -(-state_page_bytes // BLOCK_SIZE))
    return replace_as(
        spec,
        SparseKVSpec,
        num_head_slots=1,
        state_content_bytes=-(-per_token // MIN_TOKEN_BYTES) * MIN_TOKEN_BYTES,
        host_num_blocks=host_num_blocks,
    )
