"""Dense attention over the same contexts by the kernels vLLM 0.31 would use, KV on the GPU. vLLM is imported only here, if it is there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from .registry import Shape

BLOCK = 128
HEADS, KV_HEADS, DIM = 24, 4, 256
Run = Callable[[], torch.Tensor]


@dataclass(frozen=True)
class Batch:
    """What every dense kernel gets; only the cache differs."""

    shape: Shape
    query: torch.Tensor
    out: torch.Tensor
    starts: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor

    @classmethod
    def random(cls, shape: Shape) -> Batch:
        tokens, blocks = shape.requests * shape.query_len, shape.max_blocks
        query = torch.randn(tokens, HEADS, DIM, dtype=torch.bfloat16, device="cuda")
        return cls(
            shape,
            query,
            torch.empty_like(query),
            torch.arange(0, tokens + 1, shape.query_len, dtype=torch.int32, device="cuda"),
            torch.full((shape.requests,), shape.context, dtype=torch.int32, device="cuda"),
            torch.randperm(shape.requests * blocks, device="cuda").view(shape.requests, blocks).int(),
        )

    @property
    def cache_shape(self) -> tuple[int, int, int, int]:
        return self.block_table.numel(), BLOCK, KV_HEADS, DIM


def dense_baselines(shape: Shape) -> tuple[dict[str, Run], dict[str, str]]:
    """The dense kernels that run here, and for each other one why it does not."""
    batch, usable, missing = Batch.random(shape), {}, {}
    for name, build in BUILDERS.items():
        try:
            run = build(batch)
            run()
            torch.cuda.synchronize()
            usable[name] = run
        except Exception as error:  # whatever vLLM's build lacks here, the others still count
            missing[name] = f"{type(error).__name__}: {error}".splitlines()[0]
    return usable, missing


def flash_attention_3(batch: Batch, dtype: torch.dtype) -> Run:
    """As `v1/attention/backends/flash_attn.py` calls it, scheduled ahead of time with at most 32 splits."""
    from vllm.vllm_flash_attn import flash_attn_varlen_func, get_scheduler_metadata

    key, value = (torch.randn(batch.cache_shape, dtype=torch.bfloat16, device="cuda").to(dtype) for _ in range(2))
    query = batch.query.to(dtype)
    descale = None if dtype == torch.bfloat16 else torch.ones(batch.shape.requests, KV_HEADS, device="cuda")
    schedule = get_scheduler_metadata(
        batch_size=batch.shape.requests,
        max_seqlen_q=batch.shape.query_len,
        max_seqlen_k=batch.shape.context,
        num_heads_q=HEADS,
        num_heads_kv=KV_HEADS,
        headdim=DIM,
        cache_seqlens=batch.seq_lens,
        qkv_dtype=dtype,
        cu_seqlens_q=batch.starts,
        page_size=BLOCK,
        causal=True,
        num_splits=32,
    )
    return lambda: flash_attn_varlen_func(
        q=query,
        k=key,
        v=value,
        out=batch.out,
        cu_seqlens_q=batch.starts,
        max_seqlen_q=batch.shape.query_len,
        seqused_k=batch.seq_lens,
        max_seqlen_k=batch.shape.context,
        softmax_scale=DIM**-0.5,
        causal=True,
        block_table=batch.block_table,
        fa_version=3,
        scheduler_metadata=schedule,
        num_splits=32,
        q_descale=descale,
        k_descale=descale,
        v_descale=descale,
    )


def triton_attention(batch: Batch, mode: str) -> Run:
    """vLLM's Triton attention over a quantised cache, with the split buffers its metadata builder would allocate."""
    from vllm.v1.attention.backends.triton_attn import MIN_LAUNCH_GRID_SIZE_2D, NUM_PAR_SOFTMAX_SEGMENTS
    from vllm.v1.attention.ops.triton_unified_attention import unified_attention
    from vllm.v1.kv_cache_interface import KVQuantMode

    packed = DIM // 2 if mode == "INT4_PER_TOKEN_HEAD" else DIM
    half = packed + 4
    rows = torch.empty(batch.block_table.numel(), KV_HEADS, BLOCK, 2 * half, dtype=torch.uint8, device="cuda").random_(0, 0x70)
    rows.view(torch.float32)[..., half // 4 - 1 :: half // 4] = 0.01
    dtype = {"INT8_PER_TOKEN_HEAD": torch.int8, "FP8_PER_TOKEN_HEAD": torch.float8_e4m3fn, "INT4_PER_TOKEN_HEAD": torch.uint8}[mode]
    codes, scales = rows.view(dtype).transpose(1, 2), rows.view(torch.float32).transpose(1, 2)
    threshold = MIN_LAUNCH_GRID_SIZE_2D // KV_HEADS
    segments = (threshold, HEADS, NUM_PAR_SOFTMAX_SEGMENTS)
    buffers = [torch.empty(size, device="cuda") for size in ((*segments, DIM), segments, segments)]
    return lambda: unified_attention(
        q=batch.query,
        k=codes[..., :packed],
        v=codes[..., half : half + packed],
        out=batch.out,
        cu_seqlens_q=batch.starts,
        max_seqlen_q=batch.shape.query_len,
        seqused_k=batch.seq_lens,
        max_seqlen_k=batch.shape.context,
        softmax_scale=DIM**-0.5,
        causal=True,
        window_size=(-1, -1),
        block_table=batch.block_table,
        softcap=0,
        q_descale=None,
        k_descale=None,
        v_descale=None,
        seq_threshold_3D=threshold,
        num_par_softmax_segments=NUM_PAR_SOFTMAX_SEGMENTS,
        softmax_segm_output=buffers[0],
        softmax_segm_max=buffers[1],
        softmax_segm_expsum=buffers[2],
        kv_quant_mode=KVQuantMode[mode],
        k_scale_cache=scales[..., half // 4 - 1],
        v_scale_cache=scales[..., 2 * (half // 4) - 1],
    )


BUILDERS: dict[str, Callable[[Batch], Run]] = {
    "fa3_bf16": lambda batch: flash_attention_3(batch, torch.bfloat16),
    "fa3_fp8": lambda batch: flash_attention_3(batch, torch.float8_e4m3fn),
    "vllm_triton_int8": lambda batch: triton_attention(batch, "INT8_PER_TOKEN_HEAD"),
    "vllm_triton_fp8": lambda batch: triton_attention(batch, "FP8_PER_TOKEN_HEAD"),
    "vllm_triton_int4": lambda batch: triton_attention(batch, "INT4_PER_TOKEN_HEAD"),
}
