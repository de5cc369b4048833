"""The CUDA backend: rows in pinned host memory or on the GPU, decode through the sparse kernels, prefill over a staged history.

Uniform decode batches (1 + drafts tokens a request) are captured in CUDA graphs whole. Steps with a prefill run vLLM's
piecewise graphs with attention in between, eagerly; the decoding requests come first in such a batch and take the same
sparse path. A request below the policy's `dense_below` selects everything, on the device, so one graph serves short and long.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, ClassVar

import torch
from vllm.config import VllmConfig
from vllm.utils.torch_utils import get_accelerator_view_from_cpu_tensor
from vllm.v1.attention.backend import AttentionCGSupport, AttentionMetadataBuilder, CommonAttentionMetadata
from vllm.v1.attention.backends.fa_utils import flash_attn_varlen_func, get_flash_attn_version
from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend, TritonAttentionImpl
from vllm.v1.attention.backends.utils import split_decodes_and_prefills

from sparsekv.kernels.layout import KVLayout
from sparsekv.kernels.merge import merge
from sparsekv.kernels.sketch import SketchBasis

from .backend import RequestBatch, SparseBackendMixin, SparseImplMixin
from .cuda_runtime import cuda_runtime
from .history import segment_lengths
from .host_memory import allocate_pinned
from .pools import LayerPool, allocate_layer


@dataclass(frozen=True)
class ChunkWithHistory:
    """One prefilling request that already has tokens in the pool."""

    request: int
    """Its row of the block table."""
    tokens: slice
    """Its chunk, counted from the first prefilling token of the step."""
    query_start_loc: torch.Tensor
    """`[0, chunk length]` int32 on the device."""
    segments: list[tuple[int, torch.Tensor]]
    """Length of each segment of the history, and `[0, length]` int32 on the device."""


@dataclass(frozen=True)
class PrefillBatch:
    """The prefilling requests of a step: the rows of the batch behind the decoding ones."""

    num_tokens: int
    query_start_loc: torch.Tensor
    """`[P + 1]` int32 on the device, counted from the first prefilling token."""
    max_query_len: int
    chunks: list[ChunkWithHistory]


@dataclass(frozen=True)
class SparseCudaMetadata:
    """One step, as every layer reads it. The tensors are vLLM's persistent buffers: graphs replay on them."""

    num_decode_tokens: int
    decodes: RequestBatch
    prefill: PrefillBatch | None


class SparseCudaMetadataBuilder(AttentionMetadataBuilder[SparseCudaMetadata]):
    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH
    supports_draft_decode_metadata_update = True

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: VllmConfig, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._init_reorder_batch_threshold(1, supports_spec_as_decode=True)

    def build(self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False) -> SparseCudaMetadata:
        m = common_attn_metadata
        assert self.reorder_batch_threshold is not None
        decodes, prefills, decode_tokens, _ = split_decodes_and_prefills(m, decode_threshold=self.reorder_batch_threshold)
        batch = RequestBatch(
            m.query_start_loc[: decodes + 1], m.seq_lens[:decodes], m.block_table_tensor[:decodes], self.reorder_batch_threshold
        )
        return SparseCudaMetadata(decode_tokens, batch, self._prefill(m, decodes, decode_tokens) if prefills else None)

    def _prefill(self, m: CommonAttentionMetadata, first: int, first_token: int) -> PrefillBatch:
        assert m.seq_lens_cpu_upper_bound is not None, "exact for prefilling requests"
        starts = (m.query_start_loc_cpu[first : m.num_reqs + 1] - first_token).tolist()
        lens = m.seq_lens_cpu_upper_bound[first : m.num_reqs].tolist()
        spans = [(first + i, slice(*span), n - (span[1] - span[0])) for i, (span, n) in enumerate(zip(pairwise(starts), lens, strict=True))]
        histories = [(request, chunk, n) for request, chunk, n in spans if chunk.stop > chunk.start and n > 0]
        if histories:
            cuda_runtime().begin_prefill([(request, n) for request, _, n in histories], m.block_table_tensor)
        return PrefillBatch(
            num_tokens=starts[-1],
            query_start_loc=m.query_start_loc[first : m.num_reqs + 1] - first_token,
            max_query_len=max(end - start for start, end in pairwise(starts)),
            chunks=self._chunks(histories),
        )

    def _chunks(self, histories: list[tuple[int, slice, int]]) -> list[ChunkWithHistory]:
        """One copy to the device for the bounds of all chunks and segments."""
        lengths = [[chunk.stop - chunk.start, *segment_lengths(n)] for _, chunk, n in histories]
        flat = torch.tensor([(0, n) for ns in lengths for n in ns], dtype=torch.int32).view(-1, 2)
        bounds = iter((flat.pin_memory() if histories else flat).to(self.device, non_blocking=True).unbind())
        return [
            ChunkWithHistory(request, chunk, next(bounds), [(n, next(bounds)) for n in ns[1:]])
            for (request, chunk, _), ns in zip(histories, lengths, strict=True)
        ]

    def update_draft_decode_metadata(self, metadata: SparseCudaMetadata) -> None:
        """Nothing to do: what changes between draft steps is in vLLM's persistent buffers."""


class SparseCudaBackend(SparseBackendMixin, TritonAttentionBackend):
    """vLLM's `CUSTOM` backend, so that layers it does not serve keep a stock one (`attention_config.backend_per_kind`)."""

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[SparseCudaImpl]:
        return SparseCudaImpl

    @staticmethod
    def get_builder_cls() -> type[SparseCudaMetadataBuilder]:
        return SparseCudaMetadataBuilder


class SparseCudaImpl(SparseImplMixin, TritonAttentionImpl):
    def allocate(self, layout: KVLayout, basis: SketchBasis, device: torch.device) -> LayerPool:
        def rows_on_host(num_bytes: int) -> torch.Tensor:
            self._pinned = allocate_pinned(num_bytes, device)  # kept: the view does not own the memory
            return get_accelerator_view_from_cpu_tensor(self._pinned)

        def rows_on_gpu(num_bytes: int) -> torch.Tensor:
            return torch.zeros(num_bytes, dtype=torch.uint8, device=device)

        on_host = self.config.placement == "host"
        pool = allocate_layer(layout, self.config.num_blocks, basis, rows_on_host if on_host else rows_on_gpu, device)
        runtime = cuda_runtime()
        if on_host:
            max_requests = self._vllm_config.scheduler_config.max_num_seqs
            staging = max_requests * layout.num_kv_heads * self.config.policy.capacity
            pool = replace(pool, hot=runtime.hot_set(pool, self.config.hot_bytes, staging))
        self._place = runtime.add_layer(pool, self._vllm_config.model_config.dtype)
        self._history = runtime.history
        self._fa_version = get_flash_attn_version(head_size=self.head_size)
        # Queries stay in the model's dtype: nothing here reads fp8 ones.
        self.supports_quant_query_input = False
        return pool

    def forward(
        self,
        layer: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: SparseCudaMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """`query [T, Hq, D]`, `key` and `value [T, Hkv, D]`; `output` likewise, written in place. `kv_cache` is the virtual page."""
        if attn_metadata is None:  # vLLM measures the memory of a forward pass
            return output.fill_(0)
        n = attn_metadata.num_decode_tokens
        if n:
            output[:n] = self.decode(query[:n], attn_metadata.decodes)
        if (prefill := attn_metadata.prefill) is not None:
            end = n + prefill.num_tokens
            self._attend_prefill(query[n:end], key[n:end], value[n:end], prefill, output[n:end])
        return output

    def _attend_prefill(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, batch: PrefillBatch, output: torch.Tensor
    ) -> None:
        """The chunks' own tokens first, causally, from the keys at hand; then each request's staged history, segment by segment."""
        n = batch.max_query_len
        out, lse = self._flash(query, key, value, batch.query_start_loc, batch.query_start_loc, n, n)
        if batch.chunks:
            self._history.skip_to(self._place)
        for chunk in batch.chunks:
            length = chunk.tokens.stop - chunk.tokens.start
            merged = out[chunk.tokens].float(), lse[chunk.tokens]
            for segment_length, segment_start_loc in chunk.segments:
                segment, segment_key, segment_value = self._history.take()
                assert (segment.layer, segment.request) == (self._place, chunk.request)
                part = self._flash(
                    query[chunk.tokens],
                    segment_key,
                    segment_value,
                    chunk.query_start_loc,
                    segment_start_loc,
                    length,
                    segment_length,
                    causal=False,
                )
                self._history.release()
                merged = merge(*merged, *part)
            out[chunk.tokens] = merged[0].to(out.dtype)
        output.copy_(out)

    def _flash(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        query_start_loc: torch.Tensor,
        key_start_loc: torch.Tensor,
        max_query_len: int,
        max_key_len: int,
        causal: bool = True,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """FlashAttention: `out [T, Hq, D]` and `lse [T, Hq]`."""
        out, lse = flash_attn_varlen_func(
            q=query,
            k=key,
            v=value,
            max_seqlen_q=max_query_len,
            cu_seqlens_q=query_start_loc,
            max_seqlen_k=max_key_len,
            cu_seqlens_k=key_start_loc,
            softmax_scale=self.scale,
            causal=causal,
            return_softmax_lse=True,
            fa_version=self._fa_version,
        )
        return out, lse.t()
