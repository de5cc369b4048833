"""The scheduler's side of checkpoints: how far a prompt can be restored, and which of a step's states are kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
from vllm.v1.core.kv_cache_coordinator import HybridKVCacheCoordinator
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.request import Request

from ..config import BLOCK_SIZE
from ..manager import SparseKVManager
from .index import Checkpoint, CheckpointIndex, Kind
from .store import Copy


@dataclass
class CheckpointCopies(KVConnectorMetadata):
    """What the workers copy in one step: loads at any time in it, stores behind its kernels."""

    stores: list[Copy] = field(default_factory=list)
    loads: list[tuple[str, Copy]] = field(default_factory=list)


class CheckpointScheduler:
    """Restores the longest prefix whose rows are in the host pool and whose state is in a slot.

    Nothing is reserved by a lookup. A slot is pinned when its load has blocks to go to, and until all ranks report it.
    """

    def __init__(self, index: CheckpointIndex, manager: KVCacheManager, groups: Sequence[int]) -> None:
        """
        Args:
            groups: the KV cache groups of recurrent layers.

        Raises:
            ValueError: the manager's coordinator is none of a hybrid model.
        """
        if not isinstance(manager.coordinator, HybridKVCacheCoordinator):
            raise ValueError("checkpoints need a hybrid model with prefix caching")
        self.index = index
        self._coordinator = manager.coordinator
        self._groups = tuple(groups)
        self._requests: dict[str, Request] = {}
        self._found: dict[str, Checkpoint] = {}
        """What the last lookup of a waiting request found."""
        self._loading: dict[str, Checkpoint] = {}
        self._loads: list[tuple[str, Copy]] = []
        for row_manager in self._coordinator.single_type_managers:
            if isinstance(row_manager, SparseKVManager):
                row_manager.block_pool.on_evict.append(index.rows_evicted)
                row_manager.block_pool.on_reset.append(index.clear)

    def add_request(self, request: Request) -> None:
        self._requests[request.request_id] = request

    def remove_request(self, request: Request) -> None:
        self._requests.pop(request.request_id, None)
        self._found.pop(request.request_id, None)

    def restorable(self, request: Request, local_tokens: int) -> int | None:
        """Tokens beyond the `local_tokens` vLLM has itself that a load would restore.

        Returns:
            None while another request loads the same checkpoint: when it is done, vLLM has it itself.
        """
        self._found.pop(request.request_id, None)
        local = local_tokens // BLOCK_SIZE
        # One token at least is computed, for its logits.
        limit = (request.num_tokens - 1) // BLOCK_SIZE
        if self.index.longest(request.block_hashes, local, limit) is None:
            return 0
        checkpoint = self.index.longest(request.block_hashes, local, min(limit, self._blocks_with_rows(request)))
        if checkpoint is None:
            return 0
        if any(checkpoint is loading for loading in self._loading.values()):
            return None
        self._found[request.request_id] = checkpoint
        return checkpoint.blocks * BLOCK_SIZE - local_tokens

    def begin_load(self, request: Request, block_ids: Sequence[Sequence[int]]) -> None:
        """The request has its blocks `[group][block]`, for what `restorable` found last."""
        checkpoint = self._found.pop(request.request_id)
        self.index.use(checkpoint)
        self.index.pin(checkpoint)
        self._loading[request.request_id] = checkpoint
        blocks = tuple(block_ids[group][checkpoint.blocks - 1] for group in self._groups)
        self._loads.append((request.request_id, Copy(checkpoint.slot, blocks)))

    def end_load(self, request_id: str) -> None:
        """Every rank has loaded, whether the request still wants it or not."""
        if (checkpoint := self._loading.pop(request_id, None)) is not None:
            self.index.unpin(checkpoint)

    def plan(self, handoffs: Mapping[str, Sequence[tuple[int, int, int]]]) -> CheckpointCopies:
        """The copies of the step that has just been scheduled.

        Args:
            handoffs: by request, `(group, block, tokens)` of each state that this step completes at a block boundary
                (vLLM's `boundary_state_offloads`). Their blocks hold them until the step ends.
        """
        stores = []
        for request_id, entries in handoffs.items():
            request = self._requests.get(request_id)
            if request is None:
                continue
            for tokens in sorted({tokens for _, _, tokens in entries}):
                blocks = {group: block for group, block, at in entries if at == tokens}
                if tokens % BLOCK_SIZE or not all(blocks.get(group) for group in self._groups):
                    continue
                checkpoint = self.index.offer(request.block_hashes, tokens // BLOCK_SIZE, self._kind(request, tokens))
                if checkpoint is not None:
                    stores.append(Copy(checkpoint.slot, tuple(blocks[group] for group in self._groups)))
        loads, self._loads = self._loads, []
        return CheckpointCopies(stores, loads)

    def _blocks_with_rows(self, request: Request) -> int:
        _, hits = self._coordinator.find_longest_cache_hit_per_group(request.block_hashes, request.num_tokens - 1)
        cached = {group for spec_group in self._coordinator.attention_groups for group in spec_group.group_ids}
        return min(hits[group] for group in cached.difference(self._groups)) // BLOCK_SIZE

    def _kind(self, request: Request, tokens: int) -> Kind:
        if tokens > request.num_prompt_tokens:
            return Kind.ANSWER
        # A draft model's rows are cached one block behind, and vLLM ends its chunk there.
        behind = BLOCK_SIZE * (1 + bool(self._coordinator.eagle_group_ids))
        if tokens + behind > request.num_prompt_tokens:
            return Kind.TURN
        if request.shared_prefix_boundary and tokens == request.shared_prefix_boundary // BLOCK_SIZE * BLOCK_SIZE:
            return Kind.JUNCTION
        return Kind.INTERIOR
