"""A KV connector that moves no KV: it is vLLM's one official channel from the workers to /metrics."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata, KVConnectorRole, SupportsHMA

from .config import BLOCK_SIZE
from .metrics import SparseKVPromMetrics, SparseKVStats, step_counters

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request


class NoTransfers(KVConnectorMetadata):
    """vLLM wants metadata of a connector each step."""


class SparseKVConnector(KVConnectorBase_V1, SupportsHMA):
    """Selected by `--kv-transfer-config '{"kv_connector": "SparseKVConnector", "kv_role": "kv_both"}'`.

    The engine serves without it too, then without statistics.
    """

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._pool: Any = None

    @property
    def requires_kv_delivery(self) -> bool:
        return False

    # ---- statistics

    def bind_kv_cache_manager(self, kv_cache_manager: KVCacheManager) -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        from .manager import SparseKVManager

        managers = kv_cache_manager.coordinator.single_type_managers
        self._pool = next((m.block_pool for m in managers if isinstance(m, SparseKVManager)), None)

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """Asked of every worker, summed over them, and then of the scheduler."""
        if self.role == KVConnectorRole.WORKER:
            return SparseKVStats(data=step_counters(self._device()).drain())
        if self._pool is None:
            return None
        total, free = self._pool.num_gpu_blocks - 1, self._pool.get_num_free_blocks()
        cached = len(self._pool.cached_block_hash_to_block)
        in_use = total - free
        return SparseKVStats(
            data={"pool_used": in_use * BLOCK_SIZE, "pool_cached": cached * BLOCK_SIZE, "pool_free": free * BLOCK_SIZE}
        )

    def _device(self) -> Any:
        return self._vllm_config.device_config.device

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats | None:
        return SparseKVStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: VllmConfig, metric_types: Any, labelnames: list[str], per_engine_labelvalues: dict[int, list[object]]
    ) -> KVConnectorPromMetrics | None:
        return SparseKVPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    # ---- no transfers

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None: ...

    def wait_for_layer_load(self, layer_name: str) -> None: ...

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None: ...

    def wait_for_save(self) -> None: ...

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        return 0, False

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None: ...

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        return NoTransfers()

    def request_finished_all_groups(self, request: Request, block_ids: tuple[list[int], ...]) -> tuple[bool, dict[str, Any] | None]:
        return False, None

    def reset_cache(self) -> bool | None:
        return True
