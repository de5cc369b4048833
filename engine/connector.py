"""The KV connector: brings back recurrent states, and carries statistics from scheduler and workers to /metrics.

Rows need no transfer: they stay where they are. A request whose rows are cached and whose state is not gets the state
loaded from a checkpoint, *asynchronously*: vLLM's align mode copies the state before a step's loads would run, so that
a load within the step would be lost without a sign.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata, KVConnectorRole, SupportsHMA

from sparsekv.profiles.errors import SparsekvError

from .checkpoints.index import CheckpointIndex
from .checkpoints.scheduler import CheckpointCopies, CheckpointScheduler
from .checkpoints.store import CheckpointStore, checkpoint_bytes, recurrent_groups
from .config import BLOCK_SIZE, active_config
from .host_memory import allocate_pinned
from .manager import SparseKVManager
from .metrics import SparseKVPromMetrics, SparseKVStats, step_counters
from .pools import allocate_cpu_rows

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    from .host_pool import HostBlockPool


class SparseKVConnector(KVConnectorBase_V1, SupportsHMA):
    """Selected by `--kv-transfer-config '{"kv_connector": "SparseKVConnector", "kv_role": "kv_both"}'`.

    The engine serves without it too, then without statistics and checkpoints.
    """

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._num_slots = _num_slots(vllm_config, kv_cache_config)
        self._store: CheckpointStore | None = None
        self._pool: HostBlockPool | None = None
        self._checkpoints: CheckpointScheduler | None = None
        self._lookups: dict[str, tuple[int, int]] = {}
        """Tokens and local hit of requests that have not started yet."""
        self._counts: dict[str, float] = {}
        self._reported: dict[str, float] = {}

    @property
    def requires_kv_delivery(self) -> bool:
        return False

    # ---- scheduler

    def bind_kv_cache_manager(self, kv_cache_manager: KVCacheManager) -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        managers = kv_cache_manager.coordinator.single_type_managers
        self._pool = next((m.block_pool for m in managers if isinstance(m, SparseKVManager)), None)
        if self._num_slots and kv_cache_manager.enable_caching:
            index = CheckpointIndex(self._num_slots, active_config().retention)
            self._checkpoints = CheckpointScheduler(index, kv_cache_manager, recurrent_groups(self._kv_cache_config))

    def on_new_request(self, request: Request) -> None:
        if self._checkpoints is not None:
            self._checkpoints.add_request(request)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        tokens = 0
        if self._checkpoints is not None and not request.skip_reading_prefix_cache:
            tokens = self._checkpoints.restorable(request, num_computed_tokens)
        self._lookups[request.request_id] = request.num_tokens, num_computed_tokens
        return tokens, bool(tokens)

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        if num_external_tokens:
            assert self._checkpoints is not None
            self._checkpoints.begin_load(request, blocks.get_block_ids())
        if (lookup := self._lookups.pop(request.request_id, None)) is not None:
            for key, tokens in zip(("query_tokens", "hit_pool", "hit_checkpoint"), (*lookup, num_external_tokens), strict=True):
                self._counts[key] = self._counts.get(key, 0.0) + tokens

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        if self._checkpoints is None:
            return CheckpointCopies()
        state = scheduler_output.kv_connector_block_state
        return self._checkpoints.plan(state.boundary_state_offloads if state is not None else {})

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        for request_id in connector_output.finished_recving or ():
            assert self._checkpoints is not None
            self._checkpoints.end_load(request_id)

    def request_finished_all_groups(self, request: Request, block_ids: tuple[list[int], ...]) -> tuple[bool, dict[str, Any] | None]:
        self._lookups.pop(request.request_id, None)
        if self._checkpoints is not None:
            self._checkpoints.remove_request(request)
        return False, None

    def reset_cache(self) -> bool | None:
        if self._checkpoints is not None:
            self._checkpoints.index.clear()
        return True

    # ---- workers

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        if not self._num_slots:
            return
        device = self._device()
        states = {name: cache if isinstance(cache, list | tuple) else [cache] for name, cache in kv_caches.items()}

        def allocate(num_bytes: int) -> torch.Tensor:
            return allocate_pinned(num_bytes, device) if device.type == "cuda" else allocate_cpu_rows(num_bytes)

        self._store = CheckpointStore(self._kv_cache_config, states, self._num_slots, allocate)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        if self._store is not None:
            for request_id, copy in self._copies().loads:
                self._store.load(request_id, copy)

    def wait_for_save(self) -> None:
        if self._store is not None:
            self._store.store(self._copies().stores)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        return None, (self._store.finished() or None) if self._store is not None else None

    def wait_for_layer_load(self, layer_name: str) -> None: ...

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None: ...

    def _copies(self) -> CheckpointCopies:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, CheckpointCopies)
        return metadata

    def _device(self) -> torch.device:
        return torch.device(self._vllm_config.device_config.device)

    # ---- statistics

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """Asked of every worker, summed over them, and then of the scheduler."""
        if self.role == KVConnectorRole.WORKER:
            copied = self._store.drain() if self._store is not None else {}
            return SparseKVStats(data=step_counters(self._device()).drain() | copied)
        if self._pool is None:
            return None
        total, free = self._pool.num_gpu_blocks - 1, self._pool.get_num_free_blocks()
        gauges = {
            "pool_used": (total - free) * BLOCK_SIZE,
            "pool_cached": self._pool.num_cached * BLOCK_SIZE,
            "pool_free": free * BLOCK_SIZE,
            "pool_eviction_age": self._pool.eviction_age,
        }
        totals = self._counts | {"evicted_tokens": self._pool.num_evicted * BLOCK_SIZE}
        if self._checkpoints is not None:
            index = self._checkpoints.index
            used = index.num_slots - index.num_free
            gauges |= {"checkpoints_used": used, "checkpoints_free": index.num_free, "checkpoints_oldest": index.oldest}
            totals |= {"checkpoints_evicted": index.num_evicted, "checkpoints_refused": index.num_refused}
        added = {key: total - self._reported.get(key, 0.0) for key, total in totals.items()}
        self._reported = totals
        return SparseKVStats(data=gauges | {key: amount for key, amount in added.items() if amount})

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats | None:
        return SparseKVStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: VllmConfig, metric_types: Any, labelnames: list[str], per_engine_labelvalues: dict[int, list[object]]
    ) -> KVConnectorPromMetrics | None:
        return SparseKVPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)


def _num_slots(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> int:
    """Checkpoints that fit the profile's memory, alike in all processes; 0 for a model that has no recurrent layers.

    Raises:
        SparsekvError: there is memory for checkpoints, but not for two.
    """
    available = active_config().checkpoint_bytes
    if not available or not recurrent_groups(kv_cache_config):
        return 0
    size = checkpoint_bytes(kv_cache_config) * vllm_config.parallel_config.tensor_parallel_size
    if available < 2 * size:
        raise SparsekvError(
            f"recurrent.checkpoints is {available / 2**20:.1f} MiB, one checkpoint of this model takes {size / 2**20:.1f} MiB",
            hint="give it room for the latest states of all conversations, or 0 to keep none",
        )
    return available // size
