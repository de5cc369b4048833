"""The CPU backend: overrides `CPU_ATTN`.

A step's requests are split in two. Prefills and short contexts attend *densely*: their rows are gathered from the host
pool into the layout of vLLM's own CPU kernel, and that kernel does the rest, so that it sees the numbers it would see
without sparsekv. Long decodes attend *sparsely*, through the reference kernels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadata,
    CPUAttentionMetadataBuilder,
)
from vllm.v1.kv_cache_interface import AttentionSpec

from sparsekv.kernels.layout import KVLayout
from sparsekv.kernels.rows import dequantise_rows
from sparsekv.kernels.sketch import SketchBasis

from . import adapter
from .backend import RequestBatch, SparseBackendMixin, SparseImplMixin
from .config import BLOCK_SIZE, active_config
from .pools import LayerPool, allocate_cpu_rows, allocate_layer


@dataclass
class SparseBatch:
    """The sparse decodes of a step."""

    requests: RequestBatch
    tokens: torch.Tensor
    """`[T]` int64: their rows in the packed query."""


@dataclass
class DenseBatch:
    """The requests of a step that vLLM's CPU kernel attends."""

    metadata: CPUAttentionMetadata
    """As the stock builder makes it, over a scratch cache of `pool_blocks.numel()` blocks."""
    pool_blocks: torch.Tensor
    """`[M]` int32: the pool block behind each scratch block; a block shared by several requests appears once."""
    part_filled: list[tuple[int, int]]
    """Scratch blocks that end a request, with the tokens they hold: vLLM's kernel multiplies what lies behind by zero."""
    num_rows: int
    """Rows per KV head that the requests read, for the statistics."""
    num_decodes: int
    tokens: torch.Tensor | None = None
    """`[T]` int64: their rows in the packed query, None where they are all of it."""


@dataclass
class SparseCPUMetadata:
    num_actual_tokens: int
    dense: DenseBatch | None
    sparse: SparseBatch | None


class SparseCPUBackend(SparseBackendMixin, CPUAttentionBackend):
    @staticmethod
    def get_impl_cls() -> type[SparseCPUImpl]:
        return SparseCPUImpl

    @staticmethod
    def get_builder_cls() -> type[SparseCPUMetadataBuilder]:
        return SparseCPUMetadataBuilder

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return False


class SparseCPUMetadataBuilder(CPUAttentionMetadataBuilder):
    def __init__(self, kv_cache_spec: AttentionSpec, layer_names: list[str], vllm_config: VllmConfig, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.dense_limit = active_config().dense_limit
        self.max_decode_query_len = adapter.max_decode_query_len(vllm_config)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> SparseCPUMetadata:
        m = common_attn_metadata
        query_lens = m.query_start_loc[1:] - m.query_start_loc[:-1]
        decodes = query_lens <= self.max_decode_query_len
        if m.is_prefilling is not None:
            decodes &= ~m.is_prefilling[: m.num_reqs]
        sparse = decodes & (m.seq_lens > self.dense_limit)
        return SparseCPUMetadata(
            num_actual_tokens=m.num_actual_tokens,
            dense=None if bool(sparse.all()) else self._dense(m, ~sparse, decodes & ~sparse),
            sparse=self._sparse(m, sparse) if bool(sparse.any()) else None,
        )

    def _sparse(self, m: CommonAttentionMetadata, chosen: torch.Tensor) -> SparseBatch:
        requests = chosen.nonzero().squeeze(1)
        query_start_loc, tokens = _pack(m.query_start_loc, requests)
        batch = RequestBatch(query_start_loc, m.seq_lens[requests], m.block_table_tensor[requests], self.max_decode_query_len)
        return SparseBatch(batch, tokens)

    def _dense(self, m: CommonAttentionMetadata, chosen: torch.Tensor, decodes: torch.Tensor) -> DenseBatch:
        """Renumbers the requests' blocks for a scratch cache and lets the stock builder plan its kernel over it."""
        tokens: torch.Tensor | None = None
        if not bool(chosen.all()):
            requests = chosen.nonzero().squeeze(1)
            query_start_loc, tokens = _pack(m.query_start_loc, requests)
            m = m.replace(
                query_start_loc=query_start_loc,
                query_start_loc_cpu=query_start_loc,
                seq_lens=m.seq_lens[requests],
                num_reqs=requests.numel(),
                num_actual_tokens=tokens.numel(),
                block_table_tensor=m.block_table_tensor[requests],
                slot_mapping=m.slot_mapping[tokens],
            )
        num_blocks = (m.seq_lens + BLOCK_SIZE - 1) // BLOCK_SIZE
        table = m.block_table_tensor[:, : int(num_blocks.max())]
        used = torch.arange(table.shape[1]) < num_blocks.unsqueeze(1)
        pool_blocks, scratch = torch.unique(table[used], return_inverse=True)
        scratch_table = torch.zeros_like(table)
        scratch_table[used] = scratch.to(table.dtype)
        last = scratch_table.gather(1, (num_blocks.long() - 1).unsqueeze(1)).squeeze(1)
        in_last = (m.seq_lens - 1) % BLOCK_SIZE + 1
        return DenseBatch(
            metadata=super().build(0, m.replace(block_table_tensor=scratch_table)),
            pool_blocks=pool_blocks.to(torch.int32),
            part_filled=[(b, n) for b, n in zip(last.tolist(), in_last.tolist(), strict=True) if n < BLOCK_SIZE],
            num_rows=int(m.seq_lens.sum()),
            num_decodes=int(decodes.sum()),
            tokens=tokens,
        )


class SparseCPUImpl(SparseImplMixin, CPUAttentionBackendImpl):
    def allocate(self, layout: KVLayout, basis: SketchBasis, device: torch.device) -> LayerPool:
        return allocate_layer(layout, self.config.num_blocks, basis, allocate_cpu_rows, device)

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: SparseCPUMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """`query [T, Hq, D]`; `output` likewise, written in place. `kv_cache` is the virtual page, never looked at."""
        if attn_metadata is None:  # vLLM measures the memory of a forward pass
            return output.fill_(0)
        if (dense := attn_metadata.dense) is not None:
            if dense.tokens is None:
                self._attend_densely(layer, query, dense, output)
            else:
                out = torch.empty(dense.tokens.numel(), self.num_heads, self.head_size, dtype=output.dtype)
                self._attend_densely(layer, query[dense.tokens], dense, out)
                output[dense.tokens] = out
        if (sparse := attn_metadata.sparse) is not None:
            output[sparse.tokens] = self.decode(query[sparse.tokens], sparse.requests).to(output.dtype)
        return output

    def _attend_densely(self, layer: Any, query: torch.Tensor, batch: DenseBatch, output: torch.Tensor) -> None:
        """vLLM's kernel over the requests' rows, gathered from the pool."""
        layout = self.pool.layout
        scales = None if self.pool.row_scales is None else self.pool.row_scales[batch.pool_blocks]
        key, value = _key_value(self.pool.rows[batch.pool_blocks], scales, layout, query.dtype)
        for block, filled in batch.part_filled:
            key[block, :, filled:] = 0
            value[block, :, filled:] = 0
        scratch = torch.empty(*key.shape[:3], 2 * self.head_size, dtype=query.dtype)
        # vLLM packs keys for its kernel, each (block, head) by itself. Seen as blocks of one head, ours need no transposing.
        CPUAttentionBackendImpl.do_kv_cache_update(
            self,
            layer,
            key.view(-1, 1, self.head_size),
            value.view(-1, 1, self.head_size),
            scratch.view(-1, 1, BLOCK_SIZE, 2 * self.head_size),
            torch.arange(key[..., 0].numel()),
        )
        CPUAttentionBackendImpl.forward(self, layer, query, key, value, scratch, batch.metadata, output)
        self.counters.add("dense_bytes", batch.num_rows * layout.num_kv_heads * layout.row_bytes)
        if self.counts_requests:
            self.counters.add("dense_requests", batch.num_decodes)


def _key_value(
    rows: torch.Tensor, scales: torch.Tensor | None, layout: KVLayout, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows `[M, Hkv, B, row_bytes]` and scales `[M, Hkv, B, 2]` as keys and values `[M, Hkv, B, D]` in the model's dtype; views where
    they are that already."""
    if layout.row_format == "bf16":
        both = rows.view(torch.bfloat16)
        key, value = both[..., : layout.head_dim], both[..., layout.head_dim :]
    else:
        key, value = dequantise_rows(rows, scales, layout)
    return key.to(dtype), value.to(dtype)


def _pack(query_start_loc: torch.Tensor, requests: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Packs the query rows of `requests` `[n]`: their own `query_start_loc [n + 1]` int32 and their rows `[T]` int64."""
    starts, ends = query_start_loc[requests].long(), query_start_loc[requests + 1].long()
    lengths = ends - starts
    own = torch.zeros(requests.numel() + 1, dtype=torch.int32)
    own[1:] = lengths.cumsum(0)
    offset = torch.arange(int(own[-1])) - own[:-1].long().repeat_interleave(lengths)
    return own, starts.repeat_interleave(lengths) + offset
