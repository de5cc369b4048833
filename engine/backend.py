"""What the CPU and the CUDA backend share: the spec hook, the checks of a layer, its memory, and a sparse decode step.

Both derive from a stock vLLM backend and put these mixins before it. Nothing here assumes a device.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.v1.attention.backend import AttentionType
from vllm.v1.kv_cache_interface import AttentionSpec, FullAttentionSpec

from sparsekv.basis.format import Basis, check_basis, load_basis
from sparsekv.basis.identity import layer_key
from sparsekv.kernels.attend import attend
from sparsekv.kernels.fetch import fetch, pool_row_index
from sparsekv.kernels.layout import KVLayout
from sparsekv.kernels.select import select
from sparsekv.kernels.tally import tally
from sparsekv.kernels.write import write
from sparsekv.profiles.errors import SparsekvError

from . import adapter
from .config import BLOCK_SIZE, EngineConfig, active_config
from .metrics import StepCounters, step_counters
from .pools import LayerPool, allocate_layer
from .spec import SparseKVSpec, to_host_spec

_state_page_bytes = 0
"""Page of the served model's recurrent states, known once its first attention layer exists: `customize_spec` is a class
method that vLLM also calls where no configuration is current."""


class SparseBackendMixin:
    """Before a stock `AttentionBackend`: full-attention layers declare a `SparseKVSpec`."""

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int]:
        return [BLOCK_SIZE]

    @classmethod
    def customize_spec(cls, spec: AttentionSpec) -> AttentionSpec:
        if type(spec) is not FullAttentionSpec:
            return spec
        if spec.block_size not in (1, BLOCK_SIZE):
            raise SparsekvError(f"the host pool has blocks of {BLOCK_SIZE} tokens, vLLM asks for {spec.block_size}", hint=f"pass --block-size {BLOCK_SIZE}")
        return to_host_spec(spec, active_config().num_blocks, _state_page_bytes)


@dataclass(frozen=True)
class RequestBatch:
    """Some requests of a step, in the form the kernels take them (kernels/README.md)."""

    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    max_query_len: int


class SparseImplMixin:
    """Before a stock `AttentionImpl`: owns the layer's pool, writes rows and sketch, and decodes sparsely.

    One instance per attention layer.
    """

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(  # type: ignore[call-arg]
            num_heads,
            head_size,
            scale,
            num_kv_heads,
            alibi_slopes,
            sliding_window,
            kv_cache_dtype,
            logits_soft_cap,
            attn_type,
            kv_sharing_target_layer_name,
            **({"sinks": sinks} if sinks is not None else {}),
            **kwargs,
        )
        global _state_page_bytes
        vllm_config = get_current_vllm_config()
        refused = {
            "sliding-window attention": sliding_window is not None,
            "ALiBi": alibi_slopes is not None,
            "a soft cap on attention logits": bool(logits_soft_cap),
            "learned attention sinks": sinks is not None,
            f"{attn_type} attention": attn_type != AttentionType.DECODER,
            "KV sharing between layers": kv_sharing_target_layer_name is not None,
            f"--kv-cache-dtype {kv_cache_dtype} (the profile's kv.dtype decides)": kv_cache_dtype != "auto",
            "decode context parallelism": vllm_config.parallel_config.decode_context_parallel_size > 1,
        }
        if present := [name for name, there in refused.items() if there]:
            raise SparsekvError(f"sparsekv does not serve models or settings with {', '.join(present)}")
        self.config: EngineConfig = active_config()
        self.layer_name = ""
        self.pool: LayerPool | None = None
        self._vllm_config = vllm_config
        _check_capacity(self.config, vllm_config)
        _state_page_bytes = max(_state_page_bytes, adapter.state_page_bytes(vllm_config))

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Allocates the layer's memory: before vLLM profiles, so that it counts as used, and before graphs are captured."""
        super().process_weights_after_loading(act_dtype)  # type: ignore[misc]
        if self.pool is not None:
            return
        layers = self._vllm_config.compilation_config.static_forward_context
        self.layer_name = next(name for name, layer in layers.items() if getattr(layer, "impl", None) is self)
        first = next(name for name, layer in layers.items() if isinstance(getattr(layer, "impl", None), SparseImplMixin))
        basis = _basis_of(self.config, self._vllm_config)
        key, rank = layer_key(self.layer_name), get_tensor_model_parallel_rank()
        if key not in basis.layers:
            raise SparsekvError(f"{basis.path} has no sketch for layer {self.layer_name}", hint="fit the basis again with `sparsekv refit-basis`")
        layout = KVLayout(
            num_q_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_size,
            row_format=self.config.row_format,
            sketch_rank=basis.metadata.layers[key].rank,
            sketch_bits=basis.metadata.bits,
            block_size=BLOCK_SIZE,
        )
        # Ranks beyond the number of KV heads hold replicas of one head, as in vLLM's QKVParallelLinear.
        tp = self._vllm_config.parallel_config.tensor_parallel_size
        start = rank * basis.metadata.model.num_kv_heads // tp
        device = self._vllm_config.device_config.device
        self.pool = self.allocate(layout, basis.layer(key, slice(start, start + self.num_kv_heads)), device)
        self.counters: StepCounters = step_counters(device)
        self.counters.row_bytes = layout.row_bytes
        self.counts_requests = rank == 0 and self.layer_name == first
        self.tally_row = self.counters.decode[0 if self.counts_requests else 1]

    def allocate(self, layout: KVLayout, basis: Any, device: torch.device) -> LayerPool:
        raise NotImplementedError

    def do_kv_cache_update(self, layer: Any, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        """vLLM's write hook. `kv_cache` is the virtual page: never read, never written."""
        pool = self.pool
        n = slot_mapping.shape[0]
        write(key[:n], value[:n], slot_mapping, pool.rows, pool.row_scales, pool.layout, sketch=pool.sketch, basis=pool.basis, hot=pool.hot)

    def decode(self, query: torch.Tensor, batch: RequestBatch) -> torch.Tensor:
        """Selects rows by sketch and attends to those alone.

        Args:
            query: `[T, Hq, D]`, packed.

        Returns:
            `[T, Hq, D]`.
        """
        pool = self.pool
        selection = select(
            query,
            batch.query_start_loc,
            batch.seq_lens,
            batch.block_table,
            pool.sketch,
            pool.basis,
            pool.layout,
            self.config.policy,
            scale=self.scale,
            max_query_len=batch.max_query_len,
        )
        if pool.hot is None:
            rows, row_index = pool.flat_rows, pool_row_index(selection, batch.block_table, pool.layout)
        else:
            rows, row_index = pool.hot.rows, fetch(selection, batch.block_table, pool.rows, pool.layout, pool.hot)
        out, _ = attend(
            query,
            batch.query_start_loc,
            batch.seq_lens,
            batch.block_table,
            rows,
            pool.row_scales,
            row_index,
            selection,
            pool.layout,
            self.scale,
        )
        tally(selection, batch.seq_lens, self.config.policy, self.tally_row)
        return out

def _check_capacity(config: EngineConfig, vllm_config: VllmConfig) -> None:
    """vLLM's own check sees the virtual page only: a request that can never fit would wait for ever."""
    longest = vllm_config.model_config.max_model_len
    if longest > (config.num_blocks - 1) * BLOCK_SIZE:
        raise SparsekvError(
            f"one request of the model's maximum length ({longest} tokens) does not fit the host pool ({config.pool_tokens} tokens)",
            hint="raise kv.pool_tokens or lower the maximum context length in the profile",
        )


_load_basis_once = functools.lru_cache(maxsize=1)(load_basis)


def _basis_of(config: EngineConfig, vllm_config: VllmConfig) -> Basis:
    basis = _load_basis_once(config.basis)
    # A draft model's layers share the target's file; its own configuration describes another shape.
    if vllm_config.model_config.runner_type != "draft":
        check_basis(basis, vllm_config.model_config.hf_config)
    return basis
