"""Triton version of `stage`: the blocks cross the bus as whole lines, then their rows are dequantised on the device.

Two launches: rows of 264 or 520 bytes read in place would ask for most lines twice, and the bus is the limit.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..hadamard import device_signs, hadamard
from ..layout import KVLayout

COPY_WORDS = 2048
"""8-byte words one program copies: 16 KiB."""


@triton.jit(do_not_specialize=["first_block", "first_word", "last_word"])
def copy_blocks_kernel(
    pool_ptr,
    block_table_ptr,
    raw_ptr,
    first_block,
    first_word,
    last_word,
    HEADS: tl.constexpr,
    HEAD_WORDS: tl.constexpr,
    WORDS: tl.constexpr,
):
    """Copies the words `[first_word, last_word)` of every head's rows, counted from the start of the first block."""
    index, head = tl.program_id(1), tl.program_id(2)
    word = tl.program_id(0) * WORDS + tl.arange(0, WORDS)
    block = tl.load(block_table_ptr + first_block + index).to(tl.int64)
    line = (index * HEAD_WORDS + word) // 16 * 16  # whole lines, so that loads are wide
    wanted = (word < HEAD_WORDS) & (line + 16 > first_word) & (line < last_word)
    data = tl.load(pool_ptr + (block * HEADS + head) * HEAD_WORDS + word, mask=wanted, other=0)
    tl.store(raw_ptr + (index.to(tl.int64) * HEADS + head) * HEAD_WORDS + word, data, mask=wanted)


@triton.jit(do_not_specialize=["offset", "num_tokens"])
def dequantise_kernel(
    codes_ptr,
    scale_bits_ptr,
    signs_ptr,
    key_out_ptr,
    value_out_ptr,
    offset,
    num_tokens,
    FORMAT: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    DIM: tl.constexpr,
    LOG2_DIM: tl.constexpr,
    ROW_STRIDE: tl.constexpr,
    VALUE_OFFSET: tl.constexpr,
    TILE: tl.constexpr,
):
    index = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    head = tl.program_id(1)
    used = index < num_tokens
    token = offset + index
    row = (token // BLOCK * HEADS + head) * BLOCK + token % BLOCK
    dim = tl.arange(0, DIM)
    cell = (index * HEADS + head)[:, None] * DIM + dim[None, :]
    for half in tl.static_range(2):
        out_ptr = value_out_ptr if half else key_out_ptr
        if FORMAT == "bf16":
            x = tl.load(codes_ptr + row[:, None] * ROW_STRIDE + half * DIM + dim[None, :], mask=used[:, None], other=0.0).to(tl.float32)
        else:
            bits = tl.load(scale_bits_ptr + row * (ROW_STRIDE // 4) + (half + 1) * (VALUE_OFFSET // 4) - 1, mask=used, other=0)
            if FORMAT == "int8":
                codes = tl.load(codes_ptr + row[:, None] * ROW_STRIDE + half * VALUE_OFFSET + dim[None, :], mask=used[:, None], other=0)
                x = codes.to(tl.float32) * bits.to(tl.float32, bitcast=True)[:, None]
            else:
                byte = tl.arange(0, DIM // 2)
                codes = tl.load(codes_ptr + row[:, None] * ROW_STRIDE + half * VALUE_OFFSET + byte[None, :], mask=used[:, None], other=0)
                x = tl.reshape(tl.join((codes & 0xF).to(tl.float32), (codes >> 4).to(tl.float32)), (TILE, DIM))
                x = hadamard(x - (bits & 0xF).to(tl.float32)[:, None], TILE, DIM, LOG2_DIM)  # small integers: exact
                x *= (bits & -16).to(tl.float32, bitcast=True)[:, None] * (tl.load(signs_ptr + dim) / DIM)[None, :]
        tl.store(out_ptr + cell, x.to(out_ptr.dtype.element_ty), mask=used[:, None])


def stage(
    rows: torch.Tensor,
    block_table: torch.Tensor,
    request: int,
    start: int,
    end: int,
    layout: KVLayout,
    key_out: torch.Tensor,
    value_out: torch.Tensor,
) -> None:
    if start >= end:
        return
    heads, block_size, dim = layout.num_kv_heads, layout.block_size, layout.head_dim
    first_block, blocks = start // block_size, -(-end // block_size) - start // block_size
    offset = start - first_block * block_size
    row_words = layout.row_bytes // 8
    raw = torch.empty(layout.rows_shape(blocks), dtype=torch.uint8, device=key_out.device)
    copy_blocks_kernel[(triton.cdiv(block_size * row_words, COPY_WORDS), blocks, heads)](
        rows.view(torch.int64),
        block_table[request],
        raw.view(torch.int64),
        first_block,
        offset * row_words,
        (offset + end - start) * row_words,
        HEADS=heads,
        HEAD_WORDS=block_size * row_words,
        WORDS=COPY_WORDS,
    )
    codes = raw.view({"bf16": torch.bfloat16, "int8": torch.int8, "int4": torch.uint8}[layout.row_format])
    rotated = layout.row_format == "int4"
    tile = 4 if rotated else 16  # one warp transforms without barriers
    dequantise_kernel[(triton.cdiv(end - start, tile), heads)](
        codes,
        raw.view(torch.int32),
        device_signs(dim, raw.device) if rotated else codes,
        key_out,
        value_out,
        offset,
        end - start,
        FORMAT=layout.row_format,
        HEADS=heads,
        BLOCK=block_size,
        DIM=dim,
        LOG2_DIM=dim.bit_length() - 1,
        ROW_STRIDE=codes.shape[-1],
        VALUE_OFFSET=layout.value_offset,
        TILE=tile,
        num_warps=1 if rotated else 4,
    )
