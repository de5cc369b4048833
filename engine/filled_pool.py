"""A benchmark's stand-in for prefill: conversations of any length, at once, with synthetic rows."""

from __future__ import annotations

from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.decode_bench_connector import DecodeBenchConnector

from sparsekv.kernels.write import write

from .config import BLOCK_SIZE
from .cuda_runtime import cuda_runtime
from .pools import LayerPool
from .spec import SparseKVSpec

BLOCKS_PER_WRITE = 256


class FilledPoolConnector(DecodeBenchConnector):
    """vLLM's `DecodeBenchConnector`, which claims a prompt's KV as already present, for layers that own their pools.

    Keys are random with one token in `1 / heavy_share` being `heavy_scale` times larger. Real attention returns to the
    same few tokens step after step; with equal keys and random queries no row would ever be read twice. The share sets
    how often a selected row is found in the hot set, which every result reports.
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        extra = vllm_config.kv_transfer_config.get_from_extra_config
        self._heavy_share = float(extra("heavy_share", 0.03))
        self._heavy_scale = float(extra("heavy_scale", 4.0))
        if self.connector_worker is not None:
            for group, spec in enumerate(kv_cache_config.kv_cache_groups):
                if isinstance(spec.kv_cache_spec, SparseKVSpec):
                    self.connector_worker.group_to_layers[group] = []

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        super().register_kv_caches(kv_caches)
        generator = torch.Generator(device="cuda").manual_seed(0)
        for pool in cuda_runtime().layers:
            self._fill(pool, generator)
        torch.cuda.synchronize()

    def _fill(self, pool: LayerPool, generator: torch.Generator) -> None:
        layout, device = pool.layout, pool.sketch.codes.device
        for first in range(1, pool.rows.shape[0], BLOCKS_PER_WRITE):  # block 0 is the null block
            slots = torch.arange(first * BLOCK_SIZE, min(first + BLOCKS_PER_WRITE, pool.rows.shape[0]) * BLOCK_SIZE, device=device)
            shape = (slots.shape[0], layout.num_kv_heads, layout.head_dim)
            key, value = (torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16) for _ in range(2))
            heavy = torch.rand(shape[:2], generator=generator, device=device) < self._heavy_share
            key *= torch.where(heavy, self._heavy_scale, 1.0).to(key.dtype).unsqueeze(-1)
            write(key, value, slots, pool.rows, pool.row_scales, layout, sketch=pool.sketch, basis=pool.basis)
