"""Everything that differs between vLLM 0.30 and 0.33, found by asking for features, never by comparing versions."""

from __future__ import annotations

from importlib import util

from vllm.config import VllmConfig
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.kv_cache_interface import MambaSpec

from .host_pool import HostBlockPool


def missing_features() -> list[str]:
    """What this vLLM lacks of what the plug-in stands on; empty for every supported version."""
    from vllm.v1.attention.backend import AttentionBackend
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager

    found = {
        "AttentionBackend.customize_spec": hasattr(AttentionBackend, "customize_spec"),
        "KVCacheBlock.pool": "pool" in KVCacheBlock.__dataclass_fields__,
        "SingleTypeKVCacheManager.retains_longer_hit": hasattr(SingleTypeKVCacheManager, "retains_longer_hit"),
        "kv_cache_spec_registry": util.find_spec("vllm.v1.kv_cache_spec_registry") is not None,
    }
    return [name for name, there in found.items() if not there]


def register_builtin_specs() -> None:
    """Registers vLLM's own KV cache specs: its lazy registration is skipped once a plug-in has registered one."""
    from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs

    register_all_kvcache_specs(None)


def private_block_pool(device_pool: BlockPool, num_blocks: int, enable_caching: bool) -> HostBlockPool:
    """A block pool of our own ids that publishes its cache events, if wanted, through vLLM's queue."""
    from vllm.distributed.kv_events import MEDIUM_CPU

    return HostBlockPool(
        num_gpu_blocks=num_blocks,
        enable_caching=enable_caching,
        hash_block_size=device_pool.hash_block_size,
        enable_kv_cache_events=device_pool.enable_kv_cache_events,
        medium=MEDIUM_CPU,
        event_owner=device_pool,
    )


def state_page_bytes(vllm_config: VllmConfig) -> int:
    """Bytes of one recurrent state of one layer on this rank; 0 for a model without such layers."""
    from vllm.model_executor.models import ModelRegistry

    model = vllm_config.model_config
    if not model.is_hybrid:
        return 0
    model_cls, _ = ModelRegistry.resolve_model_cls(model.architecture, model_config=model)
    if hasattr(model_cls, "get_mamba_specs_from_config"):
        return max(spec.page_size_bytes for spec in model_cls.get_mamba_specs_from_config(vllm_config))
    shapes = model_cls.get_mamba_state_shape_from_config(vllm_config)
    return MambaSpec(shapes=shapes, dtypes=model_cls.get_mamba_state_dtype_from_config(vllm_config), block_size=-1).page_size_bytes


def max_decode_query_len(vllm_config: VllmConfig) -> int:
    """Query tokens of a decode step: 1, or 1 + drafts under speculation (vLLM's own helper came with 0.31)."""
    speculation = vllm_config.speculative_config
    return 1 + ((speculation.num_speculative_tokens or 0) if speculation is not None else 0)
