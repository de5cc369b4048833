"""Builds a scheduler of the 27B shape's memory layout without a model: a host pool for rows, recurrent states on the GPU."""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from vllm.config import CacheConfig, DeviceConfig, KVTransferConfig, ModelConfig, SchedulerConfig, SpeculativeConfig, VllmConfig
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, MambaSpec
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry
from vllm.v1.structured_output import StructuredOutputManager

from sparsekv.engine import adapter
from sparsekv.engine.manager import SparseKVManager
from sparsekv.engine.spec import SparseKVSpec

BLOCK = 128
PIPELINE = 2
"""Steps in flight under asynchronous scheduling."""
STATE_GROUPS = 3
"""48 recurrent layers in groups of 16."""


_LOADS = KVTransferConfig(
    kv_connector="SimulatedLoads", kv_connector_module_path="sparsekv.bench.scheduler.loads", kv_role="kv_both", engine_id="simulation"
)


@dataclass(frozen=True)
class Setup:
    """Sizes of the served model and of the stock scheduler's knobs."""

    max_num_batched_tokens: int = 8192
    max_num_seqs: int = 16
    max_model_len: int = 262_144
    pool_tokens: int = 2_200_000
    state_slots: int = 64
    """Requests whose recurrent states fit at their peak, 1 + `PIPELINE` + drafts; 0 for a model without recurrent layers."""
    drafts: int = 0
    long_prefill_token_threshold: int = 0
    adaptive: bool = False
    block_size: int = BLOCK
    retention_interval: int | None = 0
    prefix_caching: bool = True
    load_ms: float | None = None
    """How long a load from a slower tier takes; None: there is no such tier."""
    connector: KVTransferConfig | None = None
    """In place of the simulated tier."""


def build(cls: type[Scheduler], setup: Setup) -> Scheduler:
    """An instance of `cls` as the engine would make it."""
    config = _vllm_config(setup)
    config.scheduler_config.async_scheduling = True  # a CPU would switch it off
    assert config.max_concurrent_batches == PIPELINE
    if setup.drafts:
        config.speculative_config = _speculation(setup.drafts)
    adapter.register_builtin_specs()
    KVCacheSpecRegistry.register(SparseKVSpec, SparseKVManager, uniform_type_base_spec=SparseKVSpec)
    cache = _kv_cache_config(setup)
    config.cache_config.num_gpu_blocks = cache.num_blocks
    scheduler = cls(
        vllm_config=config,
        kv_cache_config=cache,
        structured_output_manager=StructuredOutputManager(config),
        block_size=setup.block_size,
        log_stats=True,
    )
    scheduler.use_v2_model_runner = True  # what a GPU runs
    scheduler.load_ms = setup.load_ms
    return scheduler


def _vllm_config(setup: Setup) -> VllmConfig:
    model = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "vocab_size": 64_000,
        "max_position_embeddings": 1 << 20,
    }
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(model))
        return VllmConfig(
            model_config=ModelConfig(model=folder, skip_tokenizer_init=True, max_model_len=setup.max_model_len, dtype="bfloat16"),
            cache_config=CacheConfig(
                block_size=setup.block_size,
                enable_prefix_caching=setup.prefix_caching,
                mamba_cache_mode="align",
                prefix_cache_retention_interval=setup.retention_interval,
            ),
            scheduler_config=SchedulerConfig(
                max_num_batched_tokens=setup.max_num_batched_tokens,
                max_num_seqs=setup.max_num_seqs,
                max_model_len=setup.max_model_len,
                is_encoder_decoder=False,
                long_prefill_token_threshold=setup.long_prefill_token_threshold,
                long_prefill_token_threshold_adaptive=setup.adaptive,
                async_scheduling=True,
            ),
            device_config=DeviceConfig("cpu"),
            kv_transfer_config=setup.connector or (None if setup.load_ms is None else _LOADS),
        )


def _speculation(drafts: int) -> SpeculativeConfig:
    """What a scheduler asks of the configuration of MTP; the real one wants the draft model's files."""
    config = object.__new__(SpeculativeConfig)
    config.__dict__.update(
        method="mtp",
        num_speculative_tokens=drafts,
        num_speculative_tokens_per_batch_size=None,
        disable_eagle_block_drop=False,
        parallel_drafting=False,
    )
    return config


def _kv_cache_config(setup: Setup) -> KVCacheConfig:
    rows = FullAttentionSpec(block_size=setup.block_size, num_kv_heads=1, head_size=16, dtype=torch.bfloat16)
    host = SparseKVSpec(
        **{f: getattr(rows, f) for f in rows.__dataclass_fields__}, host_num_blocks=setup.pool_tokens // setup.block_size + 1
    )
    groups = [KVCacheGroupSpec(["attention"], host)]
    blocks = 2
    if setup.state_slots:
        state = MambaSpec(
            block_size=setup.block_size,
            shapes=((16, 16),),
            dtypes=(torch.bfloat16,),
            mamba_cache_mode="align",
            num_speculative_blocks=setup.drafts,
        )
        groups += [KVCacheGroupSpec([f"state.{i}"], state) for i in range(STATE_GROUPS)]
        blocks = setup.state_slots * STATE_GROUPS * (1 + PIPELINE + setup.drafts) + 1
    return KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=groups)
